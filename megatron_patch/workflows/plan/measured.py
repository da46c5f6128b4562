"""The planner's numbers for a GPU: those that `python -m benchmarks.gpu` measured on it, else constants.py's.

Results files lie in benchmarks/gpu/results/, and an installed wheel has a copy of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from megatron_patch.workflows.plan import constants
from megatron_patch.workflows.plan.constants import Constant, Gpu
from megatron_patch.workflows.run import configuration

RESULTS = configuration.shipped("benchmarks/gpu/results")
_GRADIENTS, _WEIGHTS = "4 bits, levels, fp32", "weights, 0.00143"
RATES = {
    "compress": (_GRADIENTS, "compress"),
    "decompress": (_GRADIENTS, "decompress of 8"),
    "weight_encode": (_WEIGHTS, "encode"),
    "weight_decode": (_WEIGHTS, "decode"),
    "weight_sums": (_WEIGHTS, "sums"),
}
"""Where a file's rates have a number of constants.py: the measurement, and its rate."""


def numbers_of(gpu: Gpu) -> dict[str, Constant]:
    """Return all numbers of constants.py as they are for a GPU.

    What was measured on it is marked so. Other rates of kernels are an H100's, scaled by instructions or
    memory, whichever is slower.
    """
    h100 = constants.GPUS["H100"]
    speed = min(gpu.lanes / h100.lanes, gpu.memory_gbyte / h100.memory_gbyte)
    found = dict(constants.CONSTANTS)
    for name in RATES:
        found[name] = dataclasses.replace(found[name], value=found[name].value * speed)
    results = newest(RESULTS).get(gpu.name)
    return found if results is None else found | _measured(results, gpu)


@functools.cache
def newest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the newest results of each kind of GPU, by its name in constants.GPUS, the newest last.

    A GPU without a name there has CUDA's. Results of a CPU are none.
    """
    files = sorted(folder.glob("*.json"))
    every = [json.loads(file.read_text(encoding="utf-8")) | {"file": file.name} for file in files]
    of_gpus = [results for results in every if results["gpus"]]
    found: dict[str, dict[str, Any]] = {}
    for results in sorted(of_gpus, key=lambda results: str(results["date"])):
        name = constants.named(results["device"]) or results["device"]
        found.pop(name, None)
        found[name] = results
    return found


def _measured(results: dict[str, Any], gpu: Gpu) -> dict[str, Constant]:
    rates = results["parts"].get("rates", {}).get("rates", {})
    source = f"{results['device']}, {results['date']}: benchmarks/gpu/results/{results['file']}"
    found = {name: rates[what][rate] for name, (what, rate) in RATES.items() if what in rates}
    if bytes_per_second := rates.get("adam_bytes"):
        found["memory_share"] = bytes_per_second / (gpu.memory_gbyte * 1e9)
    return {
        name: Constant(value, constants.CONSTANTS[name].unit, "measured", source)
        for name, value in found.items()
    }
