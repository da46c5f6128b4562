"""A codec and an exchange from a user's own file: they train, and are saved and resumed."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from with_megatron import gpt_model, tiny_model
from with_megatron.checkpoint.whole_checkpoints import interrupted
from with_megatron.recording import weights
from with_megatron.seam_runs import attach, refusal

import megatron_patch
from megatron_patch.collectives.all_reduce import AllReduce
from megatron_patch.collectives.reduce_scatter import ReduceScatter
from megatron_patch.quantization.codec import Encoded
from megatron_patch.quantization.payload import read_payload, write_payload
from megatron_patch.quantization.uniform import Uniform

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_scripts" / "own_codec.py"
STEPS = 5


def own_codec() -> Any:
    """The script as a module, imported as by a user who stands beside it."""
    if "own_codec" not in sys.modules:
        spec = importlib.util.spec_from_file_location("own_codec", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["own_codec"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["own_codec"])
    return sys.modules["own_codec"]


def trained(options: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the weights after STEPS steps, and what the report says."""
    own_codec()
    gpt = gpt_model.build()
    attach(gpt.chunks, options)
    for step in range(STEPS):
        gpt.step(step)
    gpt.gather()
    found = weights(gpt) | {"bits": megatron_patch.report().bits_per_gradient}
    megatron_patch.disable()
    return found


def resumed(folder: str, how: str) -> dict[str, Any]:
    """In a worker: `interrupted`, with the user's codec imported."""
    own_codec()
    return interrupted(folder, {}, {"codec": "fp8", "method": "loco", "start_step": 0}, how)


def test_the_page_shows_the_script_whole_in_30_lines_of_code():
    source = SCRIPT.read_text(encoding="utf-8")
    assert f"\n```python\n{source}```\n" in (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    _, *rest = ast.parse(source).body
    lines = {n for one in rest for n in range(one.lineno, (one.end_lineno or 0) + 1)}
    assert len([n for n in lines if source.splitlines()[n - 1].strip()]) <= 30


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    names = [name for name, value in one.items() if hasattr(value, "shape")]
    assert names
    return max(float(np.abs(np.asarray(one[name]) - np.asarray(other[name])).max()) for name in names)


def test_a_codec_of_ones_own_trains(pool):
    two_hops = {"ranks_per_node": 2}
    own = pool.run(trained, {"codec": "fp8", **two_hops}, world_size=4)
    stock = pool.run(trained, {"method": "none"}, world_size=4)
    coarse = pool.run(trained, {"bits": 2, "method": "naive", **two_hops}, world_size=4)
    uniform = pool.run(trained, {"bits": 8, **two_hops}, world_size=4)
    assert own[0]["bits"] == uniform[0]["bits"]
    assert 0 < largest_difference(own[0], stock[0]) < largest_difference(coarse[0], stock[0]) / 4


def test_its_errors_are_saved_and_resumed(pool, tmp_path):
    whole, forgotten, again = (
        pool.run(resumed, str(tmp_path / how), how, world_size=2)
        for how in ("whole", "forgotten", "by reader")
    )
    assert all(largest_difference(*pair) == 0 for pair in zip(whole, again, strict=True))
    assert largest_difference(whole[0], forgotten[0]) > 0


def attached_with_a_wrong_codec(fault: str) -> str:
    """In a worker: what is said when a model is attached with a codec that has this fault."""

    class Faulty(Uniform):
        def encode(self, h: Any, layout: Any, payload: Any) -> Encoded:
            codes, scales = self.quantize(h)
            finite = torch.isfinite(scales)
            stored = torch.where(finite, scales, 0.0) if fault == "NaN as zeros" else scales
            room = torch.empty_like(payload)
            write_payload(codes, stored, layout, room)
            length = payload.shape[1] - (2 if fault == "unwritten" else 0)
            payload[:, :length] = room[:, :length]
            if fault == "NaN is finite":
                finite = torch.ones_like(finite)
            return Encoded(codes.float() * torch.where(scales.isfinite(), scales, 0.0)[..., None], finite)

        def decode(self, payload: Any, layout: Any) -> Any:
            codes, scales = read_payload(payload, layout)
            signed = codes if fault == "unsigned" else codes << 8 - self.bits >> 8 - self.bits
            return signed.float() * scales[..., None]

    megatron_patch.register_codec(f"faulty_{len(fault)}", bits=[4])(Faulty)
    tiny = tiny_model.build()

    def train() -> None:
        attach([tiny.ddp], {"codec": f"faulty_{len(fault)}"})
        tiny.step(tiny.random_gradients(0))

    said = refusal(train)
    assert not said or all("start_grad_sync" not in vars(group) for group in tiny.groups), "attached by half"
    return said or "trains"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", "trains"),
        ("unsigned", "without a sign"),
        ("NaN as zeros", "encode returns 0 (finite: False) and decode 0"),
        ("NaN is finite", "encode returns 0 (finite: True) and decode nan"),
        ("unwritten", "does not write every byte"),
    ],
)
def test_a_codec_that_does_not_decode_what_it_encodes_is_refused(pool, fault, said):
    for told in pool.run(attached_with_a_wrong_codec, fault, world_size=2):
        assert said in told
        assert len(told.splitlines()) == 1


def through_own_exchange() -> tuple[float, list[str]]:
    """In a worker: the largest difference to the flat exchanges that it consists of, and what was made."""
    made = []

    @megatron_patch.register_exchange("counted")
    class Counted:
        @staticmethod
        def reduce_scatter(*arguments: Any) -> Any:
            made.append("reduce_scatter")
            return ReduceScatter(*arguments)

        @staticmethod
        def all_reduce(*arguments: Any) -> Any:
            made.append("all_reduce")
            return AllReduce(*arguments)

    own, flat = (trained({"topology": name}) for name in ("counted", "flat"))
    return largest_difference(own, flat), made


def test_an_exchange_of_ones_own_carries_the_buckets(pool):
    for difference, made in pool.run(through_own_exchange, world_size=2):
        assert difference == 0
        assert made
        assert set(made) <= {"reduce_scatter", "all_reduce"}
