"""1-bit Adam in one process and float64, from the paper's algorithm 1 and the text of our documentation.

    warm-up, T steps   g = mean of g_i, clipped by its norm; m, v, x as Adam's
    afterwards         v stays; every worker i:   m_i = b1*m + (1-b1)*c*g_i      a_i = m_i + d_i
                                                  d_i = a_i - C(a_i)
                       the owner of each chunk:   A = mean of C(a_i) + D         D = A - C(A)
                       all:                       m = C(A), and 0 where no parameter lies
                       s = m/(1-b1^t) / (sqrt(v/(1-b2^T)) + eps), within +-3*max(1, (1-b1)/sqrt(1-b2)),
                           and 0 where v = 0
                       x = x - lr*(s + wd*x)
    c                  clip / (norm + 1e-6) where that is below 1, norm that of the mean of g_i

In two hops a node's workers sum their m_i, and the node stands for a worker: its d is of the sum.

C keeps the sign (+ for 0) and, for each block of b elements, the mean of absolute values, rounded up to bf16
as it travels. Blocks are counted from the beginning of every row of every parameter, and cut where an owner's
shard ends, which is at a multiple of b.
"""

from __future__ import annotations

import numpy as np

from simulation.codes import bf16_up
from simulation.loco_float64 import runs

NEAR_TIE = 1e-6


def shard_blocks(labels: np.ndarray, ranks: int, block: int) -> list[slice]:
    """The blocks of a vector that `ranks` owners share; `labels` are block_labels'."""
    size = -(-len(labels) // ranks)
    size = -(-size // block) * block
    return [
        here
        for start in range(0, len(labels), size)
        for here in runs(labels, start, min(start + size, len(labels)))
    ]


def one_bit(values: np.ndarray, blocks: list[slice]) -> tuple[np.ndarray, np.ndarray]:
    """C of a vector, float64, 0 outside of `blocks`; and which blocks are a matter of rounding, bool: the
    sign of one of their elements, or the scale, whose mean is near a bf16 number. Values are known up to
    NEAR_TIE scales."""
    found, undecided = np.zeros_like(values), np.zeros(len(values), dtype=bool)
    for here in blocks:
        part = values[here]
        mean = np.mean(np.abs(part))
        scale, low, high = (float(bf16_up(np.float32(mean * off))) for off in (1, 1 - NEAR_TIE, 1 + NEAR_TIE))
        found[here] = np.where(part >= 0, scale, -scale)
        undecided[here] = low != high or np.any((np.abs(part) < NEAR_TIE * scale) & (part != 0))
    return found, undecided


class OneBitAdamSimulation:
    """All workers' view of one vector of parameters.

    `lengths` are those of vectors that are compressed apart (buckets), laid end to end in `initial`, `blocks`
    those of each (shard_blocks);
    `decay` is the weight decay of every element; `padding` are those that belong to no parameter.
    """

    def __init__(
        self,
        initial: np.ndarray,
        lengths: list[int],
        *,
        workers: int,
        warmup_steps: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decay: np.ndarray | float = 0.0,
        clip: float = 0.0,
        blocks: list[list[slice]],
        compensate: bool = True,
        ranks_per_node: int = 1,
        padding: np.ndarray | None = None,
    ):
        self.x = initial.astype(np.float64)
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.ranks_per_node = ranks_per_node
        self.d = np.zeros((workers // ranks_per_node, len(self.x)))
        self.owners_d = np.zeros_like(self.x)
        ends = np.cumsum(lengths)
        self.parts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.warmup_steps, self.clip, self.blocks, self.compensate = warmup_steps, clip, blocks, compensate
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.undecided = np.zeros(len(self.x), dtype=bool)
        """Blocks that were a matter of rounding once: two correct runs may differ there from then on."""
        self.padding = np.zeros(len(self.x), dtype=bool) if padding is None else padding
        self.steps = 0
        self.norm = 0.0
        self.bound = 3.0
        """Of a step, in those that Adam can make."""
        self.largest = 0.0
        """The largest step after the warm-up, in learning rates."""

    def _clip(self, norm: float) -> float:
        self.norm = norm
        return min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0

    def step(self, gradients: np.ndarray, norm: float | None = None) -> None:
        """One step with every worker's own gradient, [workers, elements].

        `norm` is what was taken for that of their mean, where it was estimated.
        """
        beta1, beta2 = self.betas
        self.steps += 1
        if self.steps <= self.warmup_steps:
            mean = gradients.mean(axis=0)
            mean = mean * self._clip(float(np.linalg.norm(mean)))
            self.m = beta1 * self.m + (1 - beta1) * mean
            self.v = beta2 * self.v + (1 - beta2) * mean**2
        else:
            clip = self._clip(norm or float(np.linalg.norm(gradients.mean(axis=0))))
            own = beta1 * self.m + (1 - beta1) * clip * gradients
            for part, blocks in zip(self.parts, self.blocks, strict=True):
                self.m[part] = self._exchange(own[:, part], part, blocks)
            self.m[self.padding] = 0.0
        size = np.sqrt(self.v / (1 - beta2 ** min(self.steps, self.warmup_steps))) + self.eps
        update = np.where(self.v > 0, self.m / (1 - beta1**self.steps) / size, 0.0)
        if self.steps > self.warmup_steps:
            most = self.bound * max(1.0, (1 - beta1) / np.sqrt(1 - beta2))
            self.largest = max(self.largest, float(np.abs(update).clip(max=most).max()))
            update = np.clip(update, -most, most)
        self.x = self.x - self.lr * (update + self.decay * self.x)

    def _exchange(self, own: np.ndarray, part: slice, blocks: list[slice]) -> np.ndarray:
        workers = len(own)
        own = own.reshape(-1, self.ranks_per_node, own.shape[1]).sum(axis=1)
        said = own + self.d[:, part]
        coded = [one_bit(values, blocks) for values in said]
        sent = np.stack([values for values, _ in coded])
        total = sent.sum(axis=0) / workers + self.owners_d[part]
        result, undecided = one_bit(total, blocks)
        for other in (undecided, *(ties for _, ties in coded)):
            self.undecided[part] |= other
        if self.compensate:
            self.d[:, part] = said - sent
            self.owners_d[part] = total - result
        return result
