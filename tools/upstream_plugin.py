"""A pytest plugin for Megatron-LM's own tests: on a CPU where there is no GPU, and, if asked, under `enable`.

MEGATRON_LOCO_ENABLE=1 attaches method none to every DistributedDataParallel that the tests build.
MEGATRON_LOCO_RESULTS names a file to which each rank, with its number behind the name, adds what every test
said: what ranks print is mixed.
"""

import functools
import os
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron_patch.megatron.cpu import device, torch_adam

    device.install()
    torch_adam.install()
    _original = torch.distributed.init_process_group

    @functools.wraps(_original)
    def _over_gloo(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return _original("gloo", *args, **kwargs)

    torch.distributed.init_process_group = _over_gloo

if os.environ.get("MEGATRON_LOCO_ENABLE"):
    import megatron_patch

    megatron_patch.enable(megatron_patch.CompressionConfig(method="none"))


def pytest_runtest_logreport(report: Any) -> None:
    results = os.environ.get("MEGATRON_LOCO_RESULTS")
    if results and (report.when == "call" or report.outcome != "passed"):
        with Path(f"{results}.{os.environ.get('RANK', '0')}").open("a", encoding="utf-8") as file:
            file.write(f"{report.outcome} {report.when} {report.nodeid}\n")
