"""`python -m benchmarks.network`: training over slow links on one machine (docs/benchmarks.md).

command.py             the options, and the order of the measurements
plan.py, methods.py    the cells in their order; the methods by name
hosts.py, lifeline.py  namespaces, switch and rates; no process outlives the command
ranks.py, agent.py     start torchrun on every host, and send its ranks their orders
rank.py                what a rank runs
training.py            the training that is timed: llama.py is its model's shape, megatron_training.py and
                       ddp_training.py wrap the model, gloo_fixes.py makes gloo use both directions of a link
results.py, plot.py    rows, byte limits and table; network.png
progress.py            what the terminal shows meanwhile
"""
