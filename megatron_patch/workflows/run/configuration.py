"""Loads a run's configuration: composes YAML files, applies overrides, and checks the result.

    defaults:                      # other files, composed first; paths relative to this one
      - ../methods/loco.yaml
    megatron: {num_layers: 4, ...} # Megatron's flags with underscores (megatron_flags.py checks them)
    compression: {bits: 4, ...}    # the fields of CompressionConfig, and `attach`
    launch: {device: cpu, ...}     # how processes are started
    data: {path: ..., ...}         # the data set, prepared first if it has a source

Overrides on the command line are `section.key=value`. Values may come from the environment:
`${oc.env:NAME,default}` is text, `${oc.decode:${oc.env:NAME,default}}` a number (configs/clusters).
"""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_patch import files, registry
from megatron_patch.config import ONEBIT_ADAMS, CompressionConfig
from megatron_patch.errors import UserError, nearest
from megatron_patch.workflows.run.job import Launch

_PACKAGE = Path(__file__).resolve().parents[2]
_ENDPOINT = re.compile(r"\S+:\d{1,5}")
_NOT_ONEBIT_ADAMS = ("bits", "codec", "rotation", "error_beta", "reset_interval", "start_step")
"""Options that have another meaning, or none, with onebit_adam, so that another method's do not apply."""
_PARTS = ("train", "valid", "test")
SECTIONS = ("defaults", "megatron", "compression", "launch", "data")


@dataclass(frozen=True)
class Data:
    """The `data:` section; without `path`, only Megatron's flags choose the data set (e.g. mock_data)."""

    path: str | None = None
    """The prefix of a Megatron data set, PATH.bin and PATH.idx."""
    source: str | None = None
    """The source from which a missing data set is prepared: `stdlib` or `installed:NAME,...` (data.py).
    Without it the data set must exist, and the section `megatron` names its tokenizer."""
    tokenizer: str = "bytes"
    """The tokenizer for preparation: bytes, bpe:SIZE, or the folder of one trained before."""
    valid_path: str | None = None
    """The prefix of a separate data set for validation, in place of a share of `path` (megatron.split)."""
    valid_source: str | None = None
    test_path: str | None = None
    """The prefix of a separate data set for the test after the last step, e.g. of another kind of text."""
    test_source: str | None = None

    @property
    def parts(self) -> list[tuple[str, str | None]]:
        """The prefixes and sources of the training data, and of separate validation and test data."""
        pairs = (
            (self.path, self.source),
            (self.valid_path, self.valid_source),
            (self.test_path, self.test_source),
        )
        return [(path, source) for path, source in pairs if path is not None]

    @property
    def path_flags(self) -> dict[str, list[str]]:
        """The flags of Megatron that name the data sets."""
        if self.valid_path is None:
            return {"data_path": [path for path, _ in self.parts]}
        return {f"{part}_data_path": [path] for part, (path, _) in zip(_PARTS, self.parts, strict=False)}


@dataclass(frozen=True)
class RunConfig:
    """The resolved configuration of one run."""

    megatron: dict[str, Any] = field(default_factory=dict)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    attach: bool = True
    launch: Launch = field(default_factory=Launch)
    data: Data = field(default_factory=Data)

    def as_yaml(self) -> str:
        """Return the configuration as YAML, from which `load` makes an equal one."""
        content = {
            "megatron": self.megatron,
            "compression": {"attach": self.attach, **self.compression.as_dict()},
            "launch": dataclasses.asdict(self.launch),
            "data": dataclasses.asdict(self.data),
        }
        return OmegaConf.to_yaml(OmegaConf.create(content))


def shipped(name: str) -> Path:
    """Return the path of `configs/...`, or of another file that wheels carry, also in the repository."""
    root = _PACKAGE.parent if (_PACKAGE.parent / "configs").is_dir() else _PACKAGE / "_shipped"
    return root / name


def find(name: str) -> Path:
    """Return the path `name` if it exists or is absolute, else the shipped file of that name."""
    path = Path(name)
    return path if is_file(path) or path.is_absolute() else shipped(name)


