"""Attaches compression to Megatron's DistributedDataParallel, and keeps track of what is attached.

`attach` walks a wrapped model's bucket groups and overrides their gradient exchange (seams/gradients.py)
and their weight gather (seams/weights.py). It logs once what is compressed, and what is not and why. A
configuration that cannot be served raises an error (unsupported.py). The public functions are in doors.py.

Parameters that tensor-parallel ranks do not split are kept equal by an attribute that makes Megatron average
their gradients (seams/replicated_params.py). Torch's FSDP2 and Megatron-FSDP have no bucket groups and are
attached by fsdp/. The embedding and layer-norm all-reduces of finalize_model_grads are not patched: they are
tiny and run within a model-parallel group.
"""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from packaging.version import Version

from megatron_patch.collectives.workspace import forget_shared_pools
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.megatron import arguments, outer_steps, patching, symbols
from megatron_patch.megatron.onebit_adam import norm_sketch
from megatron_patch.megatron.onebit_adam.step import OneBitAdam
from megatron_patch.megatron.outer_steps import OuterSteps
from megatron_patch.megatron.seams import optimizer_step, replicated_params
from megatron_patch.megatron.seams.gradients import BucketGroupSeam, is_rerun
from megatron_patch.megatron.seams.waits import Waits
from megatron_patch.megatron.seams.weights import ChunkWeights, gathered_after
from megatron_patch.megatron.startup_log import log_startup
from megatron_patch.megatron.unsupported import (
    TORCH_FSDP2,
    fsdp_of,
    refuse_chunk,
    refuse_graphed,
    refuse_one_by_one,
    refuse_other_optimizer,
    refuse_stepping,
    refuse_with_outer_steps,
    takes_turns,
)
from megatron_patch.session.session import Session
from megatron_patch.session.states import Attachment, Exchanged, announces
from megatron_patch.session.steps import Counts
from megatron_patch.session.trial import Table, Trial
from megatron_patch.weights.gather import try_kernels

logger = logging.getLogger(__name__)


class MegatronAttachment(Attachment, Protocol):
    """One attached model chunk."""

    weights: ChunkWeights
    outer: OuterSteps | None


class FsdpAttachment(MegatronAttachment, Protocol):
    """One that is attached by fsdp/."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the log that say what is compressed."""


