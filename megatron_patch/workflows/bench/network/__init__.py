"""`megatron-loco bench network`: training over real slow links, on one machine (docs/benchmarks.md).

command.py   the options
hosts.py     namespaces, switch, rates
methods.py   what is compared, by name
ranks.py     torchrun on every host, and the channel on which its ranks are told what to measure
agent.py     what a host runs: torchrun's agent
rank.py      what a rank runs
results.py   rows, limits, table
plot.py      network.png
plan.py      the cells, in their order
progress.py  what is shown meanwhile
lifeline.py  nobody outlives the command
"""