def is_file(path: Path) -> bool:
    """Whether a path is a file; an impossible name (too long, with a NUL) is not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def method_recipe(name: str) -> Path:
    """Return the path of configs/methods/NAME.yaml."""
    path = shipped(f"configs/methods/{name}.yaml")
    if Path(name).name != name or not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise UserError(f"method {name!r}: must be one of {', '.join(known)}{nearest(name, known)}")
    return path


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    and_files: Sequence[Path] = (),
    for_several: bool = False,
    importing: bool = False,
) -> RunConfig:
    """Compose `path`, then `and_files`, then `overrides` (`section.key=value`).

    `for_several` says that the overrides are for runs of several methods: options of onebit_adam are left out
    with other methods. With `importing`, for a run that begins, the files of launch.imports are imported.

    Raises:
        UserError: a file does not exist or is not a YAML mapping, or a key, type or value is not allowed;
            the message names the key, the value and what is allowed.
    """
    composed = compose(path)
    for extra in and_files:
        composed = _merge(composed, compose(extra), str(extra))
    asked = [_override(override) for override in overrides]
    _drop_options_of_other_methods(composed, OmegaConf.from_dotlist(list(overrides)))
    for override, content in zip(overrides, asked, strict=True):
        composed = _merge(composed, content, override, drop=False)
    if for_several and _known(composed, "compression.method") != "onebit_adam":
        _pop(composed, ONEBIT_ADAMS)
    run = _resolve(resolved(composed, path), str(path), importing)
    stated = any("weight_gather" in (_known(content, "compression") or {}) for content in asked)
    return run if stated else _with_stock_gather_of_shards(run)


def _with_stock_gather_of_shards(run: RunConfig) -> RunConfig:
    """Return the run without the exact gather, which a recipe chose, where weights are sharded."""
    flags, exact = run.megatron, run.attach and run.compression.codes_weights
    whole = flags.get("data_parallel_sharding_strategy") == "optim_grads"
    if not exact or not (flags.get("use_torch_fsdp2") or (flags.get("use_megatron_fsdp") and not whole)):
        return run
    line = "megatron-loco: weight_gather stock in place of the recipe's exact: FSDP shards the weights"
    print(line, file=sys.stderr, flush=True)
    return dataclasses.replace(run, compression=dataclasses.replace(run.compression, weight_gather="stock"))


def _override(text: str) -> DictConfig:
    key, equals, _ = text.partition("=")
    if not equals or "." not in key:
        raise UserError(f"{text!r} is no override: write section.key=value, e.g. megatron.lr=1e-3")
    try:
        return OmegaConf.from_dotlist([text])
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{text}: {files.yaml_problem(error)}") from error


def resolved(composed: DictConfig, path: Path) -> dict[str, Any]:
    """Return the content composed of `path` as plain values, with every `${...}` replaced."""
    try:
        content = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from error
    except RecursionError as error:
        raise UserError(f"{path}: a value's ${{...}} lead back to it") from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def compose(path: Path) -> DictConfig:
    """Return the YAML mapping at `path`, merged over the files that its `defaults` name."""
    return _compose(path, ())


def _compose(path: Path, including: tuple[Path, ...]) -> DictConfig:
    """Compose `path`; `including` are the files that include it."""
    loaded = _load(path, including)
    path = path.resolve()
    content = OmegaConf.to_container(loaded)
    assert isinstance(content, dict)
    defaults = resolved(OmegaConf.create({"defaults": content.pop("defaults", None)}), path)["defaults"] or []
    if not isinstance(defaults, list) or not all(isinstance(name, str) for name in defaults):
        raise UserError(f"{path}: defaults: {defaults!r} must be a list of file names")
    composed = OmegaConf.create({})
    for name in defaults:
        composed = _merge(composed, _compose(path.parent / name, (*including, path)), str(path))
    return _merge(composed, OmegaConf.create(content), str(path))


def _load(path: Path, including: tuple[Path, ...]) -> DictConfig:
    try:
        path = path.resolve()
        exists = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # The name is too long, has a NUL, or links loop.
        raise UserError(
            f"{str(path)!r}: no such configuration file: {getattr(error, 'strerror', None) or error}"
        ) from error
    if path in including:
        raise UserError(
            f"{path}: defaults include this file again: {' -> '.join(p.name for p in (*including, path))}"
        )
    if not exists:
        there = [file.name for file in path.parent.glob("*.yaml")]
        raise UserError(f"{path}: no such configuration file{nearest(path.name, there)}")
    try:
        loaded = OmegaConf.load(io.StringIO(files.read_yaml(path)))
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{path}: is not valid YAML: {files.yaml_problem(error)}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{path}: must be a mapping")
    return loaded


def _merge(base: DictConfig, over: Any, where: str, drop: bool = True) -> DictConfig:
    try:
        merged = OmegaConf.merge(base, over)
        if drop and _drop_options_of_other_methods(base, merged):
            merged = OmegaConf.merge(base, over)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise UserError(f"{where}: {_first_line(error)}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _drop_options_of_other_methods(base: DictConfig, merged: Any) -> bool:
    """Remove options from `base` if `merged` changes its method to or from onebit_adam, whose others are.

    Returns whether they were removed.
    """
    before, after = (_known(config, "compression.method") for config in (base, merged))
    if after is None or "onebit_adam" not in (before, after) or before == after:
        return False
    return _pop(base, _NOT_ONEBIT_ADAMS if after == "onebit_adam" else ONEBIT_ADAMS)


def _pop(config: DictConfig, names: Iterable[str]) -> bool:
    options = _known(config, "compression")
    for name in names if isinstance(options, DictConfig) else ():
        options.pop(name, None)
    return isinstance(options, DictConfig)


def _known(config: Any, key: str) -> Any:
    """Return a value of `config`; None if a parent is not a mapping, or it refers to something missing."""
    try:
        return OmegaConf.select(config, key, throw_on_resolution_failure=False)
    except OmegaConfBaseException:
        return None


def _resolve(content: dict[str, Any], where: str, importing: bool) -> RunConfig:
    _check_keys("", content, SECTIONS, where)
    for name, section in content.items():
        if section is not None and not isinstance(section, dict):
            raise UserError(f"{where}: {name}: {section!r} must be a mapping")
    sections: dict[str, dict[str, Any]] = {name: dict(content.get(name) or {}) for name in SECTIONS}
    launch = _launch(sections["launch"], where)
    for file in launch.imports if importing else ():
        registry.import_file(Path(file))
    compression = sections["compression"]
    _check_keys("compression.", compression, ["attach", *_names(CompressionConfig)], where)
    attach = compression.pop("attach", True)
    if not isinstance(attach, bool):
        raise UserError(f"{where}: compression.attach: {attach!r} must be true or false")
    return RunConfig(
        megatron=sections["megatron"],
        compression=CompressionConfig.for_megatron(sections["megatron"], **compression),
        attach=attach,
        launch=launch,
        data=_data(sections["data"], where),
    )


def _launch(section: dict[str, Any], where: str) -> Launch:
    _check_keys("launch.", section, _names(Launch), where)
    imports = section.get("imports") or []
    if not isinstance(imports, list) or not all(isinstance(name, str) for name in imports):
        raise UserError(f"{where}: launch.imports: {imports!r} must be a list of Python files")
    launch = Launch(**{**section, "imports": tuple(str(Path(name).absolute()) for name in imports)})
    if launch.device not in ("cuda", "cpu"):
        raise UserError(f"{where}: launch.device: {launch.device!r} must be cuda or cpu")
    for name, least in (("nproc_per_node", 1), ("nnodes", 1), ("node_rank", 0), ("max_restarts", 0)):
        value = getattr(launch, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{where}: launch.{name}: {value!r} must be a whole number, {least} or more")
    if launch.node_rank >= launch.nnodes:
        raise UserError(
            f"{where}: launch.node_rank: {launch.node_rank} must be below launch.nnodes, {launch.nnodes}"
        )
    endpoint = launch.rdzv_endpoint
    if endpoint is not None and not (isinstance(endpoint, str) and _ENDPOINT.fullmatch(endpoint)):
        raise UserError(
            f"{where}: launch.rdzv_endpoint: {endpoint!r} must be the first node as host:port, e.g. a1:29500"
        )
    return launch


def _data(section: dict[str, Any], where: str) -> Data:
    _check_keys("data.", section, _names(Data), where)
    data = Data(**section)
    for name in _names(Data):
        value = getattr(data, name)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{where}: data.{name}: {value!r} must be text")
    for source, path in (("source", "path"), ("valid_source", "valid_path"), ("test_source", "test_path")):
        if (text := getattr(data, source)) and not getattr(data, path):
            raise UserError(
                f"{where}: data.{source}: {text!r} needs data.{path}, where the data set is written"
            )
    for part, needed in (("valid_path", "path"), ("test_path", "valid_path")):
        if getattr(data, part) and not getattr(data, needed):
            raise UserError(f"{where}: data.{part}: {getattr(data, part)!r} needs data.{needed} as well")
    return data


def _names(cls: type) -> list[str]:
    return [option.name for option in fields(cls)]


def _check_keys(prefix: str, section: dict[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in section:
        if key not in allowed:
            raise UserError(
                f"{where}: {prefix}{key}: no such key{nearest(key, allowed)}; allowed: {', '.join(allowed)}"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
