"""`python -m benchmarks.gpu`."""

import sys

from benchmarks.command_line import main
from benchmarks.gpu import command

sys.exit(main(command))
