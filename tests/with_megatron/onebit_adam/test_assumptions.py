"""What 1-bit Adam assumes of the optimizer and of the ranks: it looks before it leaves gradients unreduced.

Whoever steps, whatever happened to Adam's state in between, and whichever ranks hold what: the step is the
paper's, or it is refused, or a new warm-up begins.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from with_megatron.seam_runs import REPLICATED, attach, leaves_of, logged, refusal, session_of
from with_megatron.tiny_model import build

import megatron_patch

RANKS = 2
OPTIMIZER = {"lr": 1e-2, "clip_grad": 1.0, "adam_beta2": 0.95}


def attached(model: dict[str, Any], warmup: int = 3, **options: Any) -> Any:
    """In a worker: the tiny model with 1-bit Adam."""
    tiny = build(**{**model, "optimizer": OPTIMIZER | model.get("optimizer", {})})
    attach([tiny.ddp], {"method": "onebit_adam", "warmup_steps": warmup, **options})
    return tiny


def stepped(tiny: Any, step: int, optimizer_step: Any = None) -> Any:
    """A backward pass and a step; what the step returned."""
    tiny.exchange(tiny.random_gradients(step))
    return (optimizer_step or tiny.optimizer.step)()


def agree(weights: Any) -> bool:
    """Whether all ranks hold the same weights."""
    everyone = [torch.empty_like(weights) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, weights)
    return all(torch.equal(weights, other) for other in everyone)


def states_of(optimizer: Any) -> list[dict[str, Any]]:
    """Adam's state of each parameter."""
    return [state for part in leaves_of(optimizer) for state in part.optimizer.state.values()]


