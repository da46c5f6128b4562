"""`python -m benchmarks.planner`."""

import sys

from benchmarks.command_line import main
from benchmarks.planner import command

sys.exit(main(command))