class MegatronDdp:
    """One attached DDP instance: its session and the seams of its bucket groups, dense ones first."""

    def __init__(self, chunk: Any, config: CompressionConfig) -> None:
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        buckets = [bucket for group in groups for bucket in group.buckets]
        device = buckets[0].grad_data.device if buckets else torch.device("cpu")
        self._gradients = buckets[0].grad_data.dtype if buckets else torch.float32
        self._chunk = weakref.ref(chunk)  # A strong reference would keep an attached model alive.
        self.asked = config
        """The options as the caller gave them; with Muon, the session may use another method."""
        everyone = chunk.intra_dp_cp_group if config.outer_steps else chunk.dp_cp_group
        ranks = [everyone, *([chunk.tp_group] if chunk.expert_parallel_bucket_groups else [])]
        config = config.for_optimizer(arguments.megatron_flag("optimizer"))
        parameters = list(chunk.module.parameters())
        self.session = Session(config, device, ranks, lambda: parameters)
        if config.is_onebit_adam:
            norm_sketch.try_kernel(device)
        self.outer: OuterSteps | None = OuterSteps(chunk, self.session) if config.outer_steps else None
        self.seams = [
            BucketGroupSeam(group, self.session, expert=place >= len(chunk.bucket_groups))
            for place, group in enumerate(groups)
        ]
        self.weights = ChunkWeights(chunk, self.session)
        self._waits = Waits(groups, self.session)  # It comes last, so that it times what the seams do.
        if self.outer is not None:
            self.session.memory.sources.append(self.outer.kept)
            self.session.on_restart.append(self.outer.forget)
            self.session.on_dropped.append(self._make_up)
        self.session.memory.sources.append(self._kept)
        self.session.on_restart.append(self._forget)
        self._marked = replicated_params.mark(chunk, chunk.tp_group) if config.compresses else []
        self.trial: Trial | None = None
        """The turns of all chunks that this one's optimizer updates; the first chunk has it."""
        self.codes: bool | None = any(seam.gathers for seam in self.weights.seams)
        """Whether the exact gather can serve any weights; None if turns of it might fail."""
        if self.codes and not config.codes_weights:
            try:
                try_kernels(device)
            except UserError as error:
                self.codes = None
                logger.warning("megatron-loco: no turns of the exact weight gather: %s", error)

    def turns(self, chunks: Sequence[MegatronDdp]) -> Trial | None:
        """Return the turns of `chunks`, of which this is the first; None where none are taken."""
        here, config = self._here, self.session.config
        gathers = here.ddp_config.use_distributed_optimizer
        if self.trial is None and (config.trial or (config.takes_turns and gathers)):
            pipeline = here.pp_group if isinstance(here.pp_group, list) else [here.pp_group]
            found = {chunk.codes for chunk in chunks}
            codes = None if None in found else True in found
            groups = [here.dp_cp_group, here.tp_group, *pipeline]
            self.trial = Trial(chunks, groups, codes, self._gradients)
        return self.trial

    def sent(self) -> float:
        """Return the bytes that this rank's last step has sent (trial.Tried)."""
        report = self.session.report
        return (
            report.traffic.nbytes + report.inside_bytes + sum(b.traffic.nbytes for b in self.weights.report)
        )

    def coded(self) -> tuple[float, float]:
        """Return the bytes of the last step's messages of weights, and the weights in them (trial.Tried)."""
        coded = [bucket for bucket in self.weights.report if bucket.weights]
        return sum(bucket.message_bytes for bucket in coded), sum(bucket.weights for bucket in coded)

    def has_room(self) -> bool:
        """Whether the device has memory for the exact gather, at a step's peak (trial.Tried)."""
        if self.session.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.session.device)
        free += torch.cuda.memory_reserved(self.session.device)
        free -= torch.cuda.max_memory_allocated(self.session.device)
        shards = sum(gather.shard_size for seam in self.weights.seams for gather in seam.gathers)
        return free > _BYTES_OF_TURNS * shards

    def _kept(self) -> Iterator[torch.Tensor]:
        for seam in self.weights.seams:
            for gather in seam.gathers:
                yield from gather.kept
        for gradients in self.seams:
            if gradients.momentum is not None:
                yield from gradients.momentum.held or ()

    def _make_up(self) -> None:
        if self.outer is not None and (optimizer := self.outer.optimizer()) is not None:
            outer_steps.make_up(optimizer, _outer_of(_updated_by(optimizer)))

    def _forget(self) -> None:
        for seam in self.seams:
            if seam.momentum is not None:
                seam.momentum.held = None  # The next step takes it from Adam's state.

    def exchanged(self) -> Iterator[Exchanged]:
        """Yield every exchange of gradients or momentum, for checkpoints."""
        names = {parameter: name for name, parameter in self._here.module.named_parameters()}
        for seam in self.seams:
            for stage in seam.stages:
                exchanges = stage.reduction.exchanges
                for bucket, exchange in zip(seam.group.buckets, exchanges, strict=True) if exchanges else ():
                    shapes = {names[p]: tuple(p.shape) for p in bucket.param_to_index}
                    yield Exchanged(exchange, shapes, stage.averages)

    @property
    def _here(self) -> Any:
        chunk = self._chunk()
        assert chunk is not None
        return chunk

    def groups_of_ranks(self) -> dict[str, tuple[int, int]]:
        """Return the process groups by name, for checkpoints: size, and this rank's number."""
        chunk = self._here
        pipeline = chunk.pp_group[0] if isinstance(chunk.pp_group, list) else chunk.pp_group
        groups = {"tensor": chunk.tp_group, "pipeline": pipeline, "expert": chunk.ep_group}
        groups["data"] = chunk.dp_cp_group
        sizes = {name: (group.size(), group.rank()) for name, group in groups.items()}
        return {**sizes, "instances": (chunk.ddp_config.num_distributed_optimizer_instances, 0)}

    def detach(self) -> None:
        self._waits.detach()
        for seam in self.seams:
            if self.session.ledger.leaves_unreduced and seam.momentum is not None:
                seam.momentum.reduce_gradients()  # The next step is Megatron's own and needs them reduced.
            seam.detach()
        self.weights.detach()
        if self.outer is not None:
            self.outer.detach()
        replicated_params.unmark(self._marked)


