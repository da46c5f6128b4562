"""`python -m benchmarks.kernels`."""

import sys

from benchmarks.command_line import main
from benchmarks.kernels import command

sys.exit(main(command))
