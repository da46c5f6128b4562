"""The package with one of its waits, events or buffers wrong: what the checker must find.

A mutant swaps the code of one function for that of its changed source, for the length of a block.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from order import setups
from order.ranks import circle, disagreements

_COLLECTIVES, _MEGATRON = "megatron_patch.collectives", "megatron_patch.megatron"
_PYTORCH = "megatron_patch.pytorch"
_FLAT = "session.start(exchange, input_tensor, output_tensor, average, self._ranks)"


@dataclass(frozen=True)
class Mutant:
    """One error, where it shows, and how.

    Attributes:
        where: module:function, or module:class.function.
        changes: text of its source, and what stands there instead; several, each of which must be there.
        setup: of setups.SETUPS.
        finding: part of what the checker says.
    """

    where: str
    setup: str
    finding: str
    changes: tuple[tuple[str, str], ...]
    order: int | None = None
    """As setups.run."""
    of_ranks: int = 1
    """It is in every so many-th rank."""

    @classmethod
    def of(cls, where: str, setup: str, finding: str, *changes: tuple[str, str], **options: Any) -> Mutant:
        return cls(where, setup, finding, changes, **options)


RACE, FREED, NOT_WAITED = "not ordered after", "freed on", "nothing has waited for"
UNREAD = "the host reads what a copy"

MUTANTS = {
    "ranks' answers are read while they are copied": Mutant.of(
        "megatron_patch.session.onset:_Answers.read", "flat", UNREAD, ("self._copied.synchronize()", "pass")
    ),
    "compression does not wait for the backward pass": Mutant.of(
        f"{_MEGATRON}.seams.gradients:BucketGroupSeam._stream",
        "flat",
        RACE,
        ("        stream.wait_stream(torch.cuda.current_stream())\n", ""),
    ),
    "the optimizer does not wait for the sums": Mutant.of(
        f"{_MEGATRON}.seams.gradients:_AllHandles.wait",
        "flat",
        RACE,
        ("torch.cuda.current_stream().wait_stream(self._stream)", "pass"),
    ),
    "the stream waits for the exchange, and not the other way": Mutant.of(
        f"{_MEGATRON}.seams.gradients:_AllHandles.wait",
        "two hops",
        RACE,
        (
            "torch.cuda.current_stream().wait_stream(self._stream)",
            "self._stream.wait_stream(torch.cuda.current_stream())",
        ),
    ),
    "payloads are summed before they are here": Mutant.of(
        f"{_COLLECTIVES}.reduce_scatter:ReduceScatterHandle.wait",
        "flat, not overlapped",
        RACE,
        ("            self._work.wait()\n", "            pass\n"),
    ),
    "payloads are summed, and then waited for": Mutant.of(
        f"{_COLLECTIVES}.reduce_scatter:ReduceScatterHandle.wait",
        "two hops",
        RACE,
        ("            self._work.wait()\n", "            pass\n"),
        ("        workspace.give(send)\n", "        self._work.wait()\n        workspace.give(send)\n"),
    ),
    "a payload is compressed once more while it is sent": Mutant.of(
        f"{_COLLECTIVES}.reduce_scatter:ReduceScatter.send",
        "virtual pipeline chunks",
        RACE,
        (
            "        if len(set(sizes)) == 1:\n            work =",
            "        late = send\n        if len(set(sizes)) == 1:\n            work =",
        ),
        ("        return ReduceScatterHandle(", "        late.zero_()\n        return ReduceScatterHandle("),
    ),
    "hop 2 compresses sums that hop 1 is writing": Mutant.of(
        f"{_COLLECTIVES}.two_hop:TwoHopReduceScatter.start",
        "two hops",
        RACE,
        ("            work.wait()\n", "            pass\n"),
    ),
    "an exchange of a hop is forgotten": Mutant.of(
        f"{_COLLECTIVES}.two_hop:TwoHopAllReduce.start",
        "replicated in two hops",
        RACE,
        (
            "dist.reduce_scatter_tensor(sums, whole, group=hops.intra)",
            "dist.reduce_scatter_tensor(sums, whole, group=hops.intra, async_op=True)",
        ),
    ),
    "the owners' payloads are decoded before they are here": Mutant.of(
        f"{_COLLECTIVES}.all_reduce:AllReduceHandle._gather",
        "1-bit Adam",
        RACE,
        ("async_op=in_background", "async_op=True"),
        ("= work, send", "= None, send"),
    ),
    "an outer step's sum is not waited for": Mutant.of(
        f"{_MEGATRON}.outer_steps:Shard.receive",
        "outer steps of experts in turns",
        NOT_WAITED,
        ("sent.handle.wait()", "pass"),
    ),
    "the first instance's sum is not waited for": Mutant.of(
        f"{_MEGATRON}.seams.gradients:BucketGroupSeam._start",
        "two instances",
        NOT_WAITED,
        ("                handle.wait()", "                pass"),
    ),
    "instances exchange beside the backward pass": Mutant.of(
        f"{_MEGATRON}.seams.gradients:BucketGroupSeam._stream",
        "two instances",
        RACE,
        (
            "            return upstreams",
            "            return self._session.workspace.pool.stream_of(self.stages[0].group)",
        ),
    ),
    "streams share buffers": Mutant.of(
        f"{_COLLECTIVES}.workspace:Pool._stream",
        "experts in many buckets",
        RACE,
        ("return torch.cuda.current_stream(self.device).cuda_stream if on_cuda else 0", "return 0"),
    ),
    "a payload's buffer is handed on while it is sent": Mutant.of(
        f"{_COLLECTIVES}.reduce_scatter:ReduceScatter.send",
        "flat",
        RACE,
        (
            "        return ReduceScatterHandle(",
            "        self.workspace.give(send)\n"
            "        send = self.workspace.take(1, 2 * send.numel())\n"
            "        return ReduceScatterHandle(",
        ),
    ),
    "a buffer of the default stream's is freed while another stream uses it": Mutant.of(
        f"{_COLLECTIVES}.workspace:Pool.take",
        "flat",
        FREED,
        (
            "            with torch.inference_mode(False):",
            "            with torch.cuda.stream(torch.cuda.default_stream()):",
        ),
        ("] = key, whole\n", "] = key, whole[:0].clone()\n"),
    ),
    "weights are decoded before the messages are here": Mutant.of(
        "megatron_patch.weights.batch:BatchHandle.wait",
        "weight gather, overlapped",
        RACE,
        ("        self._work.wait()\n", ""),
    ),
    "weights are decoded on a stream that the forward pass does not wait for": Mutant.of(
        "megatron_patch.weights.batch:BatchHandle.wait",
        "weight gather of chunks",
        RACE,
        (
            "        with self._workspace.timed():\n",
            "        with self._workspace.timed(), torch.cuda.stream(torch.cuda.Stream()):\n",
        ),
    ),
    "odd ranks exchange momentum in another order": Mutant.of(
        f"{_MEGATRON}.onebit_adam.step:OneBitAdam._exchange",
        "1-bit Adam",
        "on rank",
        ("in self._seams:", "in self._seams[::-1]:"),
        of_ranks=2,
    ),
    "one rank's buckets go in one hop": Mutant.of(
        f"{_COLLECTIVES}.makers:_hops",
        "two hops",
        "on rank",
        ("    try:\n", "    return None, None\n    try:\n"),
        of_ranks=8,
    ),
    "one limit for dense and expert exchanges": Mutant.of(
        "megatron_patch.session.session:Session.start",
        "experts in many buckets",
        "wait for one another",
        ("setdefault(group, deque())", "setdefault(None, deque())"),
        order=1,
    ),
    "DDP's buckets are compressed while they are filled": Mutant.of(
        f"{_PYTORCH}.ddp:Ddp._stream",
        "DDP",
        RACE,
        ("        stream.wait_stream(torch.cuda.current_stream())\n", ""),
    ),
    "DDP is told that a sum is there before it is": Mutant.of(
        f"{_PYTORCH}.ddp:Ddp._finish",
        "DDP in two hops",
        RACE,
        (
            "        handle.wait()\n        future.set_result(gradients)",
            "        future.set_result(gradients)\n        handle.wait()",
        ),
    ),
    "FSDP2's shard is used before its sum is there": Mutant.of(
        f"{_PYTORCH}.fsdp2:Flat.__call__", "FSDP2", NOT_WAITED, (_FLAT + ".wait()", _FLAT)
    ),
    "FSDP2's reduce-scatter runs on a stream that nothing waits for": Mutant.of(
        f"{_PYTORCH}.fsdp2:Flat.__call__",
        "FSDP2 in two hops",
        RACE,
        (_FLAT, f"with torch.cuda.stream(torch.cuda.Stream()):\n            {_FLAT}"),
    ),
    "the sum over FSDP2's replicas is not waited for": Mutant.of(
        f"{_PYTORCH}.fsdp2:Hybrid.all_reduce",
        "FSDP2, hybrid",
        NOT_WAITED,
        ("output, output, average, replicas).wait()", "output, output, average, replicas)"),
    ),
    "one stream for dense and expert exchanges": Mutant.of(
        f"{_COLLECTIVES}.workspace:Pool.stream_of",
        "experts in many buckets",
        "wait for one another",
        ("        if group not in", "        group = None\n        if group not in"),
        order=1,
    ),
}


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Within the block the package has the error."""
    module_name, path = mutant.where.split(":")
    module = importlib.import_module(module_name)
    function: Any = module
    for name in path.split("."):
        function = inspect.getattr_static(function, name)
    function = inspect.unwrap(function)
    source = inspect.getsource(function)
    for old, new in mutant.changes:
        assert source.count(old) == 1, f"{mutant.where} has no single {old!r}"
        source = source.replace(old, new)
    source = textwrap.dedent(source)
    source = source[source.index("def ") :]  # without decorators, which stay around it
    names: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + source, mutant.where, "exec"), vars(module), names)
    changed = names[function.__name__]
    original = function.__code__
    function.__code__ = changed.__code__
    try:
        yield
    finally:
        function.__code__ = original


def found_in(name: str) -> list[str]:
    """What the checker says of a mutant."""
    mutant = MUTANTS[name]
    between_ranks = mutant.of_ranks > 1 or mutant.order is not None
    found: list[str] = []
    calls = []
    for rank in range(setups.RANKS if between_ranks else 1):
        is_in = rank % mutant.of_ranks == mutant.of_ranks - 1
        with mutated(mutant) if is_in else contextlib.nullcontext():
            (outcome,) = setups.run(mutant.setup, [rank], order=mutant.order)
        found += outcome.found
        calls.append(outcome.collectives)
    if between_ranks:
        found += disagreements(calls)
        if waiting := circle(calls):
            found.append(f"they wait for one another: {waiting}")
    return found
