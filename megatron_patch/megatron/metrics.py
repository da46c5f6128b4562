"""Writes metrics.jsonl, summary.json, TensorBoard and W&B from inside Megatron's own training loop.

Four functions of megatron.training.training are wrapped: `train_step` shows when a step begins and with
which model, `training_log` is called on every rank after every step, and `evaluate_and_print_results` with
its `evaluate` gives the validation loss. Their results are not changed.

The last rank writes, because it has the loss and Megatron's TensorBoard writer. After Megatron's own line of
a logged step it prints one on what was sent since the last line. Compression statistics are summed over ranks
by one small all-reduce per logged step. A run that resumes from a checkpoint repeats steps
that an earlier attempt had logged: the old lines of these steps are removed before the first new one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
import platform
import resource
import statistics as stats
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_patch.collectives.exchange import Traffic
from megatron_patch.collectives.topology import ranks_per_node
from megatron_patch.config import CompressionConfig
from megatron_patch.files import write_whole
from megatron_patch.megatron import patching, symbols, weight_metrics
from megatron_patch.megatron.attach import session_of, table_of
from megatron_patch.megatron.seams import traffic
from megatron_patch.session.report import sums as sums_of
from megatron_patch.session.session import Session
from megatron_patch.session.trial import Table

logger = logging.getLogger(__name__)

_WRAPPED = (symbols.TRAIN_STEP, symbols.TRAINING_LOG, symbols.EVALUATE_AND_PRINT, symbols.EVALUATE)
_OF_CODED_WEIGHTS = ("weight_unchanged_share", "weight_bits_by_bucket", "raw_weight_gathers")
_WARM_UP_STEPS = 3
"""The median step time leaves out this many first steps, which include allocation and first-use costs."""
_WATCHED = 10
"""Waits for exchanges are timed in this many steps before a logged one. Each is read a step later, so that no
log waits for the GPU."""


@dataclass
class _Sent:
    """What ranks have sent in some steps, and how long these took, summed over ranks."""

    steps: float = 0.0
    seconds: float = 0.0
    inside: float = 0.0
    """The bytes that `gradients` leaves out: to ranks of the same node in two hops."""
    watched: float = 0.0
    """The seconds of the steps whose waits were timed."""
    watched_steps: float = 0.0
    waited: float = 0.0
    gradients: Traffic = field(default_factory=Traffic)
    weights: Traffic = field(default_factory=Traffic)

    @property
    def numbers(self) -> list[float]:
        *numbers, gradients, weights = astuple(self)
        return [*numbers, *gradients, *weights]

    @classmethod
    def of(cls, numbers: list[float]) -> _Sent:
        one, gradients, weights = numbers[:6], Traffic(*numbers[6:9]), Traffic(*numbers[9:])
        steps, seconds, inside, watched, watched_steps, waited = one
        return cls(steps, seconds, inside, watched, watched_steps, waited, gradients, weights)

    def add(self, other: _Sent) -> None:
        pairs = zip(self.numbers, other.numbers, strict=True)
        vars(self).update(vars(self.of([mine + more for mine, more in pairs])))

    def __str__(self) -> str:
        inside = self.inside + self.gradients.inside + self.weights.inside
        between = (self.gradients.nbytes + self.weights.nbytes + self.inside - inside) / self.steps / 1e6
        sent = f"{between:.3g} MB to other ranks"
        if inside or ranks_per_node(None) is not None:
            sent = f"{between:.3g} MB between nodes and {inside / self.steps / 1e6:.3g} MB inside"
        took = f"{self.seconds / self.steps:.3f} s a step"
        if self.watched_steps:
            waited, watched = self.waited / self.watched_steps, self.watched / self.watched_steps
            took = f"waited {waited:.3f} of {watched:.3f} s a step for exchanges"
        weights = f"{self.weights.bits_per_element:.2f} bits a weight, " if self.weights.elements else ""
        return (
            f"{self.gradients.bits_per_element:.2f} bits a gradient, {weights}{sent} a step and rank; {took}"
        )


class RunMetrics:
    """Collects a run's metrics; `install` wraps Megatron's functions, `finish` writes summary.json.

    Each step's model shows whether compression is attached, and with which options.

    Args:
        output: the folder of metrics.jsonl and summary.json; None writes to TensorBoard and W&B only.
    """

    def __init__(self, output: Path | None = None) -> None:
        self._output = output
        self._file: Any = None
        self._model: list[Any] = []
        self._started = 0.0
        self._seconds: list[float] = []
        self._rates: list[float] = []
        self._evaluating = ""
        self._losses: dict[str, float] = {}
        self._last: dict[str, Any] = {}
        self._compression_seconds: list[float] = []
        self._steps = 0
        self._sent = _Sent()
        """By this rank since the last record."""
        self._in_all = _Sent()
        """By all ranks, in the steps up to the last record."""
        self._line = ""
        self._table: Table | None = None
        self._laps: list[tuple[float, list[Callable[[], float]]]] = []
        """Of the steps whose waits were timed and not read yet: their seconds, and what returns the waits."""

    def install(self) -> None:
        """Wrap the functions of megatron.training.training until `uninstall` or the next `install`."""
        self.uninstall()
        self._wrap(symbols.TRAIN_STEP, before=self._before_step)
        self._wrap(symbols.TRAINING_LOG, before=self._log_step, after=self._tell)
        self._wrap(symbols.EVALUATE_AND_PRINT, before=self._before_evaluation)
        self._wrap(symbols.EVALUATE, after=self._after_evaluation)

    @staticmethod
    def uninstall() -> None:
        """Restore Megatron's own functions."""
        patching.restore(*_WRAPPED)

    def _wrap(self, path: str, before: Any = None, after: Any = None) -> None:
        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(original)

            @functools.wraps(original)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if before is not None:
                    before(signature.bind(*args, **kwargs).arguments)
                result = original(*args, **kwargs)
                if after is not None:
                    after(result)
                return result

            return wrapped

        patching.replace(path, watched)

    def _before_step(self, arguments: dict[str, Any]) -> None:
        self._model = arguments["model"]
        args = get_args()
        iteration = getattr(args, "curr_iteration", None)  # This is still the previous step.
        for session in self._sessions():
            session.measures = iteration is None or self._logs(args, iteration + 1)
            session.watches = iteration is None or self._watches(args, iteration + 1)
        self._started = time.perf_counter()

    @staticmethod
    def _logs(args: Any, step: int) -> bool:
        return step % args.log_interval == 0 or step == args.train_iters

    @classmethod
    def _watches(cls, args: Any, step: int) -> bool:
        return any(cls._logs(args, later) for later in range(step + 1, step + 1 + _WATCHED))

    def _before_evaluation(self, arguments: dict[str, Any]) -> None:
        self._model = arguments["model"]  # A run that resumes after its last step makes no further step.
        for session in self._sessions():
            session.disturbed = True
        self._evaluating = "test_loss" if "test set" in str(arguments["prefix"]) else "valid_loss"

    def _after_evaluation(self, result: Any) -> None:
        losses = result[0] or {}
        if "lm loss" in losses:
            self._losses[self._evaluating] = float(losses["lm loss"])

    def _log_step(self, arguments: dict[str, Any]) -> None:
        args = get_args()
        step = arguments["iteration"]
        if step <= self._steps:
            return  # 0.19 logs the first step twice
        self._steps = step
        seconds = time.perf_counter() - self._started
        self._seconds.append(seconds)
        # Ramp-ups and schedules change the batch size; args.global_batch_size is then the last one, or None.
        calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        batch = calculator.get_current_running_global_batch_size() if calculator else args.global_batch_size
        self._rates.append(batch * args.seq_length / seconds)
        self._count(seconds)
        self._write_trial()
        if not self._logs(args, step):
            return
        record = {
            "step": step,
            "loss": _number(arguments["loss_dict"].get("lm loss")),
            "grad_norm": _number(arguments["grad_norm"]),
            "step_seconds": seconds,
            "tokens_per_second": self._rates[-1],
            **self._compression_record(),
        }
        self._last = record
        if not self._writes():
            return
        if self._output is not None:
            if self._file is None:
                self._file = _continue(self._output / "metrics.jsonl", step)
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        self._show(record, step)

    def _count(self, seconds: float) -> None:
        """Count what the last step has sent, and read the waits of the step before."""
        for watched, laps in self._laps:
            self._sent.add(_Sent(watched=watched, watched_steps=1, waited=sum(lap() for lap in laps)))
        sessions = self._sessions()
        laps = [lap for session in sessions if (lap := session.report.wait_seconds) is not None]
        self._laps = [(seconds, laps)] if laps else []
        gradients, inside = Traffic(), sum(session.report.inside_bytes for session in sessions)
        for session in sessions:
            gradients.add(session.report.traffic)
        for group in weight_metrics.bucket_groups(self._model) if not sessions else ():
            gradients.add(traffic.stock_gradients(group))
        gradients.add(weight_metrics.outer_traffic(self._model))
        self._sent.add(
            _Sent(1, seconds, inside, gradients=gradients, weights=weight_metrics.sent(self._model))
        )

    def _tell(self, _: Any) -> None:
        """Print the line of the last record, on the rank that prints Megatron's."""
        line, self._line = self._line, ""
        if line and self._writes():
            logger.info("megatron-loco: %s", line)
        if line and self._steps == get_args().train_iters:
            self._close()

    def _close(self) -> None:
        """Print the line on the whole run, once."""
        sent, self._in_all = self._in_all, _Sent()
        if sent.steps and self._writes():
            steps = round(sent.steps / dist.get_world_size())
            logger.info("megatron-loco: the run's %d logged steps: %s", steps, sent)
            if self._config is not None and self._config.trial and table_of(self._model) is None:
                logger.warning(
                    "megatron-loco: the run ended before its trial of %d steps did", self._config.trial
                )

    def _sessions(self) -> list[Session]:
        return [c for chunk in self._model if (c := session_of(chunk)) is not None]

    @property
    def _config(self) -> CompressionConfig | None:
        return next((session.config for session in self._sessions()), None)

    def _write_trial(self) -> None:
        """Write the table of `compression.trial` to trial.json, once it is there."""
        table = table_of(self._model)
        if table is None or self._output is None or table is self._table or not self._writes():
            return
        self._table = table
        rows = [{**dataclasses.asdict(row), "verdict": row.verdict} for row in table.rows]
        content = {"step": table.step, "steps": table.steps, "rows": rows}
        write_whole(self._output / "trial.json", json.dumps(content, indent=2) + "\n")

    def _compression_record(self) -> dict[str, Any]:
        sessions = self._sessions()
        sums, sent, self._sent = sums_of(sessions), self._sent.numbers, _Sent()
        wire = [*sent, *weight_metrics.coded(self._model), *weight_metrics.outer_sums(self._model)]
        wire += [sums.compression_seconds, sums.compressed]
        totals = torch.cat([sums.statistics, torch.tensor(wire, dtype=torch.float64, device="cpu")])
        if "nccl" in dist.get_backend():
            totals = totals.cuda()
        dist.all_reduce(totals)
        signal, noise, gradient, error, non_finite, *wire = totals.tolist()
        *wire, moved, mean, between, seconds, compressed = wire
        all_sent, coded = _Sent.of(wire[: len(sent)]), wire[len(sent) :]
        self._in_all.add(all_sent)
        self._line = f"step {self._steps}: {all_sent}"
        ranks = dist.get_world_size()
        self._compression_seconds.append(seconds / ranks)
        return {
            "compressed": compressed > 0,
            "compression_seconds": seconds / ranks,
            "wait_seconds": all_sent.waited / all_sent.watched_steps if all_sent.watched_steps else None,
            "gradient_wire_bytes": all_sent.gradients.nbytes / all_sent.steps,
            "gradient_intra_node_bytes": all_sent.inside / all_sent.steps,
            "gradient_wire_bits_per_element": all_sent.gradients.bits_per_element,
            "weight_wire_bytes": all_sent.weights.nbytes / all_sent.steps,
            "weight_wire_bits_per_element": all_sent.weights.bits_per_element,
            **self._coded_weights(coded),
            **weight_metrics.outer(self._model, moved, mean, between / ranks),
            "compression_snr_db": 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None,
            "compensation_norm_ratio": math.sqrt(error / gradient) if gradient > 0 else None,
            "skipped_steps": max((s.ledger.events.skipped_steps for s in sessions), default=0),
            "non_finite_blocks": None if math.isnan(non_finite) else int(non_finite),
        }

    def _coded_weights(self, sums: list[float]) -> dict[str, Any]:
        """Return the exact weight gather's metrics; `sums` is weight_metrics.coded summed over ranks."""
        if not any(session.choice.weights for session in self._sessions()):
            return {}
        weights, same, nbytes = sums
        return {
            "weight_unchanged_share": same / weights if weights else None,
            "weight_message_bits_per_element": 8 * nbytes / weights if weights else None,
            "weight_bits_by_bucket": weight_metrics.by_bucket(self._model),
            "raw_weight_gathers": weight_metrics.raw_gathers(self._model),
        }

    def _show(self, record: dict[str, Any], step: int) -> None:
        shown = {
            f"compression/{name}": record[name]
            for name in (
                "compressed",
                "gradient_wire_bytes",
                "gradient_intra_node_bytes",
                "weight_wire_bytes",
                "weight_wire_bits_per_element",
                "weight_unchanged_share",
                *("outer_norm", "outer_distance", "outer_wire_bytes"),
                "compression_seconds",
                "wait_seconds",
                "compression_snr_db",
                "compensation_norm_ratio",
                "non_finite_blocks",
            )
            if record.get(name) is not None
        }
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if writer:
            for name, value in shown.items():
                writer.add_scalar(name, value, step)
        if wandb:
            wandb.log(shown, step)

    def _warm_up(self) -> dict[str, int | None]:
        """Return how many steps made 1-bit Adam's frozen variance (None: it is not frozen yet)."""
        if self._config is None or not self._config.is_onebit_adam:
            return {}
        return {"warmup_steps": next((c.ledger.phase.variance_steps for c in self._sessions()), None)}

    def _writes(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1

    def finish(self) -> None:
        """Write summary.json. Every rank must call this, because memory is reduced over ranks."""
        self._write_trial()
        if not dist.is_initialized():
            return
        memory = torch.tensor(
            [
                _peak_memory(),
                sum(c.error_bytes for c in self._sessions()),
                sum(pool.nbytes for pool in {c.workspace.pool for c in self._sessions()}),
                sum(chunk.nbytes for chunk in weight_metrics.gathers_of(self._model)),
            ],
            dtype=torch.float64,
            device="cpu",
        )
        if "nccl" in dist.get_backend():
            memory = memory.cuda()
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
        self._close()
        if self._file is not None:
            self._file.close()
        if writer := get_tensorboard_writer():
            writer.flush()  # A forked rank ends without the interpreter's exit handlers.
        if self._output is None or not self._writes():
            return
        records = [record for record, _ in _read(self._output / "metrics.jsonl")]
        earlier = [] if self._last else records
        if not records:
            return
        last = records[-1]
        peak, error_bytes, buffer_bytes, weight_bytes = memory.tolist()
        args = get_args()
        median = _median(self._seconds or [record["step_seconds"] for record in earlier])
        events = [{"steps": c.ledger.steps, **dataclasses.asdict(c.ledger.events)} for c in self._sessions()]
        config = self._config
        summary = {
            "method": config.method if config is not None else "stock",
            "weight_gather": config.weight_gather if config is not None else "stock",
            "bits": config.bits if config is not None and config.compresses else None,
            "world_size": dist.get_world_size(),
            "steps": self._steps or args.iteration,
            "train_loss": last["loss"],
            **{"valid_loss": None, **self._losses},
            "step_seconds": {"median": median},
            "compression_seconds_per_step": _median(
                self._compression_seconds or [record["compression_seconds"] for record in earlier]
            ),
            "tokens_per_second": _median(self._rates or [record["tokens_per_second"] for record in earlier]),
            "gradient_wire": {
                "bytes_per_step": last["gradient_wire_bytes"],
                "bits_per_element": last["gradient_wire_bits_per_element"],
            },
            "weight_wire": weight_metrics.mean(records),
            **{name: last[name] for name in _OF_CODED_WEIGHTS if name in last},
            "compensation_bytes": int(error_bytes),
            "buffer_bytes": int(buffer_bytes),
            "weight_gather_bytes": int(weight_bytes),
            "peak_memory_bytes": int(peak),
            "events": events[0] if events else {},
            **self._warm_up(),
            "device": _device_name(),
            "versions": _versions(),
        }
        write_whole(self._output / "summary.json", json.dumps(summary, indent=2) + "\n")


def _continue(path: Path, step: int) -> TextIO:
    """Remove the lines of `step` and later steps from metrics.jsonl, and open it for appending."""
    write_whole(path, "".join(line + "\n" for record, line in _read(path) if record["step"] < step))
    return path.open("a", encoding="utf-8")


def _read(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the records of metrics.jsonl with their lines, up to a line that a kill left incomplete."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line), line
        except ValueError:
            return


def _median(values: list[float]) -> float:
    """Return the median over all steps but the first _WARM_UP_STEPS."""
    return stats.median(values[_WARM_UP_STEPS:] or values)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _peak_memory() -> int:
    """Return the peak in bytes: of the device allocator on a GPU, of the resident set on CPU."""
    allocated = torch.cuda.max_memory_allocated()
    return allocated or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_name() -> str:
    return torch.cuda.get_device_name() if "nccl" in dist.get_backend() else f"cpu ({platform.machine()})"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("megatron-loco", "megatron-core", "torch", "transformer-engine", "apex"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
