"""`megatron-loco ablate`: one base recipe, many settings, several seeds, and what the differences are worth.

command.py      the options; the loop over the runs
definition.py   configs/ablations/NAME.yaml -> cells, and the runs of every seed
statistics.py   the mean of paired differences and its confidence interval
results.py      results.csv, ablation.md, the tables
records.py      results.csv read back
curves.py       results_curves.csv: how the runs went, step by step
plots.py        differences.png, curves.png
"""
