"""smooth_keys: channels of the keys that a cache of int8 holds become alike in size.

A KV head's codes share one scale, so a channel of large keys (there are such: Qwen's biases, Gemma's norms)
makes the steps of all others coarse. q.k stays as it is when a channel of k is divided by a factor and that
of q multiplied with it (as SmoothQuant moves factors between activations and weights, Xiao et al. 2022); the
two channels that RoPE rotates into each other share one. The factors go into what makes queries and keys: the
norms of heads where there are such (float32), else the rows of their projections, as powers of two, which
lose no bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pelton import nn
from pelton.ir.recipe import Recipe, ScaleRows
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import WIDE

NAME = "smooth_keys"

Factors = npt.NDArray[np.float64]
"""(KV heads, head_dim)."""


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Divide the keys of every attention by the sizes that ``context.key_sizes`` has of its layer."""
    if not context.key_sizes:
        return PassReport(name=NAME, matched=0, changed=0, note="no keys of 8 bits were measured")
    rotated = {2 * m.inv_freq.numel() for m in model.modules() if isinstance(m, nn.RotaryEmbedding)}
    recipes = nn.collect_recipes(model)
    found = [(where, m) for where, m in model.named_modules() if isinstance(m, nn.Attention)]
    changed, skipped = 0, []
    for layer, (where, attention) in enumerate(found):
        if len(rotated) > 1:
            why: str | None = "layers rotate by different widths"
        else:
            factors = _paired(context.key_sizes[layer], max(rotated, default=0))
            why = _smooth(attention, where, factors, recipes, context)
        if why is None:
            changed += 1
        else:
            skipped.append((where, why))
    return PassReport(name=NAME, matched=len(found), changed=changed, skipped=tuple(skipped))


def _paired(sizes: npt.NDArray[np.float32], rotated: int) -> Factors:
    """The larger size of two channels that RoPE rotates into each other, over the geometric mean of a head's,
    so that queries and keys stay about as large as they are. Channels that are always 0 stay."""
    factors = sizes.astype(np.float64)
    half = rotated // 2
    pair = np.maximum(factors[:, :half], factors[:, half:rotated])
    factors[:, :half] = factors[:, half:rotated] = pair
    logs = np.log(factors, out=np.zeros_like(factors), where=factors > 0)
    logs -= logs.mean(axis=1, keepdims=True) * (factors > 0)
    return np.exp(logs)


def _smooth(
    attention: nn.Attention, where: str, factors: Factors, recipes: dict[str, Recipe], context: PassContext
) -> str | None:
    """Give an attention its factors, or say why not."""
    heads, shared = attention.num_kv_heads, attention.num_heads // attention.num_kv_heads
    if attention.has_qk_norm:
        # One norm is for all heads.
        factors = np.repeat(factors.max(axis=0, keepdims=True), heads, axis=0)
        _scale(attention.k_norm, "weight", recipes[f"{where}.k_norm.weight"], 1 / factors[0])
        _scale(attention.q_norm, "weight", recipes[f"{where}.q_norm.weight"], factors[0])
        attention.key_factors = factors
        return None
    if attention.packed:
        return "q, k and v are packed in the checkpoint"
    factors = np.exp2(np.round(np.log2(factors))).astype(np.float64)
    parts = {"q_proj": np.repeat(factors, shared, axis=0).reshape(-1), "k_proj": 1 / factors.reshape(-1)}
    for part in parts:
        recipe = recipes[f"{where}.{part}.weight"]
        for quant in (context.quant_of(recipe), context.stored_quant(recipe, 2)):
            if quant not in WIDE:
                return f"{part} is stored as {quant}"
    for part, by_row in parts.items():
        linear = getattr(attention, part)
        for name in ("weight", "bias"):
            if getattr(linear, name) is not None:
                _scale(linear, name, recipes[f"{where}.{part}.{name}"], by_row)
    attention.key_factors = factors
    return None


def _scale(module: Any, name: str, recipe: Recipe, factors: npt.NDArray[np.float64]) -> None:
    scaled = ScaleRows(recipe, tuple(float(np.float32(f)) for f in factors))
    module.given_recipes = {**module.given_recipes, name: scaled}


PASS = Pass(
    name=NAME,
    kind="model",
    run=run,
    rewrite="q.k -> (f q).(k / f), with f in the norms or projections before, for KV caches of int8",
    bound="float32 rounding",
)
