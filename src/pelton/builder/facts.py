"""What a build reads off a checkpoint and its model before anything is computed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pelton import nn
from pelton.builder.resolve import CheckpointFacts
from pelton.builder.sources import readable, resolve_sources
from pelton.engine.config import KVGroup, ModelConfig
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.kv_quant import CACHE_DTYPE
from pelton.ir.recipe import AddScalar, PermuteRows, Recipe, Source, Transpose
from pelton.models.checkpoint import Checkpoint

#: Tokens of a step up to which GPU products of 8-bit codes have exact inputs (``linear/rows8.py``).
EXACT_TOKENS = 16
#: Weights whose products take inputs with a scale for each token and so many columns
#: (``linear/hopper_blocks.py``).
BLOCKS, GROUP = "fp8_g128", 128
#: Sampling defaults that are passed on to the runtime.
_GENERATION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def checkpoint_facts(checkpoint: Checkpoint, model: nn.CausalLM) -> CheckpointFacts:
    """What resolving a ``BuildConfig`` depends on."""
    matrices: dict[str, int] = {}
    for info in readable(checkpoint).values():
        if len(info.shape) > 1:
            matrices[info.quant] = matrices.get(info.quant, 0) + math.prod(info.shape)
    quantised = (checkpoint.activation_quant(name) for name in checkpoint.tensors)
    return CheckpointFacts(
        max_position_embeddings=model.max_position_embeddings,
        matrix_elements=matrices,
        quantised_inputs=frozenset(q.dtype for q in quantised if q is not None),
    )


def quant_elements(checkpoint: Checkpoint) -> dict[str, int]:
    """Number of values by type as stored in the checkpoint."""
    found: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        found[info.quant] = found.get(info.quant, 0) + math.prod(info.shape)
    return found


def unapplied_quantisation(
    checkpoint: Checkpoint,
    activations: str,
    kv_dtype: str,
    *,
    on_gpu: bool,
    static: bool = False,
    left: int = 0,
    deterministic: bool = False,
) -> list[str]:
    """What the checkpoint says of inputs and caches and an engine does otherwise: sentences for the report.

    ``static``: the engine's products have the checkpoint's static scales; of ``left`` of them the input is
    left as codes by what makes it.
    """
    notes: list[str] = []
    known = static and left and not deterministic
    here = "int8 per 32 columns" if activations == "int8" and not on_gpu else activations
    inputs: dict[tuple[ActivationQuant, bool], int] = {}
    for name, info in checkpoint.tensors.items():
        quant = checkpoint.activation_quant(name)
        if quant is not None:
            kind = msgspec.structs.replace(quant, scale=float(quant.scale > 0)), info.quant == BLOCKS
            inputs[kind] = inputs.get(kind, 0) + 1
    for (quant, blocks), count in inputs.items():
        how = f"per {quant.group} columns" if quant.group else f"per {quant.per}"
        scale = " with static scales" if quant.scale else ""
        notes.append(
            f"the checkpoint quantises the inputs of {count} products to {quant.dtype} {how}{scale}; "
            f"here they are {_done(quant, blocks, activations, static, deterministic) if on_gpu else here}"
            + (f", but for {left} that activation or attention leave so" if known and quant.scale else "")
        )
    kv = checkpoint.kv_quant()
    if kv is not None and CACHE_DTYPE[kv.dtype] != kv_dtype:
        notes.append(
            f"the checkpoint quantises KV caches to {kv.dtype}; here they are {kv_dtype} "
            f"(kv_dtype {kv.dtype} quantises them too)"
        )
    return notes


def _done(quant: ActivationQuant, blocks: bool, activations: str, static: bool, deterministic: bool) -> str:
    """What a GPU engine with such ``activations`` does instead; ``blocks``: the weight is of ``BLOCKS``."""
    if quant.dtype != activations:
        return activations
    if blocks and deterministic:
        return "exact"
    if blocks:
        how = "so" if quant.group == GROUP else f"{activations} per {GROUP} columns of a token"
    elif static and quant.scale:
        how = "so"
    elif quant.per == "token" and not quant.group:
        how = "so, without exact columns," if quant.outliers else "so"
    else:
        how = f"{activations} per token"
    if deterministic:
        return f"{how} in every step"
    return f"{how} in steps of more than {EXACT_TOKENS} tokens, and exact in smaller ones"


def model_recipes(model: nn.CausalLM, source: Callable[[str], Recipe]) -> dict[str, Recipe]:
    """Recipe of every parameter over what ``Checkpoint.read`` gives (``source``: ``Checkpoint.source``)."""
    return {name: resolve_sources(recipe, source) for name, recipe in nn.collect_recipes(model).items()}


def expected_tensors(model: nn.CausalLM) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensors that the (not yet rewritten) model reads, with their shapes."""
    if model.source_shapes is not None:
        return dict(model.source_shapes)
    expected: dict[str, tuple[int, ...]] = {}
    for name, recipe in nn.collect_recipes(model).items():
        shape = tuple(model.get_parameter(name).shape)
        while not isinstance(recipe, Source):
            assert isinstance(recipe, AddScalar | PermuteRows | Transpose), f"{name}: {recipe}"
            shape = shape[::-1] if isinstance(recipe, Transpose) else shape
            recipe = recipe.base
        expected[recipe.name] = shape
    return expected


def model_config(
    checkpoint: Checkpoint, model: nn.CausalLM, architecture: str, tokenizer: Path | None
) -> ModelConfig:
    """The runtime's view of the model; ``tokenizer``: the engine's tokenizer folder, written, or None
    where special tokens do not matter."""
    special = _read_json(tokenizer / "special_tokens.json") if tokenizer else {}
    config, generation = checkpoint.config, checkpoint.generation_config
    eos: dict[int, None] = {}
    for value in (config.get("eos_token_id"), generation.get("eos_token_id"), special.get("eos_token_ids")):
        eos.update(dict.fromkeys(_ids(value)))
    bos = special.get("bos_token_id", config.get("bos_token_id"))
    return ModelConfig(
        architecture=architecture,
        name=checkpoint.name,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_parameters=sum(math.prod(p.shape) for p in model.parameters()),
        max_position_embeddings=model.max_position_embeddings,
        kv_groups=tuple(
            KVGroup(layers=g.layers, num_kv_heads=g.num_kv_heads, head_dim=g.head_dim, window=g.window)
            for g in model.kv_groups()
        ),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(eos),
        generation={k: generation[k] for k in _GENERATION if isinstance(generation.get(k), int | float)},
    )


def _ids(value: Any) -> Iterable[int]:
    if isinstance(value, int):
        return (value,)
    return tuple(v for v in value if isinstance(v, int)) if isinstance(value, list | tuple) else ()


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    found: Mapping[str, Any] = json.loads(path.read_text())
    return found
