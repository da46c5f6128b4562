"""`python -m benchmarks.gpu_report`."""

import sys

from benchmarks.command_line import main
from benchmarks.gpu_report import command

sys.exit(main(command))
