"""`python -m megatron_patch.launch SCRIPT.py ...`: see megatron/run_script.py."""

import sys

from megatron_patch.megatron.run_script import main

if __name__ == "__main__":
    if sys.argv[1:2] == ["--dry-run"]:
        from megatron_patch.workflows import cli
        from megatron_patch.workflows.run import command_line

        sys.exit(cli.guarded(lambda: command_line.dry_run(sys.argv[2:])))
    sys.exit(main(sys.argv[1:]))
