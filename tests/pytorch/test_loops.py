"""Training loops as people write them: what they do with gradients, and what the errors then are.

`rel` is the relative error of the reduced gradient, 0.13 with 4 bits; errors of a dropped gradient would be
added to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coded_values import flat_error
from pytorch.runs import full, gradients_of, wrapped
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from with_megatron.seam_runs import logged

import megatron_patch
from megatron_patch.pytorch import attach
from megatron_patch.pytorch.fsdp2_fields import groups_of

LOCO = {"method": "loco", "start_step": 0, "reset_interval": 0}
KINDS: dict[str, dict[str, Any]] = {"ddp": {"kind": "ddp"}, "fsdp2": {}, "hybrid": {"replicas": 2}}


class Loop:
    """In a worker: an attached model whose gradients are chosen, and one optimizer or several."""

    def __init__(self, kind: str, options: dict[str, Any] | None = None, optimizers: int = 1) -> None:
        self.model, self.inner, _ = wrapped(KINDS[kind])
        megatron_patch.attach(self.model, megatron_patch.CompressionConfig(**LOCO | (options or {})))
        self.attachment = attach.attachment_of(self.model)
        self.session = self.attachment.session
        self.ledger = self.session.ledger
        parameters = list(self.model.parameters())
        self.optimizers = [torch.optim.SGD(parameters[n::optimizers], lr=1e-3) for n in range(optimizers)]
        self.rel: list[float] = []

    def loss(self, number: int, factor: float = 1.0) -> Any:
        gradients = gradients_of(self.inner, dist.get_rank(), number, next(self.model.parameters()).dtype)
        return self.model([[g * factor for g in block] for block in gradients])

    def backward(self, number: int, factor: float = 1.0) -> None:
        """Exchange, and note how far the gradient is from the mean over ranks."""
        self.loss(number, factor).backward()
        ranks, dtype = range(dist.get_world_size()), torch.float32
        everyone = [gradients_of(self.inner, rank, number, dtype) for rank in ranks]
        off = size = 0.0
        for place, parameter in enumerate(self.model.parameters()):
            exact = (
                sum([g for block in mine for g in block][place] for mine in everyone) * factor / len(ranks)
            )
            off, size = (
                off + float((full(parameter.grad) - exact).square().sum()),
                size + float(exact.square().sum()),
            )
        self.rel.append((off / size) ** 0.5)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def errors(self) -> list[Any]:
        return [flat_error(sender.error) for sender in self.attachment.session.senders]

    def unscaled(self) -> list[Any]:
        """Errors divided by the loss scale that they carry."""
        scale = 1.0 if self.session.scale is None else float(self.session.scale)
        return [error / scale for error in self.errors()]

    def told(self) -> tuple[int, int, int]:
        """Steps that succeeded, all of them, and those that were skipped."""
        return self.ledger.steps, self.ledger.steps_seen, self.ledger.events.skipped_steps


def overflow(parameters: Iterable[Any]) -> None:
    """Every gradient has an infinity, on every rank."""
    for parameter in parameters:
        local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        local.view(-1)[:1] = float("inf")


def clear_by_hand(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None


def skip_and_clear_by_hand(loop: Loop) -> None:
    megatron_patch.skip_step(loop.model)
    clear_by_hand(loop)


CLEARS: dict[str, Callable[[Loop], Any]] = {
    "optimizer": lambda loop: loop.optimizers[0].zero_grad(),
    "in place": lambda loop: loop.optimizers[0].zero_grad(set_to_none=False),
    "model": lambda loop: loop.model.zero_grad(),
    "by hand": clear_by_hand,
    "skip_step": skip_and_clear_by_hand,
}


def spiked(kind: str, clears: str | None) -> tuple[list[float], tuple[int, int, int], int]:
    """A batch with gradients 1,000 times as large in the fifth of eight passes, which the loop leaves out."""
    loop = Loop(kind)
    for number in range(8):
        spike = number == 4 and clears is not None
        loop.backward(number, 1e3 if spike else 1.0)
        if spike:
            CLEARS[clears or ""](loop)
        else:
            loop.step()
    found = loop.rel, loop.told(), megatron_patch.report(loop.model).skipped_steps
    megatron_patch.disable()
    return found


@pytest.mark.parametrize(
    ("kind", "clears"),
    [(kind, clears) for kind in KINDS for clears in CLEARS if (kind, clears) != ("ddp", "by hand")],
)
def test_a_batch_that_the_loop_leaves_out_is_forgotten(pool, kind: str, clears: str) -> None:
    ranks = 4 if kind == "hybrid" else 2
    usual = pool.run(spiked, kind, None, world_size=ranks)
    for (rel, told, counted), (same, *_) in zip(
        pool.run(spiked, kind, clears, world_size=ranks), usual, strict=True
    ):
        assert rel[5] < 1.2 * max(same[2:])
        assert max(rel[6:]) < 1.2 * max(same[2:])
        assert told == (7, 8, 1)
        assert counted == 1


def put_back(kind: str, says: bool) -> list[float]:
    """A spiked batch that was used: weights are put back, and the loop says so, or not."""
    loop = Loop(kind)
    for number in range(6):
        before = [parameter.detach().clone() for parameter in loop.model.parameters()]
        loop.backward(number, 1e3 if number == 4 else 1.0)
        loop.step()
        if number == 4:
            with torch.no_grad():
                for parameter, value in zip(loop.model.parameters(), before, strict=True):
                    parameter.copy_(value)
            if says:
                megatron_patch.skip_step(loop.model)
    found = loop.rel
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_loop_that_puts_weights_back_says_so(pool, kind: str) -> None:
    for rel in pool.run(put_back, kind, True, world_size=2):
        assert rel[5] < 0.2
    assert min(rel[5] for rel in pool.run(put_back, kind, False, world_size=2)) > 1, "what it is for"


def adversaries(kind: str, scaled: bool, frozen: bool) -> dict[str, Any]:
    """A GAN: the generator's pass goes through the discriminator, whose gradients it then drops."""
    makes, judges = Loop(kind), Loop(kind)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0, growth_interval=3)
    kept, lost, within = [], [], []
    for number in range(8):
        for parameter in judges.model.parameters() if frozen else ():
            parameter.requires_grad_(False)
        before = judges.unscaled()
        scaler.scale(makes.loss(number) + judges.loss(100 + number)).backward()
        scaler.step(makes.optimizers[0])
        makes.optimizers[0].zero_grad()
        within.append(judges.ledger.within_step)
        for parameter in judges.model.parameters():
            parameter.requires_grad_(True)
        judges.optimizers[0].zero_grad()
        lost.append(not any(error.any() for error in judges.errors()))
        kept.append(all(map(torch.equal, before, judges.unscaled())))
        scaler.scale(judges.loss(200 + number)).backward()
        scaler.step(judges.optimizers[0])
        judges.optimizers[0].zero_grad()
        scaler.update()
    found = {"told": (makes.told(), judges.told()), "kept": kept, "lost": lost, "within": within}
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_discriminator_keeps_its_errors(pool, kind: str, scaled: bool) -> None:
    """Frozen in the generator's pass at once; else after two passes, whose errors are dropped with them."""
    for found in pool.run(adversaries, kind, scaled, True, world_size=2):
        assert found["told"] == ((8, 8, 0), (8, 8, 0))
        assert all(found["kept"])
        assert not any(found["within"])
    for found in pool.run(adversaries, kind, scaled, False, world_size=2):
        assert found["told"][0] == (8, 8, 0)
        steps, seen, skipped = found["told"][1]
        assert (steps, seen - skipped) == (8, 8)
        assert skipped <= 3
        assert all(found["kept"][4:])
        assert not any(found["lost"][4:])
        assert not any(found["within"][4:]), "offload() and checkpoints may come between"


