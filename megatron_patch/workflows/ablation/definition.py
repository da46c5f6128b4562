"""Reads an ablation's definition: a base recipe, and the cells that are compared over paired seeds.

    defaults: [common/short_runs.yaml]       # other definitions, composed first; relative to this file
    base: configs/models/llama_tiny.yaml     # a recipe, as `train` takes it
    seeds: [1, 2, 3, 4, 5]                   # megatron.seed of the runs that are compared with one another
    overrides:                               # for all runs
      megatron.train_iters: 100
    baseline:                                # the cell that the others are compared with
      compression.method: none
    grid:                                    # every combination is a cell
      compression.method: [naive, loco]
      compression.bits: [4, 2]
    cells:                                   # cells one by one, beside the grid or in its place
      - {compression.method: loco, compression.error_beta: 0.5}
    contrast: compression.method             # also compare cells that differ in nothing else

Keys are written as on the command line of `train`. The runs of one seed follow each other, so that an
interrupted ablation has complete pairs. A cell's name, which is also its folder, lists its settings.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError, nearest
from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run.configuration import RunConfig

_KEYS = ("base", "seeds", "overrides", "baseline", "grid", "cells", "contrast")
Settings = dict[str, Any]
"""Overrides by their dotted keys: {"compression.bits": 4}."""


@dataclass(frozen=True)
class Cell:
    """A configuration that is compared, by the settings in which it differs from the base recipe."""

    settings: Settings

    @property
    def name(self) -> str:
        """The name, as `method=loco,bits=4`; it also names a folder, so that other characters become `_`."""
        parts = (f"{key.rpartition('.')[2]}={_text(value)}" for key, value in self.settings.items())
        return ",".join(re.sub(r"[^\w.=+-]", "_", part) for part in parts)

    @property
    def overrides(self) -> list[str]:
        return _overrides(self.settings)


@dataclass(frozen=True)
class Run:
    """One cell with one seed, with its resolved configuration."""

    cell: Cell
    seed: int
    configured: RunConfig
    folder: Path

    @property
    def label(self) -> str:
        return f"{self.cell.name} seed {self.seed}"


@dataclass(frozen=True)
class Ablation:
    """A checked definition; `cells[0]` is the baseline."""

    name: str
    base: Path
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]
    contrast: str | None

    @property
    def baseline(self) -> Cell:
        return self.cells[0]

    def runs(self, out: Path) -> list[Run]:
        """Return all runs in order, each with its own folder below `out`."""
        configured = [(cell, self._configured(cell)) for cell in self.cells]
        return [
            Run(
                cell,
                seed,
                dataclasses.replace(config, megatron={**config.megatron, "seed": seed}),
                out / cell.name / f"seed-{seed}",
            )
            for seed in self.seeds
            for cell, config in configured
        ]

    def _configured(self, cell: Cell) -> RunConfig:
        try:
            run = configuration.load(self.base, [*self.overrides, *cell.overrides], for_several=True)
        except UserError as error:
            raise UserError(f"cell {cell.name}: {error}") from error
        if run.launch.nnodes > 1:
            raise UserError(
                f"launch.nnodes: {run.launch.nnodes}: an ablation's runs are on one node each; with a Slurm "
                "array many of them run at once (pretrain_scripts/slurm/ablate.sbatch)"
            )
        return run


def read(
    path: Path, overrides: Sequence[str] = (), base: str | None = None, seeds: Sequence[int] | None = None
) -> Ablation:
    """Read the definition at `path`; `overrides`, `base` and `seeds` come from the command line."""
    content = _content(path)
    recipe, listed, contrast = (
        base or content.get("base"),
        content.get("cells") or [],
        content.get("contrast"),
    )
    if not isinstance(recipe, str):
        raise UserError(f"{path}: base: {recipe!r} must be the path of a recipe")
    recipe = configuration.find(recipe)
    if not isinstance(listed, list):
        raise UserError(f"{path}: cells: {listed!r} must be a list of mappings")
    cells = [
        Cell(_settings(content.get("baseline"), "baseline", path)),
        *(_grid(_settings(content["grid"], "grid", path), path) if content.get("grid") else ()),
        *(Cell(_settings(mapping, f"cells[{index}]", path)) for index, mapping in enumerate(listed)),
    ]
    if len(cells) == 1:
        raise UserError(f"{path}: grid, cells: neither is there, so there is nothing to compare")
    names = [cell.name for cell in cells]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}: cell {twice[0]} is there twice")
    if contrast is not None and not any(contrast in list(cell.settings) for cell in cells[1:]):
        raise UserError(f"{path}: contrast: {contrast!r} is no key of the grid or of a cell")
    everywhere = _settings(content.get("overrides") or {}, "overrides", path, empty=True)
    return Ablation(
        name=path.stem,
        base=recipe,
        seeds=tuple(seeds) if seeds else _seeds(content.get("seeds"), path),
        overrides=(*_overrides(everywhere), *overrides),
        cells=tuple(cells),
        contrast=contrast,
    )


def find(name: str) -> Path:
    """Return the path of a definition: `name` is a path, or the bare name of one in configs/ablations."""
    path = configuration.find(name)
    if path.suffix == "" and not configuration.is_file(path):
        path = configuration.shipped(f"configs/ablations/{name}.yaml")
    if not configuration.is_file(path):
        known = sorted(file.stem for file in configuration.shipped("configs/ablations").glob("*.yaml"))
        raise UserError(
            f"{name}: no such ablation{nearest(Path(name).stem, known)}; ready-made: {', '.join(known)}"
        )
    return path


def _content(path: Path) -> dict[str, Any]:
    content = configuration.resolved(configuration.compose(path), path)
    for key in content:
        if key not in _KEYS:
            hint = "; an ablation names a recipe with `base` and changes it with `overrides`"
            hint = hint if key in configuration.SECTIONS else ""
            raise UserError(
                f"{path}: {key}: no such key{nearest(key, _KEYS)}; allowed: {', '.join(_KEYS)}{hint}"
            )
    return content


def _seeds(value: object, path: Path) -> tuple[int, ...]:
    seeds = value if isinstance(value, list) else []
    if not seeds or not all(type(s) is int and s >= 0 for s in seeds) or len(set(seeds)) != len(seeds):
        raise UserError(f"{path}: seeds: {value!r} must be a list of different whole numbers, e.g. [1, 2, 3]")
    return tuple(seeds)


def _settings(value: object, where: str, path: Path, *, empty: bool = False) -> Settings:
    if not isinstance(value, dict) or not (value or empty):
        raise UserError(f"{path}: {where}: {value!r} must be a mapping, e.g. compression.method: none")
    for key in value:
        if not isinstance(key, str) or key.partition(".")[0] not in configuration.SECTIONS or "." not in key:
            raise UserError(
                f"{path}: {where}: {key!r} is no setting: write section.key, e.g. compression.bits"
            )
        if key == "megatron.seed":
            raise UserError(f"{path}: {where}: megatron.seed is set by `seeds`")
    return dict(value)


def _grid(axes: Settings, path: Path) -> list[Cell]:
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid: {key}: {values!r} must be a list of values")
    return [Cell(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def _overrides(settings: Settings) -> list[str]:
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
