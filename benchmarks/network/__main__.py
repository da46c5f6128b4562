"""`python -m benchmarks.network`."""

import sys

from benchmarks.command_line import main
from benchmarks.network import command

sys.exit(main(command))
