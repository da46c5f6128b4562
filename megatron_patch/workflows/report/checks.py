"""Names that run_folder.py still looks for here."""

from megatron_patch.workflows.run_reader import check_summary, is_number

__all__ = ["check_summary", "is_number"]
