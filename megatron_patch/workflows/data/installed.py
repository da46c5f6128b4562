"""A name that prepare.py still looks for here."""

from megatron_patch.workflows.data.corpus import parse_source

__all__ = ["parse_source"]