def scaled_errors(kind: str, how: str, moves: bool) -> dict[str, Any]:
    """Errors in units of the scale, after every pass; `moves`: the scale changes, always by powers of two."""
    loop = Loop(kind, {"error_dtype": "fp32"})
    other = torch.nn.Linear(3, 3)
    interval = 2 if moves else 1000
    made: dict[str, Any] = {"device": "cpu", "init_scale": 8.0, "growth_interval": interval}
    if how == "sharded":  # Its default group is that of its first import.
        scaler: Any = ShardedGradScaler(**made, process_group=torch.distributed.group.WORLD)
    else:
        scaler = torch.amp.GradScaler(**made)
    errors = []
    for number in range(7):
        if number == 3 and moves and how == "given":
            scaler.update(64.0)
        if number == 3 and moves and how == "loaded":
            scaler.load_state_dict(scaler.state_dict() | {"scale": 1.0})
        if how == "two models":
            scaler.scale(other(torch.ones(3)).sum()).backward()
        bad = number == 4 and how == "overflow"
        scaler.scale(loop.loss(number)).backward()
        scale = scaler.get_scale()
        errors.append([error / scale for error in loop.errors()])
        if bad:
            overflow(loop.model.parameters())
        scaler.step(loop.optimizers[0])
        scaler.update()
        loop.optimizers[0].zero_grad()
    found = {"errors": errors, "told": loop.told(), "scale": scaler.get_scale()}
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("how", ["grows", "sharded", "given", "loaded", "two models", "overflow"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_errors_follow_the_scale_of_any_scaler(pool, kind: str, how: str) -> None:
    constant = pool.run(scaled_errors, kind, how, False, world_size=2)
    for found, same in zip(pool.run(scaled_errors, kind, how, True, world_size=2), constant, strict=True):
        assert found["scale"] != same["scale"]
        assert found["told"] == same["told"] == ((6, 7, 1) if how == "overflow" else (7, 7, 0))
        for mine, theirs in zip(found["errors"], same["errors"], strict=True):
            assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))
        assert any(error.any() for error in found["errors"][-1])


