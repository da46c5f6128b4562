"""`megatron-loco bench network`: training over real slow links, on one machine (docs/network.md).

command.py   the options, the order of the cells, what is shown meanwhile
hosts.py     namespaces, switch, rates
methods.py   what is compared, by name
launch.py    torchrun on every host, and the channel on which its ranks are told what to measure
agent.py     what a host runs: torchrun's agent
rank.py      what a rank runs
results.py   rows, limits, table
plot.py   network.png
lifeline.py  nobody outlives the command
"""
