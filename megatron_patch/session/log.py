"""The log that a user sees without setting anything up, and the line that says what a configuration is."""

from __future__ import annotations

import logging

from megatron_patch.config import CompressionConfig


def show_log() -> None:
    """Show what compression logs, a few lines a run, unless the script's own logging shows it already.

    A script that wants less sets a level for the logger "megatron_patch".
    """
    logger = logging.getLogger("megatron_patch")
    shown = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    if not shown and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def method_line(config: CompressionConfig) -> str:
    """Method, code, block and errors, in one line; the method must compress."""
    memory = (
        f"beta {config.beta}, errors in {config.error_dtype}" if config.keeps_errors else "no errors kept"
    )
    code = f"{config.bits} bits ({config.code}{', rotated' if config.rotates else ''})"
    return f"{config.method}, {code}, block {config.block_size}, {memory}"
