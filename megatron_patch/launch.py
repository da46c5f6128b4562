"""`python -m megatron_patch.launch SCRIPT.py ...`: see megatron/run_script.py."""

import sys

from megatron_patch.megatron.run_script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
