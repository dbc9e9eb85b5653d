"""parallelize_embedding: each rank of a tensor-parallel model keeps a part of the embedding table.

By vocabulary (each rank has some rows, and zeros for tokens of other ranks; the ranks' results are
added), or by hidden size (each has some columns; the results stand side by side). Rows work for every
value type and are padded with zeros to equal parts; columns need dense values that divide evenly, and
are taken where the vocabulary does not divide but they do. After Megatron-LM (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pelton import nn
from pelton.dtypes import is_dense
from pelton.errors import BuildError
from pelton.ir.recipe import Columns, PadRows, Recipe, Rows
from pelton.mapping import Mapping
from pelton.nn import functional as F
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "parallelize_embedding"


class ParallelEmbedding(nn.Module):
    """One rank's part of a table: ``partial`` gives its share, ``combine`` makes the whole of all ranks'.

    ``combine(partial_TD, split)`` is the collective: a sum over ranks (``split`` "vocabulary") or their
    results side by side ("hidden").
    """

    def __init__(self, weight: Any, recipe: Recipe, mapping: Mapping, split: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.given_recipes = {"weight": recipe}
        self.mapping = mapping
        self.split = split
        self.combine: Callable[[Any, str], Any] = _no_ranks

    def forward(self, ids_T: Any) -> Any:
        return self.combine(self.partial(ids_T), self.split)

    def partial(self, ids_T: Any) -> Any:
        """(T, D) with zeros for other ranks' tokens, or (T, D / ranks)."""
        if self.split == "hidden":
            return F.embedding(ids_T, self.weight)
        rows = self.weight.shape[0]
        own = ids_T - self.mapping.rank * rows
        here = (own >= 0) & (own < rows)
        return F.embedding(own.clamp(0, rows - 1), self.weight) * here[:, None]


def _no_ranks(partial_TD: Any, split: str) -> Any:
    raise BuildError("an embedding that is split over ranks needs their collectives, which no build has yet")


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Replace every untied ``nn.Embedding`` by this rank's ``ParallelEmbedding``."""
    mapping = context.mapping
    if mapping.tp_size == 1:
        return PassReport(name=NAME, matched=0, changed=0, note="not needed: one rank")
    recipes = nn.collect_recipes(model)
    users = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    matched, changed, skipped = 0, 0, []
    for where, module in list(model.named_modules()):
        if not isinstance(module, nn.Embedding):
            continue
        matched += 1
        if users.count(id(module.weight)) > 1:
            skipped.append((where, "the head is tied to it and is not split yet"))
            continue
        recipe = recipes[f"{where}.weight"]
        made = _part(module.weight, recipe, mapping, is_dense(context.quant_of(recipe)))
        parent, _, name = where.rpartition(".")
        setattr(model.get_submodule(parent), name, made)
        changed += 1
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


def _part(weight: Any, recipe: Recipe, mapping: Mapping, dense: bool) -> ParallelEmbedding:
    vocabulary, hidden = weight.shape
    if dense and vocabulary % mapping.tp_size and hidden % mapping.tp_size == 0:
        columns = mapping.share(hidden)
        part = weight[:, columns.start : columns.stop].contiguous()
        return ParallelEmbedding(part, Columns(recipe, columns.start, columns.stop), mapping, "hidden")
    rows = mapping.share(vocabulary)
    first, stop = min(rows.start, vocabulary), min(rows.stop, vocabulary)
    part = weight.new_zeros((len(rows), hidden))
    if not part.is_meta:
        part[: stop - first] = weight[first:stop]
    own: Recipe = Rows(recipe, first, stop)
    if stop - first < len(rows):
        own = PadRows(own, len(rows))
    return ParallelEmbedding(part, own, mapping, "vocabulary")


PASS = Pass(
    name=NAME,
    kind="model",
    run=run,
    rewrite="embedding(ids) -> sum over ranks of embedding(own ids), or parts of rows side by side",
    bound="bit for bit",
)