def one_of_two(kind: str, how: str) -> tuple[tuple[int, int, int], list[bool]]:
    """Two optimizers: one skips an overflow, or makes a step in every second iteration only."""
    loop = Loop(kind, optimizers=2)
    first, second = loop.optimizers
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    any_errors = []
    for number in range(6):
        scaler.scale(loop.loss(number)).backward()
        if number == 3 and how == "skips":
            overflow(second.param_groups[0]["params"])
        scaler.step(first)
        first.zero_grad()
        if how == "skips" or number % 2:
            scaler.step(second)
            second.zero_grad()
        scaler.update()
        any_errors.append(any(bool(error.any()) for error in loop.errors()))
    found = loop.told(), any_errors
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_of_two_optimizers_skips_or_waits(pool, kind: str) -> None:
    for told, any_errors in pool.run(one_of_two, kind, "skips", world_size=2):
        assert told == (6, 6, 1)
        assert any_errors[1:] == [True, True, False, True, True]
    for told, any_errors in pool.run(one_of_two, kind, "waits", world_size=2):
        assert told == (6, 6, 0)
        assert all(any_errors[1:])


def fused_overflow(kind: str) -> dict[int, bool]:
    """A fused optimizer skips an overflow by itself: whether a pass finds errors of the one before."""
    loop = Loop(kind)
    found: dict[int, bool] = {}
    loop.optimizers = [torch.optim.AdamW(loop.model.parameters(), lr=1e-3, fused=True)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    start = loop.session.start

    def noting(*args: Any) -> Any:
        found.setdefault(number, any(bool(error.any()) for error in loop.errors()))
        return start(*args)

    loop.session.start = noting
    for number in range(5):
        scaler.scale(loop.loss(number)).backward()
        if number == 3:
            overflow(loop.model.parameters())
        scaler.step(loop.optimizers[0])
        scaler.update()
        loop.optimizers[0].zero_grad()
    megatron_patch.disable()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_overflow_that_a_fused_optimizer_skips_is_forgotten(pool, kind: str) -> None:
    for found in pool.run(fused_overflow, kind, world_size=2):
        assert found[3]
        assert not found[4]


def several_passes(kind: str, how: str) -> tuple[tuple[int, int, int], int, list[float]]:
    """LBFGS and sharpness-aware steps evaluate the gradient several times in a step."""
    loop = Loop(kind)
    parameters = list(loop.model.parameters())
    passes = 0
    if how == "lbfgs":
        loop.optimizers = [torch.optim.LBFGS(parameters, lr=1e-3, max_iter=3)]
    for number in range(4):

        def closure(number: int = number) -> Any:
            nonlocal passes
            loop.optimizers[0].zero_grad()
            loop.backward(number)
            passes += 1
            return torch.ones(())

        if how == "lbfgs":
            loop.optimizers[0].step(closure)
            continue
        loop.backward(2 * number)
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=1e-3)
        loop.optimizers[0].zero_grad()
        loop.backward(2 * number + 1)
        passes += 2
        loop.step()
    found = loop.told(), passes, loop.rel
    megatron_patch.disable()
    return found


