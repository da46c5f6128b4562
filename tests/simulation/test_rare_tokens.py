"""Tokens that are rare while 1-bit Adam's variance is made: a model of byte pairs on the text of a licence.

Without the bound of a step their rows move by hundreds of learning rates, and the loss does not show it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulation.onebit_adam_float64 import OneBitAdamSimulation, shard_blocks

TEXT = np.frombuffer(Path(__file__).parents[2].joinpath("LICENSE").read_bytes(), np.uint8)
BYTES, WIDTH, WARM_UP, STEPS, BATCH = 256, 16, 60, 200, 128


def trained(bound: float) -> tuple[float, float, float]:
    """(mean loss of the last 20 steps, the largest weight, the largest step in learning rates)."""
    draw = np.random.default_rng(1)
    cut = BYTES * WIDTH
    simulation = OneBitAdamSimulation(
        0.02 * draw.standard_normal(2 * cut),
        [2 * cut],
        workers=2,
        warmup_steps=WARM_UP,
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        clip=1.0,
        blocks=[shard_blocks(np.arange(2 * cut) // WIDTH, 2, WIDTH)],
    )
    simulation.bound = bound
    losses = []
    for _ in range(STEPS):
        into, out = simulation.x.reshape(2, BYTES, WIDTH)
        gradients = np.zeros((2, 2, BYTES, WIDTH))
        for gradient in gradients:
            at = draw.integers(0, len(TEXT) - 1, BATCH)
            before, after = TEXT[at], TEXT[at + 1]
            logits = into[before] @ out.T
            likely = np.exp(logits - logits.max(axis=1, keepdims=True))
            likely /= likely.sum(axis=1, keepdims=True)
            losses.append(-np.log(likely[np.arange(BATCH), after]).mean())
            likely[np.arange(BATCH), after] -= 1
            np.add.at(gradient[0], before, likely @ out / BATCH)
            gradient[1] = likely.T @ into[before] / BATCH
        simulation.step(gradients.reshape(2, -1))
    return float(np.mean(losses[-40:])), float(np.abs(simulation.x).max()), simulation.largest


def test_rows_that_were_rare_in_the_warm_up_stay_near_and_the_loss_where_it_was() -> None:
    loss, largest, step = trained(3.0)
    free_loss, free_largest, free_step = trained(np.inf)
    assert free_step > 50, "the case is one"
    assert step <= 3
    assert free_largest > 3 * largest
    assert loss < 1.005 * free_loss
