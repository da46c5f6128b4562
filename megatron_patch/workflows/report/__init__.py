"""`megatron-loco report`: runs' folders to one HTML page that needs nothing else.

runs.py     a run's folder, read as far as the run has got
groups.py   runs that differ in their seeds alone are one configuration; names; what differs
table.py    the numbers of the summary table
figures.py  a quantity's curves to an SVG picture
page.py     all of it into page.html
command.py  the command line's way in
"""