@pytest.mark.parametrize(
    ("kind", "how"), [("ddp", "lbfgs"), ("ddp", "sharpness-aware"), ("fsdp2", "sharpness-aware")]
)
def test_several_passes_of_one_step_keep_their_errors(pool, kind: str, how: str) -> None:
    for told, passes, rel in pool.run(several_passes, kind, how, world_size=2):
        assert told == (4, 4, 0)
        assert passes > 6
        assert max(rel) < 0.5


# --- when compression starts -----------------------------------------------------------------------------


def started(kind: str, how: str) -> dict[str, Any]:
    """Twenty-four steps with `start_step: auto`: which were compressed, and what the log says."""
    loop = Loop(kind, {"start_step": "auto"})
    parameters, compressed = list(loop.model.parameters()), []
    masters = [parameter.detach().clone() for parameter in parameters]
    if how in ("copies", "copies by data"):
        loop.optimizers = [torch.optim.SGD(masters, lr=1e-3)]
    if how == "no rate":
        loop.optimizers[0].param_groups[0]["lr"] = None
        loop.optimizers[0].register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=1e-3))
        loop.optimizers[0].register_step_post_hook(lambda o, *_: o.param_groups[0].update(lr=None))
    with logged() as lines:
        for number in range(24):
            for place, block in enumerate(loop.inner.blocks) if how == "blocks" else ():
                block.requires_grad_(place == number % len(loop.inner.blocks))
            loop.loss(number).backward()
            compressed.append(loop.session.active)
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = parameter.grad
            loop.optimizers[0].step()
            for master, parameter in zip(masters, parameters, strict=True):
                if how == "copies":
                    parameter.detach().copy_(master)
                if how == "copies by data":
                    parameter.data.copy_(master)
            loop.model.zero_grad()
    told = megatron_patch.report(loop.model).step
    found = {"compressed": compressed, "step": told, "lines": lines, "steps": loop.ledger.steps}
    megatron_patch.disable()
    return found


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, how) for kind in ("ddp", "fsdp2") for how in ("copies", "copies by data", "no rate")),
        ("fsdp2", "blocks"),
    ],
)
def test_compression_starts_whatever_steps(pool, kind: str, how: str) -> None:
    """After ten steps a constant rate is no warm-up; steps that are not seen, or have no rate, have one."""
    for rank, found in enumerate(pool.run(started, kind, how, world_size=2)):
        first = found["compressed"].index(True)  # Blocks in turns: ranks ask when the first one comes again.
        assert 11 <= first <= (17 if how == "blocks" else 12)
        assert all(found["compressed"][first:])
        unseen = [line for line in found["lines"] if "no step of an optimizer was seen" in line]
        assert len(unseen) == (how.startswith("copies") and rank == 0)
        assert found["step"] >= 23
        assert found["steps"] >= 23


def attached_again(kind: str) -> list[tuple[int, bool]]:
    """Steps and whether they are compressed: before `disable()`, and after attaching again."""
    loop, told = Loop(kind, {"start_step": "auto"}), []
    for number in range(14):
        loop.loss(number).backward()
        told.append((loop.ledger.steps, loop.session.active))
        loop.step()
    megatron_patch.disable()
    loop.loss(14).backward()
    loop.step()
    megatron_patch.attach(loop.model, megatron_patch.CompressionConfig(**LOCO | {"start_step": "auto"}))

    loop.session = attach.attachment_of(loop.model).session
    loop.loss(15).backward()
    loop.step()
    told.append((loop.session.ledger.steps, loop.session.active))
    megatron_patch.disable()
    return told


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_attached_again_a_model_counts_on_and_goes_on_compressing(pool, kind: str) -> None:
    for told in pool.run(attached_again, kind, world_size=2):
        assert told[0] == (0, False)
        assert told[13] == (13, True)
        assert told[14] == (15, True)


# --- what is within a step -------------------------------------------------------------------------------