_BYTES_OF_TURNS = 16
"""Twice what the exact gather takes at most for a weight of the own shard: the old weight, its message and
what coding takes on a GPU (docs/weight_gather.md)."""


def _attached(chunk: Any, config: CompressionConfig) -> MegatronDdp | FsdpAttachment:
    """Attach a chunk according to the class that wraps it."""
    kind = fsdp_of(chunk)
    if kind is None:
        return MegatronDdp(chunk, config)
    # Imported here, because the FSDPs need a newer torch, and einops, which DDP does not.
    if kind == TORCH_FSDP2:
        from megatron_patch.megatron.fsdp.torch_fsdp2 import TorchFsdp2

        return TorchFsdp2(chunk, config)
    from megatron_patch.megatron.fsdp.megatron_fsdp import MegatronFsdp

    return MegatronFsdp(chunk, config)


_attachments: WeakKeyDictionary[Any, MegatronDdp | FsdpAttachment] = WeakKeyDictionary()
_detached: WeakKeyDictionary[Any, Counts] = WeakKeyDictionary()
"""The counts of chunks that were attached before and are detached now."""
_ONEBIT = "_megatron_loco_onebit_adam"
"""The attribute of a Megatron optimizer that holds its OneBitAdam; a dictionary would keep both alive."""
_onebit_optimizers: WeakSet[Any] = WeakSet()
_CLEARING = "_megatron_loco_clearing"
"""The attribute of a chunk that holds the override of its `zero_grad_buffer`."""


def attachment_of(chunk: Any) -> MegatronAttachment | None:
    """Return the attachment of a wrapped model chunk; None if it is not attached."""
    return _attachments.get(chunk)


def session_of(chunk: Any) -> Session | None:
    """Return the session of a wrapped model chunk; None if it is not attached."""
    attachment = attachment_of(chunk)
    return None if attachment is None else attachment.session


def table_of(chunks: Sequence[Any]) -> Table | None:
    """Return the table of the trial that a model's chunks have made; None before it has ended."""
    trials = [a.trial for chunk in chunks if isinstance(a := attachment_of(chunk), MegatronDdp)]
    return next((trial.table for trial in trials if trial is not None), None)


def outer_steps_of(chunks: Sequence[Any]) -> list[OuterSteps]:
    """Return the outer steps of those wrapped chunks that make some."""
    return [outer for outer, _ in _outer_of(map(attachment_of, chunks))]


