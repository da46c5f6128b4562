"""The error states of an attached model in a checkpoint: one tensor of bytes and one manifest for each rank.

`pack` makes them and `apply` puts them back. A rank reads what it saved itself, and without any collective,
since some training loops save or load on some ranks only. In the same layout (the same parameters in the same
exchanges over the same groups of ranks, in the same blocks) errors are restored bit for bit. In another one
they start from zero, as they do after every `reset_interval` steps; counters and phases go on.

`state_dict` and `load_state_dict` offer the same two values to torch.distributed.checkpoint, for trainers
with checkpoints of their own:

    dcp.save({"compression": state_dict(model)}, checkpoint_id=PATH)

    state = state_dict(model, reader=dcp.FileSystemReader(PATH))     room for what this rank needs
    dcp.load({"compression": state}, checkpoint_id=PATH)
    load_state_dict(model, state)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_patch.collectives.exchange import Exchange
from megatron_patch.collectives.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.files import load_json
from megatron_patch.session.onset import Onset, Phase
from megatron_patch.session.session import Kept, Session
from megatron_patch.session.steps import Events

logger = logging.getLogger(__name__)

FORMAT = 3
"""The format number of manifests."""
_ALIGNMENT = 8
_RANK = "megatron_loco_rank_"
_MANIFEST = re.compile(rf"(?P<prefix>.*){_RANK}(?P<rank>\d+)\.manifest")


class Damaged(Exception):
    """Saved error states are missing, truncated, changed or not this checkpoint's; the text says which."""


@dataclass(frozen=True)
class Exchanged:
    """An exchange, and the parameters whose gradients it reduces."""

    exchange: Exchange
    parameters: Mapping[str, Sequence[int]]
    """Their names and shapes, in their order in the exchange's tensor."""
    averages: bool
    """Whether the sum is divided by the number of ranks."""


class Attachment(Protocol):
    """One attached model, or one chunk of it, whatever wraps it."""

    asked: CompressionConfig
    """The options as the caller gave them; those in use may have another default method."""
    session: Session

    def exchanged(self) -> Iterable[Exchanged]:
        """Return every exchange that there is so far, in an order that is the same in every run."""

    def groups_of_ranks(self) -> dict[str, tuple[int, int]]:
        """Return the process groups that the model is spread over by name: size, and this rank's number."""

    def detach(self) -> None:
        """Restore the stock exchange from the next backward pass on."""


def announces(attachment: Attachment) -> bool:
    """Whether this rank logs for all ranks of a model, which may be a part of the job's."""
    return all(number == 0 for _, number in attachment.groups_of_ranks().values())


