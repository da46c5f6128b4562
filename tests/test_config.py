"""CompressionConfig: its defaults, what it refuses, and what the refusal says."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from megatron_patch.config import ERROR_DTYPES, METHODS, CompressionConfig
from megatron_patch.errors import UserError

BITS = (8, 4, 2, 1)

WHOLE = "a whole number, 0 or more"
BLOCK = "a power of two from 16 to 65536, or 'shard'"
BETA = "from 0 up to but not including 1"

REFUSED = [
    *[({"method": value}, "method", ", ".join(METHODS)) for value in ("loko", "LoCo", "")],
    *[({"bits": value}, "bits", "8, 4, 2, 1") for value in (5, 0, True, "4", 4.0)],
    *[
        ({"block_size": value}, "block_size", BLOCK)
        for value in (100, 8, -128, 128.0, 2**17, True, None, "shards", "128")
    ],
    ({"codec": "levels", "bits": 8}, "codec", "uniform with bits 8 (levels has 4, 2)"),
    ({"codec": "uniform", "bits": 1}, "codec", "sign with bits 1 (uniform has 8, 4, 2)"),
    ({"codec": "sign", "bits": 4}, "codec", "uniform or levels with bits 4 (sign has 1)"),
    ({"codec": "nf4"}, "codec", "uniform, levels, sign"),
    ({"rotation": "fourier"}, "rotation", "none, hadamard"),
    ({"rotation": "hadamard", "block_size": "shard"}, "rotation", "none with block_size shard"),
    *[({"error_beta": value}, "error_beta", BETA) for value in (1, -0.1, math.nan, "0.5", True)],
    ({"error_beta": 0.5, "method": "error_feedback"}, "error_beta", "0 with method error_feedback"),
    ({"error_dtype": "fp16"}, "error_dtype", ", ".join(ERROR_DTYPES)),
    ({"topology": "two-hop"}, "topology", "auto, flat, two_hop"),
    *[({"ranks_per_node": value}, "ranks_per_node", "1 or more") for value in (0, 1.0, "8")],
    *[({"outer_interval": v}, "outer_interval", "a whole number, 1 or more") for v in (0, 1.5)],
    *[({"outer_rate": value}, "outer_rate", "a number, more than 0") for value in (0, math.nan, "1")],
    *[({"outer_momentum": value}, "outer_momentum", "not including 1") for value in (1, -0.1, "0")],
    *[({"outer_interval": 5, "outer_delay": v}, "outer_delay", "including outer_interval") for v in (5, -1)],
    *[({"save_error": value}, "save_error", "true or false") for value in ("yes", 1, None)],
    ({"error_compensation": 1}, "error_compensation", "true or false"),
    *[({"reset_interval": value}, "reset_interval", WHOLE) for value in (-1, 1.5, True, "10")],
    *[({name: -1}, name, WHOLE) for name in ("start_step", "seed")],
    *[({name: 2**70}, name, "2^62 at most") for name in ("reset_interval", "start_step", "seed")],
    *[({"start_step": value}, "start_step", "or auto") for value in ("Auto", "warmup")],
    *[
        ({"method": "onebit_adam", **options}, name, allowed)
        for options, name, allowed in [
            ({"bits": 4}, "bits", "1 with method onebit_adam"),
            ({"start_step": 10}, "start_step", "warmup_steps"),
            ({"error_beta": 0.8}, "error_beta", "0 with method onebit_adam"),
            ({"warmup": "auto", "warmup_steps": 10}, "warmup", "fixed"),
            ({"warmup": "never"}, "warmup", "one of auto, fixed"),
            ({"warmup_steps": 0}, "warmup_steps", "1 or more"),
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


def test_a_typo_is_answered_with_the_nearest_choice():
    with pytest.raises(UserError, match=r"\(did you mean error_feedback\?\)$"):
        CompressionConfig(method="errorfeedback")
    with pytest.raises(UserError) as refusal:
        CompressionConfig(method="zzz")
    assert "did you mean" not in str(refusal.value)


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
        ({"bits": 8}, "uniform", "none"),
        ({"bits": 1}, "sign", "none"),
        ({"block_size": "shard"}, "uniform", "none"),
        ({"block_size": "shard", "codec": "levels"}, "levels", "none"),
        ({"codec": "uniform"}, "uniform", "none"),
        ({"rotation": "none"}, "levels", "none"),
        ({"bits": 8, "rotation": "hadamard"}, "uniform", "hadamard"),
        ({"method": "onebit_adam"}, "sign", "none"),
    ],
)
def test_the_code_follows_the_bits(options, codec, rotation):
    config = CompressionConfig(**options)
    assert (config.codec, config.rotation) == (codec, rotation)
    assert CompressionConfig(**config.as_dict()) == config


def test_muon_has_a_default_method_and_a_given_one_stays():
    flags = {"optimizer": "dist_muon", "train_iters": 100}
    found = CompressionConfig.for_megatron(flags, bits=2, method=None)
    assert (found.method, found.beta, found.start_step) == ("error_feedback", 0.0, "auto")
    assert found == CompressionConfig(bits=2).for_optimizer("muon")
    assert CompressionConfig.for_megatron(flags | {"optimizer": "adam"}) == CompressionConfig()
    for stated in ({"method": "naive"}, {"error_beta": 0.5}):
        config = CompressionConfig(**stated)
        assert CompressionConfig.for_megatron(flags, **stated) == config
        assert config.for_optimizer("muon") is config
    for other in ("adam", None):
        assert CompressionConfig().for_optimizer(other) == CompressionConfig()


def test_compression_starts_by_itself_unless_a_step_is_given():
    for options, start in (
        ({}, "auto"),
        ({"method": "naive"}, "auto"),
        ({"method": "none"}, 0),
        ({"method": "onebit_adam", "start_step": "auto"}, 0),
        ({"start_step": 3}, 3),
    ):
        config = CompressionConfig(**options)
        assert config.start_step == start
        assert CompressionConfig(**config.as_dict()) == config
        flags = {"optimizer": "adam", "lr_warmup_iters": 25, "train_iters": 100}
        assert CompressionConfig.for_megatron(flags, **options) == config, "flags never decide"


def test_onebit_adam_has_defaults_of_its_own():
    plain = CompressionConfig(method="onebit_adam")
    assert (plain.bits, plain.reset_interval, plain.warmup, plain.beta) == (1, 0, "auto", 0.0)
    fixed = CompressionConfig(method="onebit_adam", warmup_steps=100, reset_interval=512)
    assert (fixed.warmup, fixed.warmup_steps, fixed.reset_interval) == ("fixed", 100, 512)
    assert CompressionConfig(**fixed.as_dict()) == fixed


def test_the_defaults_are_those_of_the_design():
    assert CompressionConfig().as_dict() == {
        **{"method": "loco", "bits": 4, "codec": "levels", "rotation": "hadamard", "block_size": 128},
        **{"error_beta": 0.8, "error_dtype": "int8", "reset_interval": 512, "start_step": "auto"},
        **{"warmup": None, "warmup_steps": None, "error_compensation": True, "seed": 1234},
        **{"topology": "auto", "ranks_per_node": None, "weight_gather": "auto"},
        **{"outer_interval": 1, "outer_rate": 1.0, "outer_momentum": 0.0, "outer_delay": 0},
        **{"trial": 0, "trial_only": False, "save_error": True, "strict_load": False},
    }


@pytest.mark.parametrize(
    ("options", "beta", "keeps_errors", "compresses"),
    [
        ({"method": "loco"}, 0.8, True, True),
        ({"method": "loco", "error_beta": 0}, 0.0, True, True),
        ({"method": "error_feedback"}, 0.0, True, True),
        ({"method": "naive"}, 0.0, False, True),
        ({"method": "none"}, 0.0, False, False),
        ({"method": "onebit_adam"}, 0.0, True, True),
        ({"method": "onebit_adam", "error_compensation": False}, 0.0, False, True),
    ],
)
def test_beta_and_memory_follow_the_method(options, beta, keeps_errors, compresses):
    config = CompressionConfig(**options)
    assert (config.beta, config.keeps_errors, config.compresses) == (beta, keeps_errors, compresses)
    assert isinstance(config.beta, float)


def test_a_config_is_frozen_and_hashable():
    config = CompressionConfig(method="loco", bits=2, error_beta=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 4
    assert len({config, CompressionConfig(**config.as_dict())}) == 1
    with pytest.raises(TypeError):
        CompressionConfig("loco")


LEFT_OUT = [
    ({}, {"bits": 8}),
    ({}, {"block_size": "shard"}),
    ({}, {"method": "onebit_adam"}),
    ({"method": "onebit_adam"}, {"method": "loco"}),
    ({"method": "onebit_adam"}, {"warmup_steps": 100}),
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