@pytest.mark.parametrize("kind", ["distributed", "replicated", "no chain"])
def test_the_pair_of_calls_makes_the_step_of_step(pool: Any, kind: str) -> None:
    """`prepare_grads`, clipping by the loop, `step_with_ready_grads`: `step`'s numbers, in both phases."""
    for whole, halves in pool.run(by_halves, kind, world_size=RANKS):
        assert halves["weights"] == pytest.approx(whole["weights"], rel=1e-5, abs=1e-6)
        assert halves["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        assert halves["sent"] == whole["sent"]
        assert halves["same"]
        assert whole["same"]


def by_halves(kind: str) -> list[dict[str, Any]]:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    found = []
    for halves in (False, True):
        tiny = attached(REPLICATED if kind == "replicated" else {})
        (leaf,) = tiny.optimizer.chained_optimizers
        optimizer = leaf if kind == "no chain" else tiny.optimizer

        def step(optimizer: Any = optimizer, leaf: Any = leaf) -> Any:
            assert not optimizer.prepare_grads()
            if optimizer is leaf:
                norm = leaf.clip_grad_norm(OPTIMIZER["clip_grad"])
            else:
                norm = optimizer.get_grad_norm()
                clip_grad_by_total_norm_fp32(leaf.get_parameters(), OPTIMIZER["clip_grad"], norm)
            return optimizer.step_with_ready_grads(), norm, None

        norms, sent = [], []
        for number in range(8):
            norms.append(float(stepped(tiny, number, step if halves else optimizer.step)[1]))
            sent.append(session_of(tiny.ddp).report.traffic.nbytes)
        weights = tiny.weights()
        found.append({"weights": weights.tolist(), "norms": norms, "sent": sent, "same": agree(weights)})
        megatron_patch.disable()
    return found


@pytest.mark.parametrize("kind", ["torch", "other model"])
def test_what_it_cannot_step_is_refused_at_the_first_step(pool: Any, kind: str) -> None:
    for error in pool.run(refused, kind, world_size=RANKS):
        assert "onebit_adam" in error
        assert ("AdamW" if kind == "torch" else "attach all of its models") in error


def refused(kind: str) -> str:
    """Torch's AdamW on Megatron's DDP; one optimizer over two models, of which one is attached."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    tiny = attached(REPLICATED)
    before = tiny.weights()
    if kind == "torch":
        for parameter in tiny.parameters:
            parameter.grad = torch.zeros_like(parameter)
        tiny.optimizer = torch.optim.AdamW(tiny.parameters)
    else:
        other = build(**REPLICATED)
        config = OptimizerConfig(optimizer="adam", lr=1e-3)
        tiny.optimizer = get_megatron_optimizer(config, [tiny.ddp, other.ddp])
        other.exchange(other.random_gradients(0))
    tiny.exchange(tiny.random_gradients(0))
    said = refusal(tiny.optimizer.step)
    assert torch.equal(tiny.weights(), before)
    return said


def test_gradients_without_an_optimizer_that_is_seen_are_refused(pool: Any) -> None:
    for error in pool.run(never_stepped, world_size=RANKS):
        assert "no step of a Megatron optimizer" in error


def never_stepped() -> str:
    """A resumed run whose optimizer nobody sees: its phase says that gradients are left unreduced."""
    tiny = attached({})
    state = session_of(tiny.ddp)
    state.ledger.steps, state.ledger.phase.switch_step, state.ledger.phase.variance_steps = 9, 3, 3

    def train() -> None:
        for step in range(3):
            tiny.exchange(tiny.random_gradients(step))

    with pytest.raises(RuntimeError) as error:
        train()
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "compensation"), [({}, True), (REPLICATED, False)], ids=["distributed", "replicated"]
)
def test_a_rollback_takes_the_moments_that_were_put_back(
    pool: Any, model: dict[str, Any], compensation: bool
) -> None:
    """Weights and moments are put back after a spike: the same gradients then make the same step.

    Without the spike's errors; those that were there before it are lost as well.
    """
    for moved, again in pool.run(rolled_back, model, compensation, world_size=RANKS):
        assert again == pytest.approx(moved, rel=0.25 if compensation else 0.1)


def rolled_back(model: dict[str, Any], compensation: bool) -> tuple[float, float]:
    tiny = attached(model, error_compensation=compensation)
    for step in range(30):
        stepped(tiny, step)
    (part,) = tiny.optimizer.chained_optimizers
    kept = copy.deepcopy([(state["exp_avg"], state["step"]) for state in states_of(tiny.optimizer)])
    weights, masters = tiny.weights(), [g["params"] for g in part.optimizer.param_groups]
    before = [[p.detach().clone() for p in group] for group in masters]
    stepped(tiny, 30)
    moved = tiny.weights() - weights
    for number in range(3):  # a spike
        tiny.exchange([1e3 * gradient for gradient in tiny.random_gradients(number)])
        tiny.optimizer.step()
    for group, values in zip(masters, before, strict=True):
        for parameter, value in zip(group, values, strict=True):
            parameter.data.copy_(value)
    for state, (momentum, count) in zip(states_of(tiny.optimizer), kept, strict=True):
        state["exp_avg"].copy_(momentum)
        state["step"].copy_(count)
    start = weights.clone()
    stepped(tiny, 30)
    again = tiny.weights() - start
    return float(torch.linalg.norm(moved)), float(torch.linalg.norm(again))


@pytest.mark.parametrize("how", ["left", "left and back", "one tensor", "revived"])
def test_steps_keep_their_length_whatever_the_counter_says(pool: Any, how: str) -> None:
    """With gradients that stay the same, a step of Adam is one learning rate long, in any phase.

    A warm-up of 3 steps has a seventh of the variance's weights, and the counter of step 24 says 70 %.
    """
    for report in pool.run(lengths, how, world_size=RANKS):
        assert report["after"] == pytest.approx(report["before"], rel=0.3)
        assert report["tensor"] == pytest.approx(report["tensor before"], rel=0.35)
        assert report["new"] == (how in ("one tensor", "revived") and report["rank"] == 0)
        assert report["stay"] == (how == "revived" and report["rank"] == 0)


def test_a_variance_that_is_young_when_it_is_frozen_is_scaled(pool: Any) -> None:
    young, usual = (pool.run(lengths, how, world_size=RANKS)[0] for how in ("young", "left"))
    assert young["tensor before"] == pytest.approx(usual["tensor before"], rel=0.1)


def lengths(how: str) -> dict[str, Any]:
    """RMS of a step in learning rates, of all weights and of one tensor: compressed, and after an event."""
    rank, found = torch.distributed.get_rank(), {}

    def step(first_tensor: bool) -> tuple[float, float]:
        gradients = tiny.random_gradients(0, rank=0)
        noise = tiny.random_gradients(1, rank=rank)
        gradients = [g.sign() * 1e-2 + 1e-4 * n for g, n in zip(gradients, noise, strict=True)]
        gradients[0] *= first_tensor
        before = [p.detach().float().clone() for p in tiny.parameters]
        tiny.exchange(gradients)
        tiny.optimizer.step()
        moved = [p.detach().float() - b for p, b in zip(tiny.parameters, before, strict=True)]
        rms = [float(m.square().mean().sqrt()) / OPTIMIZER["lr"] for m in moved]
        return sum(rms[1:]) / len(rms[1:]), rms[0]

    with logged() as lines:
        tiny = attached({})
        config = session_of(tiny.ddp).config
        for number in range(24):
            found["before"], found["tensor before"] = step(how != "revived")
            # Of a young variance the counter of the warm-up's end says more than it has.
            if (how, number) in (("young", 1), ("one tensor", 23)):
                for state in first_tensors_states(tiny):
                    state["exp_avg"].zero_()
                    state["exp_avg_sq"].zero_()
        if how.startswith("left"):
            megatron_patch.disable()
        if how == "left and back":
            megatron_patch.attach(tiny.ddp, config)
        steps = [step(True) for _ in range(1 if how == "left" else 30)]
        if how == "revived":
            found["tensor before"] = found["before"]
        found["after"], found["tensor"] = steps[-1]
        found["new"] = any("new warm-up" in line for line in lines)
        found["stay"] = any("step 1 after" in line and "221 had no gradient" in line for line in lines)
    return found | {"rank": rank}


def first_tensors_states(tiny: Any) -> list[dict[str, Any]]:
    """Adam's state of this rank's part of the model's first parameter."""
    (part,) = leaves_of(tiny.optimizer)
    place = part.model_param_group_index_map.get(tiny.parameters[0])
    mine = [] if place is None else [part.optimizer.param_groups[place[0]]["params"][place[1]]]
    return [part.optimizer.state[parameter] for parameter in mine if parameter in part.optimizer.state]


@pytest.mark.parametrize(
    ("how", "model"), [("zeroed", {}), ("lost", REPLICATED), ("rebuilt", {}), ("younger", REPLICATED)]
)
def test_without_its_variance_a_new_warm_up_begins(pool: Any, how: str, model: dict[str, Any]) -> None:
    reports = pool.run(without_variance, how, model, world_size=RANKS)
    for report in reports:
        assert report["active"] == [False] * 3 + [True] * 3 + [True] + [False] * 2 + [True] * 3
        assert report["moved"] > 0.5e-2, "one learning rate, where training had stopped"
        assert report["same"]
    assert sum("new warm-up" in line for line in reports[0]["lines"]) == 1
    assert sum("warm-up is over" in line for line in reports[0]["lines"]) == 2


def without_variance(how: str, model: dict[str, Any]) -> dict[str, Any]:
    """Six steps, of which three are compressed; then the moments go, and six more."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with logged() as lines:
        tiny = attached(model)
        active = []
        for step in range(12):
            if step == 6 and how == "rebuilt":
                whole = model.get("optimizer", {"use_distributed_optimizer": True})
                config = OptimizerConfig(optimizer="adam", **OPTIMIZER, **whole)
                tiny.optimizer = get_megatron_optimizer(config, [tiny.ddp])
            elif step == 6:
                for part in tiny.optimizer.chained_optimizers:
                    for state in part.optimizer.state.values():
                        if how == "zeroed":
                            state["exp_avg"].zero_()
                            state["exp_avg_sq"].zero_()
                        elif how == "younger":
                            state["step"].fill_(1)
                    if how == "lost":
                        part.optimizer.state.clear()
            active.append(session_of(tiny.ddp).active)
            before = tiny.weights()
            stepped(tiny, step)
            moved = tiny.weights() - before
    same = agree(tiny.weights())
    return {"active": active, "moved": float(moved.abs().max()), "same": same, "lines": list(lines)}


@pytest.mark.parametrize("model", [{}, REPLICATED], ids=["distributed", "replicated"])
def test_disable_between_backward_pass_and_step_leaves_reduced_gradients(
    pool: Any, model: dict[str, Any]
) -> None:
    for off, same in pool.run(disabled_before_the_step, model, world_size=RANKS):
        assert off < 1e-6
        assert same


def disabled_before_the_step(model: dict[str, Any]) -> tuple[float, bool]:
    tiny = attached(model)
    for step in range(5):
        stepped(tiny, step)
    tiny.exchange(tiny.random_gradients(5))
    megatron_patch.disable()
    everyone = [tiny.random_gradients(5, rank) for rank in range(RANKS)]
    mean = tiny.in_buckets([sum(parts) / RANKS for parts in zip(*everyone, strict=True)])
    off = max(float((b.grad_data - m).abs().max()) for b, m in zip(tiny.buckets, mean, strict=True))
    tiny.optimizer.step()
    assert torch.isfinite(tiny.weights()).all()
    return off, agree(tiny.weights())


def test_two_models_on_halves_of_the_ranks_do_not_meet(pool: Any) -> None:
    """Each has its own norm and its own switch, and one of them may be without compression."""
    reports = pool.run(on_halves, world_size=4)
    for rank, report in enumerate(reports):
        assert report["active"] == [step >= 3 for step in range(6)] if rank < 2 else not any(report["active"])
        assert report["norms"] == pytest.approx(report["expected"], rel=0.2)


def on_halves() -> dict[str, Any]:
    """In a worker of 4: the model of ranks 0 and 1 is attached; ranks 2 and 3 train another with stock's."""
    rank = dist.get_rank()
    half = build_on_half(rank // 2)
    if rank < 2:
        attach([half.ddp], {"method": "onebit_adam", "warmup_steps": 3})
    active, norms, expected, size = [], [], [], 1.0 if rank < 2 else 100.0
    for step in range(6):
        everyone = [half.random_gradients(step, other) for other in (rank // 2 * 2, rank // 2 * 2 + 1)]
        mean = [sum(parts) / 2 for parts in zip(*everyone, strict=True)]
        expected.append(size * float(torch.cat([g.reshape(-1) for g in mean]).norm()))
        half.exchange([size * gradient for gradient in half.random_gradients(step)])
        active.append(bool(rank < 2 and session_of(half.ddp).active))
        norms.append(float(half.optimizer.step()[1]))
    return {"active": active, "norms": norms, "expected": expected}


def build_on_half(half: int) -> Any:
    """The tiny model over two of the four ranks, by groups of its own."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    tiny = build(optimizer=OPTIMIZER)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    ours = ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "intra_dist_opt")
    none = ("tp", "pp", "ep", "mp", "tp_ep_pp", "cp", "expt_tp")
    groups = ProcessGroupCollection(**dict.fromkeys(ours, halves[half]), **dict.fromkeys(none, alone))
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    tiny.ddp = DistributedDataParallel(tiny.ddp.config, config, tiny.ddp.module, pg_collection=groups)
    options = OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, **OPTIMIZER)
    tiny.optimizer = get_megatron_optimizer(
        options, [tiny.ddp], use_gloo_process_groups=False, pg_collection=groups
    )
    return tiny


def test_a_rank_alone_is_left_to_adam(pool: Any) -> None:
    ((active, apart),) = pool.run(alone, world_size=1)
    assert not any(active)
    assert apart == 0


def alone() -> tuple[list[bool], float]:
    stock, tiny = build(optimizer=OPTIMIZER), attached({})
    active = []
    for step in range(8):
        active.append(session_of(tiny.ddp).active)
        stepped(tiny, step)
        stepped(stock, step)
    apart = float((tiny.weights() - stock.weights()).abs().max())
    return active, apart


def test_a_stage_that_is_frozen_whole_takes_part(pool: Any) -> None:
    """Two pipeline stages, of which the last one's ranks have nothing to update: all switch, none waits."""
    reports = pool.run(frozen_stage, world_size=4)
    for active, norms, same in reports:
        assert active == [False] * 3 + [True] * 3
        assert same
        assert norms == reports[0][1]


def frozen_stage() -> tuple[list[bool], list[float], bool]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    frozen = parallel_state.is_pipeline_last_stage()
    init = torch.nn.Parameter.__new__
    if frozen:
        torch.nn.Parameter.__new__ = lambda cls, data=None, requires_grad=True: init(cls, data, False)
    try:
        tiny = attached({})
    finally:
        torch.nn.Parameter.__new__ = init
    active, norms = [], []
    for step in range(6):
        active.append(session_of(tiny.ddp).active)
        if not frozen:
            tiny.exchange(tiny.random_gradients(step))
        norms.append(float(tiny.optimizer.step()[1]))
    weights = tiny.weights()
    everyone = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(everyone, weights, group=tiny.ddp.dp_cp_group)
    return active, norms, torch.equal(*everyone)