def joined() -> tuple[bool, bool]:
    """DDP's `join`: rank 1 has fewer batches, and its last exchanges have no gradients of its own."""
    loop = Loop("ddp")
    with loop.model.join() if dist.get_world_size() > 1 else nullcontext():
        for number in range(5 - dist.get_rank()):
            loop.loss(number).backward()
            loop.step()
    within = loop.ledger.within_step
    megatron_patch.offload(loop.model)
    megatron_patch.reload(loop.model)
    state = megatron_patch.state_dict(loop.model)
    megatron_patch.disable()
    (manifest,) = (text for key, text in state.items() if key.endswith(".manifest"))
    return within, '"mid_step": true' in manifest


def test_no_step_is_under_way_after_join(pool) -> None:
    assert pool.run(joined, world_size=2) == [(False, False)] * 2


def torch_s_setters(kind: str) -> dict[str, Any]:
    """torch's own calls on an attached model: hooks, exchanges, and a pass that fails and is discarded."""
    loop, told, seen = Loop(kind), "", []
    block = loop.inner.blocks[0]
    part = next(iter(groups_of(block)))._group
    with logged() as lines:
        for number in range(4):
            loop.backward(number)
            loop.step()
            if number == 0 and kind == "hybrid":
                block.set_all_reduce_hook(lambda output: seen.append(output.clone()))
            elif number == 0:
                block.set_custom_reduce_scatter(DefaultReduceScatter())
    loop.model.set_requires_all_reduce(False)
    loop.loss(4, 1e3).backward()
    try:
        megatron_patch.disable()
    except megatron_patch.UserError as error:
        told = str(error)
        loop.model.reset_iter_state()
        loop.model.set_requires_all_reduce(True)
        loop.backward(5)
        loop.optimizers[0].zero_grad()
        megatron_patch.disable()
    weights = [parameter.to_local().detach().clone() for parameter in loop.model.parameters()]
    left = part._all_reduce_hook is None, type(part._reduce_scatter_comm).__name__
    return {"rel": loop.rel, "lines": lines, "told": told, "seen": seen, "weights": weights, "left": left}


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="it came after torch 2.11")
def test_an_all_reduce_hook_that_is_set_later_runs_after_ours(pool) -> None:
    found = pool.run(torch_s_setters, "hybrid", world_size=4)
    for report in found:
        assert max(report["rel"][:4]) < 0.3
        assert report["rel"][4] < 0.3, "what waited is discarded with torch's own state"
        assert "wait for their all-reduce" in report["told"]
        assert len(report["seen"]) == 4, "once a pass, if it is reduced"
        assert not report["left"][0], "disable() leaves the user's hook"
    for one, replica in ((found[0], found[2]), (found[1], found[3])):
        assert all(map(np.array_equal, one["weights"], replica["weights"]))
        assert all(map(np.array_equal, one["seen"], replica["seen"]))
    assert sum("it runs after the compressed all-reduce" in line for line in found[0]["lines"]) == 1


def test_a_reduce_scatter_that_is_set_later_is_named(pool) -> None:
    for rank, report in enumerate(pool.run(torch_s_setters, "fsdp2", world_size=2)):
        assert (
            sum("has replaced the compressed reduce-scatter" in line for line in report["lines"]) == 1 - rank
        )
        assert report["left"] == (True, "DefaultReduceScatter")
        assert report["told"] == "", "nothing waits for another exchange"


def attached_between_microbatches(attached: bool) -> list[Any]:
    model, _, _ = wrapped(KINDS["hybrid"])
    model.set_requires_all_reduce(False)
    for microbatch in range(2):
        model(gradients_of(model, dist.get_rank(), microbatch, torch.float32)).backward()
        if attached and not microbatch:
            megatron_patch.attach(model, megatron_patch.CompressionConfig(method="none"))
        model.set_requires_all_reduce(True)
    megatron_patch.disable()
    return [full(parameter.grad) for parameter in model.parameters()]


def test_a_model_that_is_attached_between_microbatches_keeps_the_first(pool) -> None:
    stock, ours = (pool.run(attached_between_microbatches, attached, world_size=4) for attached in (0, 1))
    for mine, theirs in zip(ours, stock, strict=True):
        assert all(map(np.array_equal, mine, theirs))
