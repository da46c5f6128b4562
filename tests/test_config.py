"""CompressionConfig: its defaults, what it refuses, and what the refusal says."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

import megatron_patch
from megatron_patch.config import (
    ERROR_DTYPES,
    METHODS,
    ROTATIONS,
    CompressionConfig,
)
from megatron_patch.errors import UserError, nearest

BITS = (8, 4, 2, 1)

CHOICES = {
    "method": METHODS,
    "rotation": ROTATIONS,
    "error_dtype": ERROR_DTYPES,
    "warmup": ("auto", "fixed"),
    "weight_gather": ("stock", "exact"),
}
WHOLE = "a whole number, 0 or more"
BLOCK = "a power of two from 16 to 65536, or 'shard'"
BETA = "from 0 up to but not including 1"

REFUSED = [
    ({"method": "loko"}, "method", ", ".join(METHODS)),
    ({"method": "LoCo"}, "method", ", ".join(METHODS)),
    ({"method": ""}, "method", ", ".join(METHODS)),
    ({"bits": 5}, "bits", "8, 4, 2, 1"),
    ({"bits": 16}, "bits", "8, 4, 2, 1"),
    ({"bits": 0}, "bits", "8, 4, 2, 1"),
    ({"bits": True}, "bits", "8, 4, 2, 1"),
    ({"bits": "4"}, "bits", "8, 4, 2, 1"),
    ({"bits": 4.0}, "bits", "8, 4, 2, 1"),
    ({"block_size": 100}, "block_size", BLOCK),
    ({"block_size": 8}, "block_size", BLOCK),
    ({"block_size": 0}, "block_size", BLOCK),
    ({"block_size": -128}, "block_size", BLOCK),
    ({"block_size": 128.0}, "block_size", BLOCK),
    ({"block_size": 2**17}, "block_size", BLOCK),
    ({"block_size": 2**40}, "block_size", BLOCK),
    ({"block_size": True}, "block_size", BLOCK),
    ({"block_size": None}, "block_size", BLOCK),
    ({"block_size": "shards"}, "block_size", BLOCK),
    ({"block_size": "128"}, "block_size", BLOCK),
    ({"codec": "levels", "bits": 8}, "codec", "uniform with bits 8 (levels has 4, 2)"),
    ({"codec": "uniform", "bits": 1}, "codec", "sign with bits 1 (uniform has 8, 4, 2)"),
    ({"codec": "sign", "bits": 4}, "codec", "uniform or levels with bits 4 (sign has 1)"),
    ({"codec": "nf4"}, "codec", "uniform, levels, sign"),
    ({"rotation": "fourier"}, "rotation", "none, hadamard"),
    ({"rotation": "hadamard", "block_size": "shard"}, "rotation", "none with block_size shard"),
    ({"error_beta": 1.0}, "error_beta", BETA),
    ({"error_beta": 1}, "error_beta", BETA),
    ({"error_beta": 1.5}, "error_beta", BETA),
    ({"error_beta": -0.1}, "error_beta", BETA),
    ({"error_beta": math.nan}, "error_beta", BETA),
    ({"error_beta": math.inf}, "error_beta", BETA),
    ({"error_beta": "x"}, "error_beta", BETA),
    ({"error_beta": "0.5"}, "error_beta", BETA),
    ({"error_beta": True}, "error_beta", BETA),
    ({"error_beta": 0.5, "method": "error_feedback"}, "error_beta", "0 with method error_feedback"),
    ({"error_dtype": "fp16"}, "error_dtype", ", ".join(ERROR_DTYPES)),
    ({"error_dtype": 8}, "error_dtype", ", ".join(ERROR_DTYPES)),
    ({"topology": "two-hop"}, "topology", "auto, flat, two_hop"),
    *[({"ranks_per_node": value}, "ranks_per_node", "1 or more") for value in (0, -8, 1.0, True, "8")],
    *[
        ({"outer_interval": v}, "outer_interval", "a whole number, 1 or more")
        for v in (0, -1, 1.5, True, "8")
    ],
    *[({"outer_rate": v}, "outer_rate", "a number, more than 0") for v in (0, -0.7, math.nan, True, "1")],
    *[
        ({"outer_momentum": v}, "outer_momentum", "up to but not including 1")
        for v in (1, -0.1, math.inf, "0")
    ],
    *[
        ({"outer_interval": 5, "outer_delay": v}, "outer_delay", "up to but not including outer_interval")
        for v in (5, -1, 1.5, True, "1")
    ],
    *[
        ({name: value}, name, "true or false")
        for name in ("save_error", "strict_load", "error_compensation")
        for value in ("yes", 1, None)
    ],
    *[
        ({name: value}, name, WHOLE)
        for name in ("reset_interval", "start_step", "seed")
        for value in (-1, 1.5, 2.0, True, "10")
    ],
    *[({name: 2**70}, name, "2^62 at most") for name in ("reset_interval", "start_step", "seed")],
    *[({"start_step": value}, "start_step", "or auto") for value in ("Auto", "auto ", "warmup", -1)],
    *[
        ({"method": "onebit_adam", **options}, name, allowed)
        for options, name, allowed in [
            ({"bits": 4}, "bits", "1 with method onebit_adam"),
            ({"start_step": 10}, "start_step", "warmup_steps"),
            ({"error_beta": 0.8}, "error_beta", "0 with method onebit_adam"),
            ({"warmup": "auto", "warmup_steps": 10}, "warmup", "fixed"),
            ({"warmup": "never"}, "warmup", "one of auto, fixed"),
            ({"warmup_steps": 0}, "warmup_steps", "1 or more"),
            ({"warmup_steps": 1.5}, "warmup_steps", "1 or more"),
            ({"warmup": "fixed", "warmup_steps": None}, "warmup_steps", "1 or more"),
        ]
    ],
]


@pytest.mark.parametrize(("options", "field", "allowed"), REFUSED, ids=lambda value: str(value)[:50])
def test_an_impossible_value_is_refused_by_name_with_what_is_allowed(options, field, allowed):
    with pytest.raises(UserError) as refusal:
        CompressionConfig(**options)
    message = str(refusal.value)
    assert message.startswith(f"compression.{field}: {options[field]!r} ")
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"method": "loko"}, "loco"),
        ({"method": "errorfeedback"}, "error_feedback"),
        ({"error_dtype": "int9"}, "int8"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_choice(options, meant):
    with pytest.raises(UserError, match=rf"\(did you mean {meant}\?\)$"):
        CompressionConfig(**options)


def test_nothing_is_suggested_for_what_resembles_nothing():
    with pytest.raises(UserError) as refusal:
        CompressionConfig(method="zzz")
    assert "did you mean" not in str(refusal.value)
    assert nearest("loco", METHODS) == ""


def test_every_documented_combination_is_accepted():
    names = ("method", "bits", "error_dtype", "block_size")
    others = [method for method in METHODS if method != "onebit_adam"]
    for values in itertools.product(others, BITS, ERROR_DTYPES, (16, 128, 4096, "shard")):
        options = dict(zip(names, values, strict=True))
        assert options.items() <= CompressionConfig(**options).as_dict().items()


@pytest.mark.parametrize(
    ("options", "codec", "rotation"),
    [
        ({}, "levels", "hadamard"),
        ({"bits": 2}, "levels", "hadamard"),
        ({"bits": 8}, "uniform", "none"),
        ({"bits": 1}, "sign", "none"),
        ({"block_size": "shard"}, "uniform", "none"),
        ({"block_size": "shard", "codec": "levels"}, "levels", "none"),
        ({"codec": "uniform"}, "uniform", "none"),
        ({"codec": "uniform", "rotation": "hadamard"}, "uniform", "hadamard"),
        ({"rotation": "none"}, "levels", "none"),
        ({"bits": 8, "rotation": "hadamard"}, "uniform", "hadamard"),
        ({"method": "onebit_adam"}, "sign", "none"),
    ],
)
def test_the_code_follows_the_bits(options, codec, rotation):
    config = CompressionConfig(**options)
    assert (config.codec, config.rotation) == (codec, rotation)
    assert CompressionConfig(**config.as_dict()) == config


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("options", [{}, {"block_size": "shard"}, {"error_beta": 0}])
def test_loco_is_the_default_method(options, bits):
    config = CompressionConfig(bits=bits, **options)
    assert config.method == "loco"
    assert CompressionConfig(**config.as_dict()) == config


@pytest.mark.parametrize("optimizer", ["muon", "dist_muon"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_muon_has_a_default_method(optimizer, bits):
    flags = {"optimizer": optimizer, "train_iters": 100}
    found = CompressionConfig.for_megatron(flags, bits=bits, method=None)
    assert (found.method, found.beta, found.start_step) == ("error_feedback", 0.0, "auto")
    plain = CompressionConfig.for_megatron(flags | {"optimizer": "adam"}, bits=bits)
    assert plain == CompressionConfig(bits=bits)
    for stated in ({"method": "naive"}, {"error_beta": 0.5}):
        found = CompressionConfig.for_megatron(flags, bits=bits, **stated)
        assert found == CompressionConfig(bits=bits, **stated)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({}, "auto"),
        *[({"method": method}, "auto") for method in ("naive", "loco", "error_feedback")],
        ({"method": "none"}, 0),
        ({"method": "onebit_adam"}, 0),
        ({"method": "onebit_adam", "start_step": "auto"}, 0),
        *[({"start_step": start}, start) for start in (0, 3, "auto")],
    ],
)
def test_compression_starts_by_itself_unless_a_step_is_given(options, start):
    config = CompressionConfig(**options)
    assert config.start_step == start
    assert CompressionConfig(**config.as_dict()) == config
    flags = {"optimizer": "adam", "lr_warmup_iters": 25, "train_iters": 100}
    assert CompressionConfig.for_megatron(flags, **options) == config, "flags never decide"


def test_the_default_method_is_the_optimizer_s_and_a_given_one_stays():
    assert CompressionConfig(bits=4).for_optimizer("muon") == CompressionConfig(
        bits=4, method="error_feedback"
    )
    for stated in ({"method": "loco"}, {"error_beta": 0.8}, {"method": "none"}):
        config = CompressionConfig(**stated)
        assert config.for_optimizer("muon") is config
    assert CompressionConfig().for_optimizer("adam") == CompressionConfig()
    assert CompressionConfig().for_optimizer(None) == CompressionConfig()


def test_onebit_adam_has_defaults_of_its_own():
    plain = CompressionConfig(method="onebit_adam")
    assert (plain.bits, plain.reset_interval, plain.warmup, plain.beta) == (1, 0, "auto", 0.0)
    fixed = CompressionConfig(method="onebit_adam", warmup_steps=100, reset_interval=512)
    assert (fixed.warmup, fixed.warmup_steps, fixed.reset_interval) == ("fixed", 100, 512)
    assert CompressionConfig(**fixed.as_dict()) == fixed
    assert CompressionConfig(method="loco", warmup_steps=100).compresses  # of no use there, and no harm


def test_the_defaults_are_those_of_the_design():
    assert CompressionConfig().as_dict() == {
        "method": "loco",
        "bits": 4,
        "codec": "levels",
        "rotation": "hadamard",
        "block_size": 128,
        "error_beta": 0.8,
        "error_dtype": "int8",
        "reset_interval": 512,
        "start_step": "auto",
        "warmup": None,
        "warmup_steps": None,
        "error_compensation": True,
        "seed": 1234,
        "topology": "auto",
        "ranks_per_node": None,
        "weight_gather": "stock",
        "outer_interval": 1,
        "outer_rate": 1.0,
        "outer_momentum": 0.0,
        "outer_delay": 0,
        "save_error": True,
        "strict_load": False,
    }


@pytest.mark.parametrize(
    ("options", "beta", "keeps_errors", "compresses"),
    [
        ({"method": "loco"}, 0.8, True, True),
        ({"method": "loco", "error_beta": 0}, 0.0, True, True),
        ({"method": "loco", "error_beta": 0.999}, 0.999, True, True),
        ({"method": "error_feedback"}, 0.0, True, True),
        ({"method": "error_feedback", "error_beta": 0.0}, 0.0, True, True),
        ({"method": "naive"}, 0.0, False, True),
        ({"method": "none"}, 0.0, False, False),
        ({"method": "onebit_adam"}, 0.0, True, True),
        ({"method": "onebit_adam", "error_compensation": False}, 0.0, False, True),
    ],
)
def test_beta_and_memory_follow_the_method(options, beta, keeps_errors, compresses):
    config = CompressionConfig(**options)
    assert config.beta == beta
    assert isinstance(config.beta, float)
    assert config.keeps_errors is keeps_errors
    assert config.compresses is compresses


def test_a_config_is_frozen_hashable_and_goes_through_its_dictionary():
    config = CompressionConfig(method="loco", bits=2, error_beta=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 4
    assert CompressionConfig(**config.as_dict()) == config
    assert len({config, CompressionConfig(**config.as_dict())}) == 1
    assert config != CompressionConfig(method="loco", bits=4, error_beta=0.5)
    with pytest.raises(TypeError):
        CompressionConfig("loco")


def test_each_field_tells_its_help_and_its_choices():
    for option in dataclasses.fields(CompressionConfig):
        assert option.metadata["help"]
        assert option.metadata["choices"] == CHOICES.get(option.name)


def test_the_package_exports_it():
    assert megatron_patch.CompressionConfig is CompressionConfig
    assert megatron_patch.UserError is UserError
    assert issubclass(UserError, ValueError)


LEFT_OUT = [
    ({}, {"bits": 8}),
    ({}, {"bits": 1}),
    ({}, {"block_size": "shard"}),
    ({}, {"method": "error_feedback"}),
    ({}, {"method": "onebit_adam"}),
    ({}, {"method": "none"}),
    ({"method": "onebit_adam"}, {"method": "loco"}),
    ({"method": "onebit_adam"}, {"warmup_steps": 100}),
    ({"method": "none"}, {"method": "loco"}),
    ({"codec": "uniform"}, {"bits": 8}),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("given", "changed"), LEFT_OUT)
def test_what_was_left_out_is_resolved_anew_in_a_copy_with_another_option(given, changed):
    asked = CompressionConfig(**given)
    found = dataclasses.replace(asked, **changed)
    expected = CompressionConfig(**{**given, **changed})
    assert found == expected
    left_out = {option.name: option.default for option in dataclasses.fields(asked)}
    assert dataclasses.replace(found, **{name: given.get(name, left_out[name]) for name in changed}) == asked
    assert found.for_optimizer("muon") == expected.for_optimizer("muon")


def test_what_was_given_stays_in_a_copy():
    with pytest.raises(UserError, match=r"compression\.codec: 'levels' is not allowed"):
        dataclasses.replace(CompressionConfig(codec="levels"), bits=8)
    assert dataclasses.replace(CompressionConfig(start_step=0), bits=8).start_step == 0