class RankState:
    """The error states and counters on this rank of an attached model, or of several that are saved together.

    Args:
        attachments: their parts, at least one.
        layers: the numbers of the layers that this rank has, where parameters' names do not say them.
        places: the place of each part among the caller's models, of which some may not be compressed.
    """

    def __init__(
        self,
        attachments: Sequence[Attachment],
        layers: Sequence[int] = (),
        places: Sequence[int] | None = None,
    ) -> None:
        self.sessions = [attachment.session for attachment in attachments]
        for session in self.sessions:
            session.memory.bring_back()
            session.disturbed = True
        self.config = self.sessions[0].config
        self.parts = [list(attachment.exchanged()) for attachment in attachments]
        """The exchanges of each session."""
        self.senders = [
            (session, sender)
            for session, part in zip(self.sessions, self.parts, strict=True)
            for each in part
            for sender in each.exchange.senders
        ]
        groups = [attachment.groups_of_ranks() for attachment in attachments]
        self.groups = {name: size for name, (size, _) in groups[0].items()}
        self.places = list(range(len(attachments))) if places is None else places
        self._here = self.places, groups, layers

    @property
    def layout(self) -> str:
        """The SHA-256 of all that says which elements of the model each error belongs to, and its blocks."""
        content = [
            *self._here,
            [
                [
                    each.exchange.describe(),
                    each.averages,
                    list(each.parameters.items()),
                    [_storage(sender) for sender in each.exchange.senders],
                ]
                for part in self.parts
                for each in part
            ],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors to be saved: `2.codes` is of the third sender."""
        return {
            f"{number}.{name}": tensor
            for number, (session, sender) in enumerate(self.senders)
            for name, tensor in (sender.state() if session.config.save_error else {}).items()
        }

    def start_from_zero(self, steps: int) -> None:
        """Restart every session after `steps` optimizer steps, with errors of zero."""
        for session in self.sessions:
            session.restart(steps)


def _storage(sender: Sender) -> list[Any]:
    layout, error = sender.layout, sender.error
    cut = [layout.numel, layout.shards, layout.shard_size, layout.block, layout.blocks, layout.by_shard]
    return [*cut, error and error.dtype, sender.codec.rotation.rotated]


def pack(rank: RankState, scale: float | None) -> tuple[str, torch.Tensor]:
    """Return this rank's manifest, and a copy of its tensors, uint8 on CPU.

    Args:
        rank: the state.
        scale: the loss scale of errors whose session has seen none; None if they carry none.
    """
    tensors, entries, size = rank.tensors(), {}, 0
    for name, tensor in tensors.items():
        start = -(-size // _ALIGNMENT) * _ALIGNMENT
        entries[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]
        size = start + tensor.nbytes
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        data[entries[name][2] :][: flat.numel()].copy_(flat)
    manifest = {
        "format": FORMAT,
        "groups": rank.groups,
        "world_size": dist.get_world_size(),
        "layout": rank.layout,
        "places": rank.places,
        "sessions": [_counters(session, scale) for session in rank.sessions],
        "tensors": entries,
        "nbytes": size,
        "crc32_of_bytes": zlib.crc32(data.numpy()),
    }
    return sealed(manifest), data


def _counters(session: Session, scale: float | None) -> dict[str, Any]:
    session.settle()  # A loop saves between steps, even if no optimizer's step was seen.
    ledger = session.ledger
    return {
        "config": session.config.as_dict(),
        "scaled": session.scale is not None,
        "loss_scale": scale if session.scale is None else float(session.scale),
        "mid_step": ledger.within_step and not ledger.sends_momentum,
        "steps": ledger.steps,
        "steps_seen": ledger.steps_seen,
        "events": dataclasses.asdict(ledger.events),
        "phase": dataclasses.asdict(ledger.phase),
        "onset": dataclasses.asdict(ledger.onset),
        "kept": session.kept and dataclasses.asdict(session.kept),
    }


def sealed(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, which ends with a checksum of what stands before it."""
    content = {name: value for name, value in manifest.items() if name != "crc32"}
    return json.dumps(content | {"crc32": zlib.crc32(json.dumps(content).encode())})


@dataclass(frozen=True)
class Saved:
    """A model's error states in a checkpoint; the functions raise Damaged."""

    ranks: Collection[int]
    """The ranks that the checkpoint has a manifest of."""
    manifest: Callable[[int], str]
    """Returns a rank's manifest."""
    data: Callable[[int], torch.Tensor]
    """Returns a rank's tensor of bytes."""


def apply(rank: RankState, saved: Saved, scale: float) -> str:
    """Restore a rank's state; returns a line that says what happened on this rank.

    Args:
        rank: the state of this rank, which has been started from zero.
        saved: what the checkpoint has.
        scale: the loss scale that has been loaded.

    Raises:
        Damaged: the saved state is damaged. Counters were restored before, from another rank's manifest if
            need be: they belong to the whole job, and ranks must agree on what they exchange.
    """
    here, problem, manifest = dist.get_rank(), None, None
    for number in sorted(saved.ranks, key=lambda number: (number != here, number)):
        try:
            manifest = _parsed(saved.manifest(number))
            break
        except Damaged as damaged:
            problem = problem or damaged
    try:
        if manifest is None:
            raise problem or Damaged("it has no error states")
        same_job = manifest["world_size"] == dist.get_world_size() and manifest["groups"] == rank.groups
        if here not in saved.ranks and same_job:
            problem = Damaged(f"it has no error states of rank {here}")
        return _applied(rank, manifest, here in saved.ranks, saved, scale, problem)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Damaged(f"it holds what this release does not know: {error!r}") from error


def _parsed(text: str) -> dict[str, Any]:
    try:
        manifest = load_json(text)
        if manifest["format"] != FORMAT:
            raise Damaged(f"it has format {manifest['format']!r}; this release reads {FORMAT}")
        if sealed(manifest) != text:
            raise Damaged("its manifest has changed since it was saved")
        return dict(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"it holds what this release does not know: {error!r}") from error


def _applied(
    rank: RankState,
    manifest: Mapping[str, Any],
    is_own: bool,
    saved: Saved,
    scale: float,
    problem: Damaged | None,
) -> str:
    states = dict(zip(manifest["places"], manifest["sessions"], strict=True))
    first = manifest["sessions"][0]  # Chunks of one model, of which there may be more now, count alike.
    before = {s: states.get(place, first) for place, s in zip(rank.places, rank.sessions, strict=True)}
    told = {session: _resumed(session, state, scale) for session, state in before.items()}
    lines = dict.fromkeys(line for line in told.values() if line is not None)
    if None not in told.values():
        return "; ".join(lines)
    if problem is not None:
        raise problem
    if not is_own or manifest["layout"] != rank.layout:
        old = manifest["groups"]
        changed = [f"{name} {old[name]} -> {n}" for name, n in rank.groups.items() if old.get(name, n) != n]
        why = f" ({', '.join(changed)})" if changed else ""
        return f"errors start from zero: the checkpoint is of another layout{why}"
    tensors = _unpacked(manifest, saved.data(dist.get_rank()) if manifest["nbytes"] else None)
    for number, (session, sender) in enumerate(rank.senders):
        if sender.error is None or told[session] is not None:
            continue
        try:
            sender.error.restore(tensors.get(number, {}))
        except ValueError as error:
            raise Damaged(f"state {number}: {error}") from error
        # e / (1 - beta), the gradient that is still to be sent, stays the same.
        old_beta, old_scale = before[session]["config"]["error_beta"], before[session]["loss_scale"]
        factor = (1 - session.config.beta) / (1 - old_beta) * (scale / old_scale if old_scale else 1)
        if factor != 1.0:
            sender.error.scale_by(factor)
    return "; ".join(["error states restored exactly", *lines])


def _resumed(session: Session, state: Mapping[str, Any], scale: float) -> str | None:
    """Restore a session's counters; returns why its errors are not restored, or None."""
    config, before, ledger = session.config, state["config"], session.ledger
    session.restart(state["steps"])
    if state["scaled"]:
        session.scale = torch.tensor(scale, device=session.device)
    ledger.steps_seen = state["steps_seen"]
    ledger.events = Events(**state["events"])
    ledger.onset = Onset.of_manifest(state, config)
    session.kept = Kept(**kept) if (kept := state.get("kept")) else None
    if before["method"] != config.method:
        return f"errors start from zero: the checkpoint is of method {before['method']}"
    ledger.phase = Phase(**state["phase"])
    if ledger.phase.variance_steps is None and config.warmup_steps is not None:
        ledger.phase.switch_step = None  # A warm-up that is not over ends when the options of this run say.
    if state["mid_step"]:
        ledger.events.replays += 1
        return "errors start from zero: the checkpoint is from within a step, which runs again"
    if not config.keeps_errors:
        return "step counters restored; this method keeps no errors"
    if not before["save_error"]:
        return "errors start from zero: they were not saved (compression.save_error: false)"
    return None


def _unpacked(manifest: Mapping[str, Any], data: torch.Tensor | None) -> dict[int, dict[str, torch.Tensor]]:
    """Return the tensors by the number of their sender and by name."""
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    if data is None:
        return tensors
    if data.numel() != manifest["nbytes"]:
        raise Damaged("its error states are of another size than its manifest says")
    if zlib.crc32(data.numpy()) != manifest["crc32_of_bytes"]:
        raise Damaged("its error states have changed since they were saved")
    for key, (dtype, shape, start) in manifest["tensors"].items():
        number, _, name = key.partition(".")
        of_torch = getattr(torch, dtype)
        nbytes = math.prod(shape) * of_torch.itemsize
        tensor = data[start : start + nbytes].clone().view(of_torch).view(shape)
        tensors.setdefault(int(number), {})[name] = tensor
    return tensors


# --- torch.distributed.checkpoint -------------------------------------------------------------------------

RankOf = Callable[[Mapping[int, Sequence[Sequence[str]]]], RankState]
"""Makes this rank's RankState. Its argument is, by the places of the model's parts in a checkpoint, the names
of the parameters in each exchange, for which exchanges are made first; it may be empty. All ranks call it."""


def state_dict(
    rank_of: RankOf | None, scale: float | None, reader: Any = None, path: str | None = None
) -> dict[str, Any]:
    """Return a model's error states and counters on this rank, as copies on the CPU.

    Args:
        rank_of: makes this rank's state; None if this rank has none.
        scale: as of `pack`.
        reader: a dcp.StorageReader of a checkpoint to load: the result then has room for what this rank needs
            of the checkpoint, whatever layout it was saved in.
        path: the keys of this model's state in the reader's checkpoint, joined by dots. It may be left out
            if the checkpoint has the state of only one model.

    Raises:
        UserError: the reader's checkpoint has no such state, or several.
    """
    if rank_of is None:
        return {}
    if reader is not None:
        return _room_for(reader, path)
    rank = rank_of({})
    manifest, data = pack(rank, scale)
    sets = [[list(each.parameters) for each in part] for part in rank.parts]
    here = f"{_RANK}{dist.get_rank()}"
    text = sealed({"sets": sets, **json.loads(manifest)})
    return {f"{here}.manifest": text} | ({here: data} if data.numel() else {})


def load_state_dict(rank_of: RankOf | None, state: Mapping[str, Any], scale: float) -> None:
    """Restore a state that dcp.load has filled in, and log what happened. All ranks must call it.

    Raises:
        UserError: `state` does not come from `state_dict`, or is damaged.
    """
    if rank_of is None:
        return
    keys = [match for key in state if (match := _MANIFEST.fullmatch(key))]
    ranks = {int(key["rank"]): state[key[0]] for key in keys}

    def data(number: int) -> torch.Tensor:
        if not isinstance(tensor := state.get(f"{_RANK}{number}"), torch.Tensor):
            raise Damaged(f"it has no tensor {_RANK}{number}")
        return tensor

    rank, first, problem = rank_of({}), {}, None
    try:
        if not ranks:
            raise Damaged("it has no manifest")
        first = _parsed(next(iter(ranks.values())))
    except Damaged as damaged:
        problem = damaged
    agreed = [session.ledger.agreed(problem is None) for session in rank.sessions]
    try:
        if problem is not None or not all(agreed):
            raise problem or Damaged("another rank's is damaged")
        if first["groups"] == rank.groups:
            rank = rank_of(dict(zip(first["places"], first.get("sets", ()), strict=False)))
        rank.start_from_zero(0)
        line = apply(rank, Saved(ranks, ranks.__getitem__, data), scale)
    except Damaged as problem:
        raise UserError(f"the state of megatron_patch.state_dict cannot be read: {problem}") from problem
    if rank.sessions[0].ledger.announces:
        logger.info("megatron-loco: step %d: %s", rank.sessions[0].ledger.steps, line)


def _room_for(reader: Any, path: str | None) -> dict[str, Any]:
    """Return room for what this rank has saved, or else for another rank's manifest."""
    stored = reader.read_metadata().state_dict_metadata
    manifests = [key for name in stored if (key := _MANIFEST.fullmatch(name))]
    prefix = _prefix(sorted({key["prefix"] for key in manifests}), path)
    ranks = {int(key["rank"]) for key in manifests if key["prefix"] == prefix}
    here = f"{_RANK}{dist.get_rank() if dist.get_rank() in ranks else min(ranks)}"
    room: dict[str, Any] = {f"{here}.manifest": ""}
    if dist.get_rank() in ranks and prefix + here in stored:  # Without errors there are no bytes.
        room[here] = torch.empty(stored[prefix + here].size, dtype=torch.uint8, device="cpu")
    return room


def _prefix(prefixes: Sequence[str], path: str | None) -> str:
    """Return the prefix of the keys of a model's state in a checkpoint; UserError if it is not clear."""
    if not prefixes:
        raise UserError(
            "the checkpoint holds no state of megatron_patch.state_dict; without load_state_dict errors "
            "start from zero"
        )
    shown = ", ".join(repr(prefix.removesuffix(".")) for prefix in prefixes)
    if path is None and len(prefixes) > 1:
        raise UserError(
            f"the checkpoint holds the states of several models, at {shown}: name one: "
            "state_dict(model, reader=..., path=...)"
        )
    prefix = prefixes[0] if path is None else f"{path}." if path else ""
    if prefix not in prefixes:
        raise UserError(
            f"the checkpoint holds no state of megatron_patch.state_dict at {path!r}, only at {shown}"
        )
    return prefix
