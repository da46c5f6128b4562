"""What the page has a figure of."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patch.workflows.report.runs import Run
from megatron_patch.workflows.report.table import digits

Curve = dict[int, float]
"""A value by optimizer step."""


@dataclass(frozen=True)
class Quantity:
    """What one figure shows of every run."""

    key: str
    """Its name in metrics.jsonl, or `difference`."""
    title: str
    axis: str
    about: str
    factor: float = 1.0
    last: bool = False
    """The legend gives the last value; otherwise the median."""
    from_zero: bool = False
    form: str = ""
    """The legend's numbers, as a format of Python's; empty: three significant digits."""
    unit: str = ""
    of_exact_gather: bool = False
    """Drawn only where a run gathers weights exactly."""

    def curve(self, run: Run) -> Curve:
        return {step: value * self.factor for step, value in run.curve(self.key).items()}

    def write(self, value: float) -> str:
        return format(value, self.form) + self.unit if self.form else digits(value)


QUANTITIES = (
    Quantity(
        "loss",
        "Training loss",
        "training loss",
        "The language model's, as Megatron logs it.",
        last=True,
        form=".4f",
    ),
    Quantity(
        "difference",
        "Training loss against the first configuration",
        "difference (%)",
        "At the same step and, where it has one, against the run of the same seed.",
        last=True,
        form="+.2f",
        unit=" %",
    ),
    Quantity("step_seconds", "Step time", "seconds per step", "Of the logged steps.", from_zero=True),
    Quantity(
        "gradient_wire_bytes",
        "Gradient bytes on the wire",
        "MB per step",
        "Payload that one rank sends in a step, mean of the ranks.",
        factor=1e-6,
        from_zero=True,
    ),
    Quantity(
        "weight_wire_bytes",
        "Weight bytes on the wire",
        "MB per step",
        "The all-gather of the updated weights, by one rank: in full, or exactly from what the step changed.",
        factor=1e-6,
        from_zero=True,
    ),
    Quantity(
        "weight_wire_bits_per_element",
        "Bits per weight on the wire",
        "bits per weight",
        "What travelled: messages as long as the longest of all ranks', their lengths, and gathers in full.",
        from_zero=True,
        of_exact_gather=True,
    ),
    Quantity(
        "weight_message_bits_per_element",
        "Bits per weight of the messages",
        "bits per weight",
        "The code's own size, mean of the ranks; what travelled beyond it is padding, lengths and gathers in "
        "full.",
        from_zero=True,
        of_exact_gather=True,
    ),
    Quantity(
        "weight_unchanged_share",
        "Unchanged weights",
        "share of the weights (%)",
        "Of the weights that were coded: those that the step left as they were.",
        factor=100,
        from_zero=True,
        form=".1f",
        unit=" %",
        of_exact_gather=True,
    ),
    Quantity(
        "compression_snr_db",
        "Signal-to-noise ratio of compression",
        "dB",
        "Power of what was to be sent over power of what quantization changed of it; 6 dB are a factor of "
        "two in amplitude. Higher is better.",
    ),
    Quantity(
        "compensation_norm_ratio",
        "Norm of the remembered error",
        "error / gradient",
        "Norm of the error state over norm of the gradient.",
        last=True,
        from_zero=True,
    ),
)
