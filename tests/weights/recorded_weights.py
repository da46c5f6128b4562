"""bf16 weights before and after one step of a small language model, trained here at a given learning rate.

Masters are fp32, updated by Adam, as in a distributed optimizer; the text is a random Markov chain, which a
model learns. 1.3 M weights: embeddings, attention, MLPs, norms.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, BATCH = 512, 160, 32, 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.into(self.before(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.between(x))))


@functools.cache
def recorded(rate: float, steps: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new weights of step `steps`, int16 [n]."""
    generator = torch.Generator().manual_seed(3)
    followers = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=generator)
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(_Block() for _ in range(4)), nn.RMSNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )  # fmt: skip
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
    masters = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, betas=(0.9, 0.95), weight_decay=0.1)
    model.to(torch.bfloat16)
    old = new = torch.empty(0)
    for _ in range(steps):
        text = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        for _word in range(LENGTH):
            choice = torch.randint(4, (BATCH,), generator=generator)
            text = torch.cat([text, followers[text[:, -1], choice][:, None]], 1)
        logits = model(text[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten()).backward()
        optimizer.param_groups[0]["lr"] = rate
        for weight, master in zip(model.parameters(), masters, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        optimizer.step()
        old = _bits(model)
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters, strict=True):
                weight.copy_(master)
        new = _bits(model)
    return old, new


def _bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().view(torch.int16).flatten() for weight in model.parameters()])
