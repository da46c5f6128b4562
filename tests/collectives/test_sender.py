"""One sender over several steps, against the float64 simulation of all ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from coded_values import coded_values
from seeds import seeded
from simulation.agreement import Agreement
from simulation.codes import round_to_gradient_dtype
from simulation.loco_float64 import LoCoSimulation

from megatron_patch.collectives.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.loco import STATISTICS
from megatron_patch.quantization.layout import BlockLayout

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RANKS, SHARD = 3, 75


def gradients_of(step: int, dtype: str = "fp32", ranks: int = RANKS, shard: int = SHARD) -> np.ndarray:
    """[ranks, ranks*shard]: magnitudes differ between stretches of 16, one stretch of each rank is zero."""
    random = np.random.default_rng(seeded(1000 + step))
    numel = ranks * shard
    size = np.exp(random.uniform(-8, 0, size=-(-numel // 16))).repeat(16)[:numel]
    values = (random.standard_normal((ranks, numel)) * size).astype(np.float32)
    for rank in range(ranks):
        values[rank, 32 * rank : 32 * rank + 32] = 0
    return round_to_gradient_dtype(values, dtype)


class Senders:
    """The senders of all ranks, in one process, with what they sent and remember."""

    def __init__(self, config: CompressionConfig, ranks: int = RANKS, shard: int = SHARD):
        self.layout = BlockLayout.of(ranks * shard, ranks, config.bits, config.block_size)
        self.senders = [Sender(config, self.layout, CPU) for _ in range(ranks)]
        self.payloads = torch.zeros(ranks, ranks, self.layout.payload_bytes, dtype=torch.uint8)

    def step(self, gradients: np.ndarray, dtype: str = "fp32") -> np.ndarray:
        """Every rank compresses its row; returns the decoded [ranks, numel]."""
        for rank, sender in enumerate(self.senders):
            gradient = torch.from_numpy(gradients[rank]).to(DTYPES[dtype])
            before = gradient.clone()
            self.payloads[rank] = 0xEE
            sender.compress(gradient, self.payloads[rank])
            assert torch.equal(gradient.nan_to_num(7), before.nan_to_num(7)), "the gradient is only read"
        return np.stack(
            [coded_values(self.layout, self.senders[0].codec.decode(p, self.layout)) for p in self.payloads]
        )

    def errors(self) -> np.ndarray:
        return np.stack([coded_values(self.layout, sender.error.decode()) for sender in self.senders])

    def reset(self) -> None:
        for sender in self.senders:
            sender.error.reset()


COMBINATIONS = [
    *itertools.product([8, 4, 2, 1], [0.0, 0.5, 0.8], ["int8", "bf16", "fp32"], ["fp32"], [16], [None]),
    *itertools.product([4, 1], [0.8], ["int8"], ["bf16", "fp16"], [16, 64, "shard"], [None]),
    *itertools.product([8, 4, 2], [0.0, 0.8], ["int8"], ["fp32"], [16, 128], ["uniform"]),
    *itertools.product([4, 2], [0.5], ["int8"], ["fp32"], [32], ["levels"]),
]
"""The last: the codec, None for the default of the bits; each without and with a rotation."""


@pytest.mark.parametrize(("bits", "beta", "error_dtype", "dtype", "block_size", "codec"), COMBINATIONS)
@pytest.mark.parametrize("rotation", [None, "none", "hadamard"])
def test_steps_and_resets_follow_the_simulation(bits, beta, error_dtype, dtype, block_size, codec, rotation):
    if block_size == "shard" and rotation == "hadamard":
        pytest.skip("one scale a shard is not rotated")
    code = {"codec": codec, "rotation": rotation}
    config = CompressionConfig(
        bits=bits, error_beta=beta, error_dtype=error_dtype, block_size=block_size, reset_interval=4, **code
    )
    senders = Senders(config)
    agreement = Agreement(
        LoCoSimulation(
            RANKS,
            RANKS * SHARD,
            bits=bits,
            beta=beta,
            error_dtype=error_dtype,
            block_size=block_size,
            reset_interval=4,
            gradient_dtype=dtype,
            **code,
        )
    )
    for step in range(1, 8):
        gradients = gradients_of(step, dtype)
        sent = senders.step(gradients, dtype)
        if step == 4:
            senders.reset()
        errors = senders.errors()
        assert errors.any() == (step != 4)
        agreement.check(gradients, sent=sent, errors=errors)


def test_error_feedback_is_loco_with_beta_zero():
    classic = Senders(CompressionConfig(method="error_feedback"))
    loco = Senders(CompressionConfig(method="loco", error_beta=0))
    for step in range(3):
        assert np.array_equal(classic.step(gradients_of(step)), loco.step(gradients_of(step)))


@pytest.mark.parametrize("error_dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("bits", [4, 1])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_block_that_is_not_finite_keeps_its_error_and_the_others_go_on(error_dtype, bits, poison):
    config = CompressionConfig(method="loco", bits=bits, block_size=16, error_dtype=error_dtype)
    senders = Senders(config)
    agreement = Agreement(
        LoCoSimulation(RANKS, RANKS * SHARD, bits=bits, block_size=16, error_dtype=error_dtype)
    )
    for step in range(1, 6):
        gradients = gradients_of(step)
        before = senders.errors()
        if step == 3:
            gradients[1, SHARD + 20] = poison  # block 1 of shard 1
        agreement.check(gradients, sent=(sent := senders.step(gradients)), errors=senders.errors())
        if step == 3:
            hit = slice(SHARD + 16, SHARD + 32)
            assert np.isnan(sent[1, hit]).all()
            assert np.isnan(sent).sum() == 16
            assert np.array_equal(senders.errors()[1, hit], before[1, hit])
            assert before[1, hit].any()
            assert senders.senders[1].statistics[STATISTICS.index("non_finite_blocks")] == 1
            assert torch.isfinite(senders.senders[1].statistics).all()


@pytest.mark.parametrize(("bits", "rotated"), [(4, True), (4, False), (1, False)])
def test_statistics_are_the_energies_of_the_step(bits, rotated):
    rotation = "hadamard" if rotated else "none"
    senders = Senders(CompressionConfig(method="loco", bits=bits, block_size=16, rotation=rotation))
    for step in range(3):
        gradients = gradients_of(step).astype(np.float64)
        before = senders.errors().astype(np.float64)
        sent = senders.step(gradients.astype(np.float32)).astype(np.float64)
    if rotated:
        gradients = LoCoSimulation(RANKS, RANKS * SHARD, bits=4, block_size=16).rotated(gradients)
    h = gradients + before
    for rank, sender in enumerate(senders.senders):
        measured = dict(zip(STATISTICS, sender.statistics.tolist(), strict=True))
        wanted = {
            "signal": (h[rank] ** 2).sum(),
            "noise": ((h[rank] - sent[rank]) ** 2).sum(),
            "gradient": (gradients[rank] ** 2).sum(),
            "error": (before[rank] ** 2).sum(),
            "non_finite_blocks": 0,
        }
        assert measured == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("error_dtype", ["int8", "bf16", "fp32"])
def test_the_error_follows_the_loss_scale(error_dtype):
    senders = Senders(CompressionConfig(method="loco", error_dtype=error_dtype))
    senders.step(gradients_of(0))
    before = senders.errors()
    for factor in (0.5, 4.0):
        for sender in senders.senders:
            sender.error.scale_by(factor)
        before = before * np.float32(factor)
        assert np.array_equal(senders.errors(), before)
