"""The low-bit all-reduce of torch DistributedDataParallel's gradients, through DDP's communication hook.

DDP calls the hook for each of its buckets, in their order, when the bucket's gradients are complete. The
exchange that the hook starts may be under way when it returns: it is finished when the second bucket after it
begins, or the last one does, so that all ranks issue the same collectives in the same order. On CUDA it runs
on a stream of its own, and so does not block the backward pass.

DDP assigns its parameters to buckets anew after the first backward pass, or the second one of a static graph;
until then gradients are sent in full. A resumed run exchanges them in the buckets that the checkpoint has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from megatron_patch.collectives.exchange import Exchange, Handle, all_reduced
from megatron_patch.collectives.makers import make_all_reduces
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.pytorch.contents import Sharded, contents_of, plain_name
from megatron_patch.session import torch_steps
from megatron_patch.session.session import IN_FLIGHT, Session
from megatron_patch.session.states import Exchanged

_hooks: WeakKeyDictionary[nn.Module, _Hook] = WeakKeyDictionary()
"""The hooks of models. DDP takes one hook and cannot remove it, so a model that is attached again has it."""


class _Hook:
    """The communication hook of one model, which compresses while `to` is set."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.to: ReferenceType[Ddp] | None = None  # DDP's C++ reducer keeps the hook; gc cannot look there.
        self._group: dist.ProcessGroup = model.process_group

    def __call__(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        to = None if self.to is None else self.to()
        return self.in_full(bucket) if to is None else to.exchange(bucket, self)

    def in_full(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """All-reduce a bucket uncompressed, bit for bit as DDP does without a hook."""
        # DDP multiplies when it copies gradients into the bucket. (If they are in the bucket already, because
        # they were not set to None, it divides, which is the same for 2, 4, 8, ... ranks.)
        gradients = bucket.buffer().mul_(1.0 / self._group.size())
        done = dist.all_reduce(gradients, group=self._group, async_op=True).get_future()
        reduced: Future[torch.Tensor] = done.then(lambda future: future.value()[0])
        return reduced


class Ddp:
    """An attached DistributedDataParallel.

    Args:
        model: the model.
        config: the options.

    Raises:
        UserError: the model has a communication hook already.
    """

    waits = False
    """DDP accumulates in `.grad`."""

    def __init__(self, model: DistributedDataParallel, config: CompressionConfig) -> None:
        self.asked = self.config = config
        self.model: Any = model
        self._group: dist.ProcessGroup = model.process_group
        parameters = list(model.parameters())
        self.session = Session(
            config,
            parameters[0].device,
            [self._group],
            lambda: parameters,
            lambda: any(parameter.grad is not None for parameter in parameters),
        )
        if getattr(model, "_use_python_reducer", False):
            raise UserError(
                "attach(): with torch._dynamo.config.optimize_ddp = 'python_reducer' DistributedDataParallel "
                "has no buckets; wrap the model with another value"
            )
        if model not in _hooks:
            if model._comm_hooks:
                raise UserError("attach(): this DistributedDataParallel has a communication hook already")
            _hooks[model] = hook = _Hook(model)
            # DDP checks annotations as types, and would reject a hook whose annotations are text.
            model.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
            model._comm_hooks.pop()  # Copies take these along, though their reducers have none.
        self._passes = 0
        self._first_passes = 1 + bool(model.static_graph)
        """The passes after which DDP assigns parameters to buckets anew."""
        self._resumed = False
        """Whether exchanges were made for a checkpoint before the first pass."""
        self._gathered: dict[str, torch.Tensor] = {}
        self._pending: list[tuple[Future[torch.Tensor], torch.Tensor]] = []
        """Of a first pass of a resumed run: gradients by name, the buckets and their futures."""
        # The buckets also have parameters that were frozen after the model was wrapped.
        named = {plain_name(name): p for name, p in model.module.named_parameters()}
        self._parameters = {name: Sharded(tuple(p.shape) or (1,)) for name, p in named.items()}
        self._names = {id(p): name for name, p in named.items()}
        reduced = zip(*model._build_params_for_reducer(), strict=True)
        self._reduced = [p for p, is_sparse in reduced if not is_sparse and self.session.carries([p.dtype])]
        """The parameters that a checkpoint's exchanges may have."""
        self._exchanges: dict[tuple[str, ...], Exchange] = {}
        """The exchanges by the names of a bucket's parameters, in the bucket's order."""
        self._open: deque[tuple[Handle, Future[torch.Tensor], torch.Tensor]] = deque()
        _hooks[model].to = ref(self)

    def detach(self) -> None:
        _hooks[self.model].to = None

    def where(self) -> str:
        return f"DistributedDataParallel all-reduce over {self._group.size()} ranks"

    def elements(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def exchange(self, bucket: dist.GradBucket, hook: _Hook) -> Future[torch.Tensor]:
        """Reduce a bucket in place; the future's value is the bucket."""
        session, gradients = self.session, bucket.buffer()
        session.pass_begins(bucket.index(), scale=torch_steps.loss_scale())
        if self.model.static_graph and bucket.index():
            # In the first pass every bucket has index 0, and of several ones none is the last.
            self._passes = max(self._passes, 1)
        number, self._passes = self._passes, self._passes + bucket.is_last()
        compresses = session.active and self._group.size() > 1 and not gradients.is_sparse
        first = number < self._first_passes
        if compresses and first and self._resumed and (names := self._of_checkpoint(bucket)):
            return self._gather(bucket, names)
        exchange = self._exchange_of(bucket) if compresses and not first else None
        if exchange is None:
            session.count(all_reduced(gradients, self._group))
            future = hook.in_full(bucket)
            if self._pending and bucket.is_last():
                with self._stream(gradients):
                    self._exchange_gathered()
            if not self._open or not bucket.is_last():
                return future
        else:
            future = self._future(gradients)
        with self._stream(gradients):
            if exchange is not None:
                while len(self._open) >= IN_FLIGHT:
                    self._finish()
                handle = session.start(exchange, gradients, gradients, True, self._group)
                self._open.append((handle, future, gradients))
            while bucket.is_last() and self._open:
                self._finish()
        return future

    def _finish(self) -> None:
        handle, future, gradients = self._open.popleft()
        handle.wait()
        future.set_result(gradients)

    def _of_checkpoint(self, bucket: dist.GradBucket) -> list[str]:
        """Return the names of a bucket's parameters, if the exchanges of the checkpoint have any of them."""
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        return [] if {name for key in self._exchanges for name in key}.isdisjoint(names) else names

    def _gather(self, bucket: dist.GradBucket, names: Sequence[str]) -> Future[torch.Tensor]:
        """Wait for all gradients that the exchanges of the checkpoint have, and then run these exchanges."""
        tensor = bucket.buffer()
        future = self._future(tensor)
        self._pending.append((future, tensor))
        sizes = [parameter.numel() for parameter in bucket.parameters()]
        self._gathered |= dict(zip(names, tensor.split(sizes), strict=True))
        if bucket.is_last() or all(self._gathered.keys() >= set(key) for key in self._exchanges):
            with self._stream(tensor):
                self._exchange_gathered()
        return future

    def _exchange_gathered(self) -> None:
        gathered, pending = self._gathered, self._pending
        self._gathered, self._pending = {}, []
        for key, exchange in self._exchanges.items():
            parts = [gathered.pop(name) for name in key]
            tensor = torch.cat(parts)
            self.session.start(exchange, tensor, tensor, True, self._group).wait()
            torch._foreach_copy_(parts, tensor.split([part.numel() for part in parts]))
        for gradient in gathered.values():  # The checkpoint has no exchange for them.
            self.session.count(all_reduced(gradient, self._group))
            dist.all_reduce(gradient.mul_(1.0 / self._group.size()), group=self._group)
        for future, tensor in pending:
            future.set_result(tensor)

    def _future(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        return Future(devices=[tensor.device] if tensor.is_cuda else None)

    def _stream(self, gradients: torch.Tensor) -> Any:
        if not gradients.is_cuda:
            return nullcontext()
        stream = self.session.workspace.pool.stream_of(self._group)
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _exchange_of(self, bucket: dist.GradBucket) -> Exchange | None:
        """Return a bucket's exchange; None if its gradients are sent in full."""
        parameters = bucket.parameters()
        key = tuple(self._names[id(parameter)] for parameter in parameters)
        if key not in self._exchanges:
            # DDP's buckets of complex gradients are real, with twice the elements.
            if not self.session.carries([bucket.buffer().dtype, *(p.dtype for p in parameters)]):
                return None
            self._make(key)
        return self._exchanges[key]

    def _make(self, key: tuple[str, ...]) -> None:
        """Create the exchange of a bucket, in place of those that share parameters with it."""
        for old in [old for old in self._exchanges if not set(old).isdisjoint(key)]:
            self.session.exchanges.remove(self._exchanges.pop(old))
        contents = contents_of([self._parameters[name] for name in key])
        (self._exchanges[key],) = make_all_reduces([contents], self._group, self.session.setup).exchanges
        self.session.exchanges.append(self._exchanges[key])

    def groups_of_ranks(self) -> dict[str, tuple[int, int]]:
        return {"shard": (1, 0), "replicate": (self._group.size(), self._group.rank())}

    def prepare(self, sets: Sequence[Sequence[str]]) -> None:
        """Attachment.prepare."""
        trained = {self._names[id(parameter)] for parameter in self._reduced if parameter.requires_grad}
        fitting = [tuple(names) for names in sets if names and trained >= set(names)]
        for key in fitting if self._group.size() > 1 else ():
            if key not in self._exchanges:
                self._make(key)
        self._resumed |= bool(self._exchanges) and self._passes == 0

    def exchanged(self) -> list[Exchanged]:
        return [
            Exchanged(exchange, {name: self._parameters[name].shape for name in key}, averages=True)
            for key, exchange in self._exchanges.items()
        ]