def finish_outer_steps(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Make the outer steps of a model's chunks that are not due yet, as before a checkpoint."""
    outer_steps.finish(optimizer, _outer_of(map(attachment_of, chunks)))


def _outer_of(attachments: Iterable[MegatronAttachment | None]) -> list[tuple[OuterSteps, ChunkWeights]]:
    """Return the outer steps of those attachments that make some."""
    return [(a.outer, a.weights) for a in attachments if a is not None and a.outer is not None]


def attached_chunks() -> list[Any]:
    return list(_attachments)


def onebit_of(optimizer: Any) -> OneBitAdam | None:
    """Return the OneBitAdam of a Megatron optimizer; None before its first step or with another method."""
    return getattr(optimizer, _ONEBIT, None)


def chunks_of(model: Any, caller: str) -> list[Any]:
    """Return the wrapped chunks of a model, which is a list of them or a single one.

    Raises:
        UserError: an element is not wrapped by Megatron; the message names `caller`, the public function.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not isinstance(chunk, _BaseDataParallel):
            raise UserError(
                f"{caller}(): {type(chunk).__module__}.{type(chunk).__qualname__} is not wrapped in "
                "Megatron's DistributedDataParallel: pass what Megatron's model builders return, a list of "
                "wrapped chunks or one"
            )
    return chunks


def attach(chunks: Sequence[Any], config: CompressionConfig) -> None:
    """Compress the gradient exchange of DDP-wrapped model chunks.

    Attaching a chunk again with the same options changes nothing; with other options, detach it first
    (`disable`). Call it before the optimizer's first step.

    Raises:
        UserError: the configuration cannot be served, or a chunk is attached with other options.
    """
    _warn_of_unknown_release()
    new: dict[Any, CompressionConfig] = {}
    for chunk in chunks:
        served = config if takes_turns(chunk) else config.without_turns()
        refuse_chunk(chunk, served)
        attached = _attachments.get(chunk)
        if attached is None:
            new[chunk] = served
        elif attached.asked != served:
            raise UserError(
                "compression is attached to this model already, with other options; disable() first"
            )
    for chunk, served in new.items():  # It comes last: a refused chunk leaves the other ones unchanged.
        _attachments[chunk] = _attached(chunk, served)
        _report_clearing(chunk, _attachments[chunk].session)
    attachments = [_attachments[chunk] for chunk in new]
    if attachments:
        attachments[0].session.ledger.announces = announces(attachments[0])
    for chunk in new:
        if chunk in _detached:
            _attachments[chunk].session.ledger.go_on_from(_detached.pop(chunk))
    ddp = [attachment for attachment in attachments if isinstance(attachment, MegatronDdp)]
    if ddp:
        log_startup(
            next(iter(new)),
            ddp[0].session,
            [seam for attachment in ddp for seam in attachment.seams],
            [seam for attachment in ddp for seam in attachment.weights.seams],
        )
    for attachment in attachments:
        if isinstance(attachment, MegatronDdp) or not attachments[0].session.ledger.announces:
            continue
        for line in attachment.lines():
            logger.info("megatron-loco: %s", line)
    optimizer_step.listen(_Steps())


def _report_clearing(chunk: Any, session: Session) -> None:
    """Override a chunk's `zero_grad_buffer`, so that it tells the session that gradients are cleared."""
    original = chunk.zero_grad_buffer

    @functools.wraps(original)
    def zero_grad_buffer(*args: Any, **kwargs: Any) -> Any:
        if not is_rerun():  # A rerun clears what it makes anew.
            session.gradients_cleared()
        return original(*args, **kwargs)

    # The chunk has it, as an optimizer has its OneBitAdam.
    vars(chunk)[_CLEARING] = patching.override(chunk, "zero_grad_buffer", zero_grad_buffer)


def detach_all() -> None:
    """Detach every model: from the next step on, Megatron's own exchanges run again."""
    for optimizer in _onebit_optimizers:
        getattr(optimizer, _ONEBIT).leave()
    for chunk, attachment in list(_attachments.items()):
        _detached[chunk] = attachment.session.ledger.counts
        attachment.detach()
        vars(chunk).pop(_CLEARING).undo()
    _attachments.clear()
    for optimizer in _onebit_optimizers:
        delattr(optimizer, _ONEBIT)
    _onebit_optimizers.clear()
    forget_shared_pools()
    optimizer_step.stop_listening()


class _Steps:
    """Makes the steps of the optimizers that update attached chunks (optimizer_step.Stepper)."""

    def step(self, optimizer: Any, original: Callable[[], Any]) -> Any:
        _look_at(optimizer)
        onebit = _onebit_for(optimizer)
        return _and_gathered(optimizer, original if onebit is None else lambda: onebit.step(original))

    def prepare(self, optimizer: Any, original: Callable[[], bool]) -> bool:
        _look_at(optimizer)
        onebit = _onebit_for(optimizer)
        return original() if onebit is None else onebit.prepare(original)

    def update(self, optimizer: Any, original: Callable[[], bool]) -> bool:
        onebit = onebit_of(optimizer)
        done = _and_gathered(optimizer, original if onebit is None else lambda: onebit.update(original))
        return bool(done)

    def other_begins(self, optimizer: torch.optim.Optimizer) -> None:
        refuse_other_optimizer(optimizer, [attachment.session for attachment in _updated_by(optimizer)])

    def prepared(self, optimizer: Any, loss_scale_factor: float) -> None:
        for attachment in _updated_by(optimizer):
            attachment.session.ledger.prepare(loss_scale_factor)

    def ended(self, optimizer: Any, successful: bool, loss_scale_factor: float) -> None:
        updated = _updated_by(optimizer)
        if not updated:
            return
        with updated[0].session.waiting():
            outer_steps.end_step(optimizer, _outer_of(updated))
        parts, rates = optimizer_step.leaves_of(optimizer), optimizer_step.learning_rates(optimizer)
        for attachment in updated:
            ended = attachment.session.optimizer_stepped(
                parts, successful, factor=loss_scale_factor, rates=rates
            )
            attachment.weights.end_step(continues=not ended)
        # Ranks may step a torch optimizer, or none at all, as they like; Megatron's are stepped by all.
        megatrons = not isinstance(optimizer, torch.optim.Optimizer)
        ddp = [attachment for attachment in updated if isinstance(attachment, MegatronDdp) and megatrons]
        if ended and ddp and (trial := ddp[0].turns(ddp)) is not None:
            trial.step_ended()
            if trial.table is not None and ddp[0].session.config.trial_only:
                raise SystemExit(0)  # As Megatron ends after --exit-interval.


def _updated_by(optimizer: Any) -> list[MegatronAttachment]:
    return [
        attachment for chunk, attachment in _attachments.items() if optimizer_step.updates(optimizer, chunk)
    ]


def _look_at(optimizer: Any) -> None:
    """Refuse optimizer settings that only the step shows, and use the optimizer's default method."""
    updated = _updated_by(optimizer)
    sessions = [attachment.session for attachment in updated]
    outer_steps.begin_step(optimizer, _outer_of(updated))
    for part in optimizer_step.leaves_of(optimizer) if sessions else ():
        refuse_graphed(part.config)
        if any(session.config.outer_steps for session in sessions):
            refuse_with_outer_steps(part.config)
        if any(session.config.compresses for session in sessions):
            refuse_stepping(part)
    use_default_method(optimizer)


def use_default_method(optimizer: Any) -> None:
    """Use the optimizer's default method for the models that it updates, if the user gave them none."""
    sessions = [attachment.session for attachment in _updated_by(optimizer)]
    for part in optimizer_step.leaves_of(optimizer):
        name = getattr(getattr(part, "config", None), "optimizer", None)
        changed = [session for session in sessions if session.use_default_method_of(name)]
        if changed and dist.get_rank() == 0:
            logger.info("megatron-loco: method %s, the default with Muon", changed[0].config.method)


def _and_gathered(optimizer: Any, update: Callable[[], Any]) -> Any:
    """Run an update of weights, and the exact gather of the weights that it changed."""
    return gathered_after([attachment.weights for attachment in _updated_by(optimizer)], update)


def _onebit_for(optimizer: Any) -> OneBitAdam | None:
    """Return the OneBitAdam of an optimizer, created at its first step; None with another method.

    Raises:
        UserError: 1-bit Adam cannot make this optimizer's step.
    """
    onebit = onebit_of(optimizer)
    attached = [
        (chunk, attachment.session, attachment.seams)
        for chunk, attachment in _attachments.items()
        if onebit is None
        and isinstance(attachment, MegatronDdp)
        and attachment.session.config.is_onebit_adam
        and optimizer_step.updates(optimizer, chunk)
    ]
    if attached:
        refuse_one_by_one([session for _, session, _ in attached], optimizer_step.leaves_of(optimizer))
        onebit = OneBitAdam(optimizer, attached)
        setattr(optimizer, _ONEBIT, onebit)
        _onebit_optimizers.add(optimizer)
    return onebit


@functools.cache
def _warn_of_unknown_release() -> None:
    release = Version(Version(megatron.core.__version__).base_version)
    first, behind = symbols.TESTED
    if not Version(first) <= release < Version(behind):
        warnings.warn(
            f"megatron-loco is tested with megatron-core >={first},<{behind}; this is "
            f"{megatron.core.__version__} (megatron-loco doctor says what it lacks)",
            stacklevel=3,
        )
