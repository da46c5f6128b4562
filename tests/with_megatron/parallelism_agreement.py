"""Compares models that Megatron trained under some parallelism with the simulation, parameter by parameter.

own gradients of all ranks     as recording.py wrote them down, before Megatron scaled them
  x scaling                    Scaling, stated here from docs/numerics.md and not read from Megatron
  -> exchange                  over the ranks that Layout names, simulated in float64 (tests/simulation)
  -> finalize_model_grads      sums over tensor-parallel ranks and pipeline ends, division by tokens
  -> Adam                      in float64
  = parameters                 compared on every rank after every step
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from simulation.adam_float64 import AdamOptions, AdamSimulation
from simulation.agreement import Agreement
from simulation.all_reduce_float64 import AllReduceAgreement
from simulation.codes import round_to_gradient_dtype
from simulation.loco_float64 import LoCoSimulation, block_labels
from with_megatron.gpt_model import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY

DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
ADAM = AdamOptions(LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY)


@dataclass(frozen=True)
class Layout:
    """Which ranks hold what. Megatron's order: tensor-parallel ranks are neighbours, then context-, expert-
    and data-parallel ones; pipeline stages are furthest apart."""

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    instances: int = 1
    distributed: bool = True

    @property
    def replicas(self) -> int:
        """Data-parallel ranks of dense parameters, context-parallel ones included."""
        return self.world // (self.tp * self.pp)

    def stage(self, rank: int) -> int:
        return rank * self.pp // self.world

    def slice_of(self, rank: int, expert: bool) -> tuple[int, ...]:
        """Equal on two ranks that hold the same part of the model's (expert) parameters."""
        if expert:
            expert_tp = self.tp if self.expert_tp is None else self.expert_tp
            return (rank % expert_tp, rank // expert_tp % self.ep, self.stage(rank))
        return (rank % self.tp, self.stage(rank))

    def groups(self, expert: bool) -> list[list[list[int]]]:
        """The ranks that exchange gradients; each group as rows, one per optimizer instance.

        A rank whose optimizer is replicated is an instance of its own.
        """
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            members.setdefault(self.slice_of(rank, expert), []).append(rank)
        rows = []
        for ranks in members.values():
            length = len(ranks) // self.instances if self.distributed else 1
            rows.append([ranks[start : start + length] for start in range(0, len(ranks), length)])
        return rows

    def tensor_peers(self, rank: int) -> list[int]:
        first = rank - rank % self.tp
        return list(range(first, first + self.tp))

    def pipeline_ends(self, rank: int) -> list[int]:
        """The first and the last stage's rank of this rank's pipeline."""
        apart = self.world // self.pp
        return [rank % apart, rank % apart + self.world - apart]


def layout_of(ranks: int, model: dict[str, Any]) -> Layout:
    """The layout of a model of gpt_model.build or tiny_model.build."""
    sizes = {key: model[key] for key in ("tp", "pp", "ep", "expert_tp", "instances") if key in model}
    if "expert_parallel" in model:
        sizes["ep"] = model["expert_parallel"]
    distributed = model.get("ddp", {}).get("use_distributed_optimizer", True)
    return Layout(ranks, distributed=distributed and model.get("muon", "layout") == "layout", **sizes)


@dataclass(frozen=True)
class Scaling:
    """What a gradient is multiplied by before its exchange, and whether the exchange then averages."""

    layout: Layout
    average: bool = False
    per_token: bool = False

    def factor(self, expert: bool) -> float:
        """The mean over all replicas of the data: experts too, though fewer ranks exchange them."""
        if self.per_token:
            return 1.0
        if self.average:
            group = sum(len(row) for row in self.layout.groups(expert)[0])
            return group / self.layout.replicas
        return 1 / self.layout.replicas


def by_node(row: list[int], per_node: int | None) -> list[list[int]]:
    """The ranks of a row on each node, where they go in two hops; else each alone, which is one hop."""
    nodes = [list(ranks) for _, ranks in itertools.groupby(row, key=lambda rank: rank // (per_node or 10**9))]
    regular = len(nodes) > 1 and len(nodes[0]) > 1 and len({len(ranks) for ranks in nodes}) == 1
    return nodes if regular else [[rank] for rank in row]


class _BucketAgreement:
    """One bucket and the ranks that exchange it: a reduce-scatter in each row, all-reduces between rows.

    A row's reduce-scatter is one for every place on a node: of the sums over each node's ranks.
    """

    def __init__(self, rows: list[list[int]], bucket: dict[str, Any], average: bool, options: dict[str, Any]):
        self.rows = rows
        self.columns = [list(column) for column in zip(*rows, strict=True)]
        self.dtype = DTYPES[bucket["dtype"]]
        self.average = average
        options = {"average": average, "gradient_dtype": self.dtype, **options}
        per_node = options.pop("ranks_per_node", None)
        options.pop("topology", None)
        ranks, numel = len(rows[0]), bucket["numel"]
        self.nodes = [by_node(row, per_node) for row in rows]
        self.local = len(self.nodes[0][0])
        found = [(bucket["parameters"][name][0], shape) for name, shape in bucket["shapes"].items()]
        labels = block_labels(numel, found, options.get("block_size", 128))
        columns = labels.reshape(-1, self.local, numel // ranks)
        self.scatter = [
            [
                Agreement(
                    LoCoSimulation(
                        len(nodes),
                        numel // self.local,
                        labels=columns[:, place].reshape(-1),
                        **options | {"average": False},
                    )
                )
                for place in range(self.local)
            ]
            for nodes in self.nodes
            if ranks > 1
        ]
        between = len(rows) > 1
        self.reduce = [
            AllReduceAgreement(len(rows), numel // ranks, labels=shard, **options)
            for shard in labels.reshape(ranks, -1)
            if between
        ]

    def exchange(self, steps: list[dict[str, Any]], place: int, factor: float) -> np.ndarray:
        """What the optimizer gets of the bucket's gradient, fp32 [numel]; `steps` by rank."""

        def sent(ranks: list[int], part: str) -> list[np.ndarray]:
            return [steps[rank]["sent"][place][part].numpy() for rank in ranks]

        shards = []  # by row: [ranks of the row, elements of a shard]
        for index, row in enumerate(self.rows):
            own = np.stack([steps[rank]["gradients"][place].numpy() for rank in row])
            # Megatron scales in the buffer, so in the buffer's dtype.
            gradients = round_to_gradient_dtype(own * np.float32(factor), self.dtype)
            shards.append(self._scatter(index, gradients, sent) if self.scatter else gradients)
        if not self.reduce:
            return shards[0].reshape(-1)
        parts = [
            agreement.exchange(
                np.stack([of_row[index] for of_row in shards]),
                sent=np.stack(sent(column, "reduce")),
                owned=[owned for owned in sent(column, "owner") if len(owned)],
            )
            for index, (column, agreement) in enumerate(zip(self.columns, self.reduce, strict=True))
        ]
        return np.concatenate(parts)

    def _scatter(self, index: int, gradients: np.ndarray, sent: Any) -> np.ndarray:
        """One row's shards, [ranks, S], in their order."""
        nodes, local = len(self.nodes[index]), self.local
        assert local <= 2, "the order in which a node's ranks are added is free"
        ranks = nodes * local
        by_place = gradients.reshape(nodes, local, nodes, local, -1)  # of node, rank; for node, rank, element
        shards = np.empty((nodes, local, gradients.shape[1] // ranks), dtype=np.float32)
        for place, agreement in enumerate(self.scatter[index]):
            terms = by_place[:, :, :, place]
            total = terms[:, 0]
            for other in range(1, local):
                total = round_to_gradient_dtype(total + terms[:, other], self.dtype)
            senders = [on_node[place] for on_node in self.nodes[index]]
            found = agreement.exchange(
                total.reshape(nodes, -1), sent=np.stack(sent(senders, "scatter"))
            ).shards
            shards[:, place] = round_to_gradient_dtype(found / (ranks if self.average else 1), self.dtype)
        return shards.reshape(ranks, -1)

    def end_step(self, steps: list[dict[str, Any]], place: int, **ending: Any) -> None:
        """The optimizer's step, and the errors that every rank then holds."""

        def errors(ranks: list[int], part: str) -> list[np.ndarray]:
            return [steps[rank]["errors"][place][part].numpy() for rank in ranks]

        for nodes, agreements in zip(self.nodes, self.scatter, strict=False):
            for local, agreement in enumerate(agreements):
                senders = [ranks[local] for ranks in nodes]
                agreement.end_step(errors=np.stack(errors(senders, "scatter")), **ending)
        for column, agreement in zip(self.columns, self.reduce, strict=False):
            agreement.end_step(
                errors=np.stack(errors(column, "reduce")),
                owner_errors=[error for error in errors(column, "owner") if len(error)],
                **ending,
            )


class Comparison:
    """All ranks' reports, simulated from their own gradients; `check` compares every step."""

    def __init__(
        self,
        reports: list[dict[str, Any]],
        layout: Layout,
        scaling: Scaling,
        adam: AdamOptions,
        options: dict[str, Any],
    ):
        self.reports, self.layout, self.scaling = reports, layout, scaling
        self.exchanges = [
            (_BucketAgreement(rows, bucket, scaling.average, options), place, bucket)
            for expert in (False, True)
            for rows in layout.groups(expert)
            for place, bucket in enumerate(reports[rows[0][0]]["buckets"])
            if bucket["expert"] == expert
        ]
        self.adams = {
            (rank, name): AdamSimulation(initial.numpy(), adam, decays=marks["dimensions"] > 1)
            for rank, report in enumerate(reports)
            for name, initial in report["initial"].items()
            for marks in [report["parameters"][name]]
        }

    def check(self) -> None:
        """Every step of every rank."""
        for step in range(len(self.reports[0]["steps"])):
            self._check(step)

    def check_gradients(self) -> None:
        """The gradients that the optimizer gets in every step of every rank, whichever optimizer it is."""
        for number in range(len(self.reports[0]["steps"])):
            steps, gradients, _ = self._reduced(number)
            for (rank, name), simulated in gradients.items():
                dtype = DTYPES[str(self.reports[rank]["parameters"][name]["gradient_dtype"])]
                found, own = steps[rank]["reduced"][name]
                real, wanted = found.numpy()[own], simulated[own]
                off = np.abs(real - wanted)
                bound = 2.0 ** -{"fp32": 22, "fp16": 10, "bf16": 7}[dtype] * np.abs(wanted)
                assert np.all(off <= bound), f"step {number}, rank {rank}, {name}: off by {off.max()}"

    def _reduced(self, number: int) -> tuple[list[dict[str, Any]], dict[tuple[int, str], np.ndarray], bool]:
        """A step of all ranks, its reduced gradients, and whether it succeeded; errors are compared."""
        steps = [report["steps"][number] for report in self.reports]
        gradients = self._finalized(self._exchanged(steps), steps)
        successful = all(np.isfinite(gradient).all() for gradient in gradients.values())
        assert {step["successful"] for step in steps} == {successful}, f"step {number}: skipped, or not"
        scale, next_scale = steps[0]["loss_scale"], steps[0]["next_loss_scale"]
        for exchange, place, _ in self.exchanges:
            exchange.end_step(steps, place, successful=successful, loss_scale_factor=next_scale / scale)
        return steps, gradients, successful

    def _check(self, number: int) -> None:
        steps, gradients, successful = self._reduced(number)
        scale = steps[0]["loss_scale"]
        for (rank, name), adam in self.adams.items():
            if successful:
                adam.step(gradients[rank, name].astype(np.float64) / scale)
            self._compare(f"step {number}, rank {rank}, {name}", rank, name, steps[rank]["weights"][name])

    def _compare(self, where: str, rank: int, name: str, weights: Any) -> None:
        adam, real = self.adams[rank, name], weights.numpy().astype(np.float64)
        dtype = DTYPES[self.reports[rank]["parameters"][name]["dtype"]]
        off = np.abs(real - adam.value)
        bound = adam.bound(dtype)
        worst = int(np.argmax(off - bound))
        assert off[worst] <= bound[worst], (
            f"{where}[{worst}]: {real[worst]!r}, simulated {adam.value[worst]!r}, off by {off[worst]:.2e} "
            f"where {bound[worst]:.2e} is rounding ({np.sum(off > bound)} of {off.size} differ)"
        )

    def _exchanged(self, steps: list[dict[str, Any]]) -> dict[tuple[int, str], np.ndarray]:
        """Every parameter's gradient after the exchange, by rank and name."""
        gradients = {}
        for exchange, place, bucket in self.exchanges:
            reduced = exchange.exchange(steps, place, self.scaling.factor(bucket["expert"]))
            for rank in (rank for row in exchange.rows for rank in row):
                for name, (start, end) in self.reports[rank]["buckets"][place]["parameters"].items():
                    gradients[rank, name] = reduced[start:end]
        return gradients

    def _finalized(
        self, gradients: dict[tuple[int, str], np.ndarray], steps: list[dict[str, Any]]
    ) -> dict[tuple[int, str], np.ndarray]:
        """What Megatron's finalize_model_grads does after the exchange."""
        dtypes = {
            name: DTYPES[bucket["dtype"]]
            for report in self.reports
            for bucket in report["buckets"]
            for name in bucket["parameters"]
        }
        for combine, copies in (*self._tensor_copies(), *self._tied_copies()):
            total = combine([gradients[copy].astype(np.float64) for copy in copies], axis=0)
            for copy in copies:
                gradients[copy] = round_to_gradient_dtype(total, dtypes[copy[1]])
        if self.scaling.per_token:
            # One rank of each group of tensor and pipeline peers counts.
            data = [rank for row in self.layout.groups(expert=False)[0] for rank in row]
            share = np.float32(1) / np.float32(sum(steps[rank]["tokens"] for rank in data))
            gradients = {
                key: round_to_gradient_dtype(gradient * share, dtypes[key[1]])
                for key, gradient in gradients.items()
            }
        return gradients

    def _tensor_copies(self) -> Iterator[tuple[Any, list[tuple[int, str]]]]:
        """Parameters of which tensor-parallel ranks all hold a copy."""
        if self.layout.tp == 1:
            return
        for rank in range(0, self.layout.world, self.layout.tp):
            for name, marks in self.reports[rank]["parameters"].items():
                copies = [(peer, name) for peer in self.layout.tensor_peers(rank)]
                if marks["sequence_parallel"]:
                    yield np.sum, copies
                elif not marks["tensor_parallel"] and not marks["expert"]:
                    yield np.mean, copies  # the same gradient on all, but for how it was rounded

    def _tied_copies(self) -> Iterator[tuple[Any, list[tuple[int, str]]]]:
        """The embedding of the first stage and the output layer of the last, where they are one weight."""
        if self.layout.pp == 1:
            return
        for rank in range(self.layout.world // self.layout.pp):
            copies = [
                (end, name)
                for end in self.layout.pipeline_ends(rank)
                for name, marks in self.reports[end]["parameters"].items()
                if marks["tied"]
            ]
            if copies:
                assert len(copies) == 2
                yield np.sum, copies


def copies(reports: list[dict[str, Any]], layout: Layout) -> list[list[tuple[int, str]]]:
    """Which parameters, as (rank, name), are copies of one another and must stay equal."""
    found: dict[Any, list[tuple[int, str]]] = {}
    for rank, report in enumerate(reports):
        for name, marks in report["parameters"].items():
            key: Any = (name, layout.slice_of(rank, marks["expert"]))
            if marks["tied"]:
                key = ("tied", rank % layout.tp)
            elif not marks["expert"] and not marks["tensor_parallel"]:
                key = (name, layout.stage(rank))
            found.setdefault(key, []).append((rank, name))
    return [ranks_and_names for ranks_and_names in found.values() if len(ranks_and_names) > 1]


def apart(reports: list[dict[str, Any]], layout: Layout, weights: Any) -> list[str]:
    """The copies of parameters that are not bit for bit equal; `weights` takes them from a report."""
    found = []
    for (rank, name), *others in copies(reports, layout):
        mine = weights(reports[rank])[name]
        for other, its_name in others:
            if not np.array_equal(mine, weights(reports[other])[its_name]):
                found.append(f"{name} of rank {rank}, {its_name} of rank {other}")
    return found


def distance(reports: list[dict[str, Any]], mine: str, theirs: str = "uncompressed") -> float:
    """How far two trainings ended from one another, in units of the way that the second one went."""

    def squares(a: str, b: str) -> float:
        pairs = [(report[a][name], report[b][name]) for report in reports for name in report[a]]
        return sum(float(((x.double() - y.double()) ** 2).sum()) for x, y in pairs)

    return (squares(mine, theirs) / squares("initial", theirs)) ** 0.5
