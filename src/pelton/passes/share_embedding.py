"""share_embedding: a head that has the embedding table's values becomes the table, stored once.

Checkpoints often hold both although training tied them. Equal means the same shape and type, and values
within 1e-6; both are read in pieces, and reading stops at the first piece that differs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pelton import nn
from pelton.ir.blocks import dequantize
from pelton.ir.condition import SameValues
from pelton.ir.recipe import Recipe, rows
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "share_embedding"
TOLERANCE = 1e-6
#: Values compared at a time.
CHUNK = 1 << 20


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Tie the last linear layer over the vocabulary to the embedding that has its shape.

    The last, since a network may be as wide inside as its vocabulary.
    """
    embeddings = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    heads = [(name, m) for name, m in linears.items() if m.out_features == model.vocab_size]
    for head, linear in heads[-1:]:
        for table, embedding in embeddings.items():
            if linear.weight is embedding.weight:
                return PassReport(name=NAME, matched=0, changed=0)
            if linear.weight.shape == embedding.weight.shape:
                return _share(model, context, head, linear, table, embedding)
    return PassReport(name=NAME, matched=0, changed=0)


def _share(
    model: nn.CausalLM,
    context: PassContext,
    head: str,
    linear: nn.Linear,
    table: str,
    embedding: nn.Embedding,
) -> PassReport:
    recipes = nn.collect_recipes(model)
    a, b = recipes[f"{table}.weight"], recipes[f"{head}.weight"]
    if a != b and (why := _difference(context, head, a, b, tuple(embedding.weight.shape))):
        return PassReport(name=NAME, matched=1, changed=0, skipped=((head, why),))
    linear.weight = embedding.weight
    conditions = (SameValues(a=a, b=b, tolerance=TOLERANCE, why=NAME),) if a != b else ()
    return PassReport(name=NAME, matched=1, changed=1, conditions=conditions)


def _difference(context: PassContext, head: str, a: Recipe, b: Recipe, shape: tuple[int, ...]) -> str | None:
    types = context.quant_of(a), context.quant_of(b)
    if types[0] != types[1]:
        return f"{head} is {types[1]}, the embedding {types[0]}"
    for first, last in _pieces(shape):
        x, y = (_values(context, rows(recipe, first, last)) for recipe in (a, b))
        difference = np.abs(x - y).max()
        if not difference <= TOLERANCE:
            return f"{head} differs (max {difference:.2g} in rows {first} to {last - 1})"
    return None


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK // shape[1])
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def _values(context: PassContext, recipe: Recipe) -> npt.NDArray[np.float32]:
    return dequantize(context.read(recipe))


PASS = Pass(
    name=NAME,
    kind="model",
    run=run,
    rewrite="lm_head.weight -> embed_tokens.weight",
    bound="1e-6 in each of the head's weights",
)
