"""Measures how much of a gradient's energy each code loses, by kind of parameter and step of a real training.

    megatron-loco train configs/models/llama_tiny.yaml \
        launch.script=benchmarks/error_feedback/lost_energy.py compression.method=none --out runs/lost_energy

It runs Megatron's pretrain_gpt.py. At some steps every matrix of rank 0's own gradient is encoded and decoded
with each code, without error feedback, before it enters the exchange. lost_energy.json and lost_energy.md in
the run's folder have the lost share of the energy, sum |decoded - g|^2 / sum g^2. Training is not changed.
"""

from __future__ import annotations

import inspect
import json
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.training import get_args

from megatron_patch.collectives.sender import Sender, decompress
from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.blocks import Span
from megatron_patch.quantization.layout import BlockLayout

_SCRIPT = Path(__file__).resolve().parents[2] / "pretrain_scripts" / "pretrain_gpt.py"
STEPS = (1, 10, 50, 100, 200)
"""The optimizer steps in which gradients are measured, counted from 1."""
CODES: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4},
    "4, not rotated": {"bits": 4, "rotation": "none"},
    "4, uniform": {"bits": 4, "codec": "uniform"},
    "2 bits": {"bits": 2},
    "2, not rotated": {"bits": 2, "rotation": "none"},
    "2, uniform": {"bits": 2, "codec": "uniform"},
    "1 bit": {"bits": 1},
    "1, rotated": {"bits": 1, "rotation": "hadamard"},
}
"""The options of CompressionConfig for each of the table's headings."""

Energies = dict[str, dict[str, list[float]]]
"""For each "STEP KIND" and each code: [energy lost, energy]."""


def measure(gradient: torch.Tensor, shape: Sequence[int], found: dict[str, list[float]]) -> None:
    """Add the lost and the whole energy of one matrix for each code; `gradient` is flat."""
    span = [Span.of(0, shape)]
    for name, options in CODES.items():
        config = CompressionConfig(method="naive", **options)
        layout = BlockLayout.of(gradient.numel(), 1, config.bits, config.block_size, spans=span)
        sender = Sender(config, layout, gradient.device)
        payload = torch.empty(1, layout.payload_bytes, dtype=torch.uint8, device=gradient.device)
        decoded = torch.empty_like(gradient, dtype=torch.float32)
        sender.compress(gradient, payload)
        decompress(payload, sender.codec, layout, decoded)
        lost, whole = found.setdefault(name, [0.0, 0.0])
        energy = float(gradient.double().square().sum())
        found[name] = [lost + float((decoded - gradient).double().square().sum()), whole + energy]


def kind_of(name: str) -> str:
    """Return a parameter's kind: its name in Megatron without the layer's number and the module's path."""
    return re.sub(r"^module\.|layers\.\d+\.|\.weight$", "", name)


def table(found: Energies) -> str:
    """Return a table in Markdown of the lost shares in percent, a line for each step and kind."""
    lines = ["| step | parameters | " + " | ".join(CODES) + " |", "| --- | --- |" + " --- |" * len(CODES)]
    for where, by_code in found.items():
        step, kind = where.split(" ", 1)
        shares = [f"{100 * lost / whole:.2f}" if whole else "-" for lost, whole in by_code.values()]
        lines.append(f"| {step} | {kind} | " + " | ".join(shares) + " |")
    return "\n".join(lines) + "\n"


def _watch(found: Energies) -> None:
    """Have every bucket group of this process measure its gradients before it exchanges them."""
    names: dict[torch.nn.Parameter, str] = {}
    made, start = buffers._ParamAndGradBuffer.__init__, buffers._ParamAndGradBucketGroup.start_grad_sync
    calls: dict[int, int] = {}

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(made).bind(self, *args, **kwargs)
        names.update(bound.arguments["param_to_name"])
        made(self, *args, **kwargs)

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.grad_reduce_handle is None and torch.distributed.get_rank() == 0:
            step = calls[id(self)] = calls.get(id(self), 0) + 1
            for bucket in self.buckets if step in STEPS else ():
                for parameter, (first, end) in bucket.param_to_index.items():
                    for kind in (kind_of(names[parameter]), "all") if parameter.dim() > 1 else ():
                        of_kind = found.setdefault(f"{step} {kind}", {})
                        measure(bucket.grad_data[first:end], parameter.shape, of_kind)
        return start(self, *args, **kwargs)

    buffers._ParamAndGradBuffer.__init__ = make
    buffers._ParamAndGradBucketGroup.start_grad_sync = start_grad_sync


def main() -> None:
    """Train, then write the table."""
    found: Energies = {}
    _watch(found)
    runpy.run_path(str(_SCRIPT), run_name="__main__")
    if torch.distributed.get_rank() == 0:
        folder = Path(get_args().compression_output)
        (folder / "lost_energy.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        (folder / "lost_energy.md").write_text(table(found), encoding="utf-8")
        print(table(found))


if __name__ == "__main__":
    main()
