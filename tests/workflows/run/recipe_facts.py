"""What a recipe means to Megatron, found out in a worker of the pool: its dry run, arguments and parameters.

The parameters are those of Megatron's own GPTModel, built on the meta device from the arguments that Megatron
resolved for the recipe, with all parallel sizes 1 and one, then two layers: layers are alike, so the rest of
the model is counted by extrapolation.
"""

from __future__ import annotations

import contextlib
import functools
import io
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch

WHOLE = [
    *("launch.device=cpu", "launch.nnodes=1", "launch.nproc_per_node=1"),
    *(
        f"megatron.{setting}"
        for setting in (
            *("tensor_model_parallel_size=1", "pipeline_model_parallel_size=1"),
            *("expert_model_parallel_size=1", "sequence_parallel=false", "overlap_param_gather=false"),
            *("moe_grouped_gemm=false", "moe_permute_fusion=false", "cross_entropy_loss_fusion=false"),
            "transformer_impl=local",
        )
    ),
]
PARTS = {"word_embeddings": "embedding", "output_layer": "output", ".experts.": "experts"}
"""What a parameter's name says about where it lies; all others are a layer's dense part."""


def arguments(recipe: Path, overrides: list[str]) -> Namespace:
    """Megatron's validated arguments for a recipe, as the command line's dry run gets them."""
    from megatron_patch.workflows.run import configuration
    from megatron_patch.workflows.run.prepare import prepare_run

    return prepare_run(configuration.load(recipe, overrides), Path("nowhere"), dry=True).args


def elements(args: Namespace, layers: int) -> Counter[str]:
    """Elements by part of the model with so many layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training.argument_utils import gpt_config_from_args

    config = gpt_config_from_args(Namespace(**{**vars(args), "num_layers": layers}))
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    config.transformer.use_cpu_initialization, config.transformer.perform_initialization = True, False
    with torch.device("meta"):
        model = GPTModel(
            config.transformer,
            spec,
            vocab_size=args.vocab_size,
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        part = next((part for word, part in PARTS.items() if word in name), "dense")
        found[part] += parameter.numel()
    return found


def facts(recipes: list[Path]) -> dict[str, dict[str, Any]]:
    """In a worker: for each recipe its dry run's output, its arguments, and its parameters by part."""
    from megatron.core import parallel_state

    from megatron_patch.workflows.run import megatron_flags

    parallel_state.initialize_model_parallel()
    parser = functools.cache(megatron_flags.build_parser)  # a quarter of a second each
    with mock.patch.object(megatron_flags, "build_parser", parser):
        return {recipe.stem: _facts(recipe) for recipe in recipes}


def _facts(recipe: Path) -> dict[str, Any]:
    from megatron_patch.workflows import cli
    from megatron_patch.workflows.run import configuration

    before = set(Path().iterdir())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(["train", str(recipe), "--dry-run", "--out", "nowhere"])
    left = set(Path().iterdir()) - before
    args, alone = arguments(recipe, []), arguments(recipe, WHOLE)
    if alone.vocab_size is None:  # of a tokenizer that is trained on the recipe's data
        alone.vocab_size = int(configuration.load(recipe).data.tokenizer.removeprefix("bpe:"))
    one, two = elements(alone, 1), elements(alone, 2)
    layer = two - one
    ends = one - layer
    return {
        "status": status,
        "left": sorted(map(str, left)),
        "printed": printed.getvalue(),
        "args": {key: value for key, value in vars(args).items() if isinstance(value, int | str | None)},
        "elements": {part: ends[part] + args.num_layers * layer[part] for part in one},
    }
