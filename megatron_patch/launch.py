"""`python -m megatron_patch.launch SCRIPT.py ...`: see integration/launch.py."""

import sys

from megatron_patch.integration.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
