"""Embedding tables that are shared with the head, or split over ranks; q, k and v taken apart again."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton import nn
from pelton.errors import BuildError, ConfigError
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import Columns, Concat, PadRows, Recipe, Rows, Source
from pelton.ir.tensors import HostTensor
from pelton.mapping import Mapping
from pelton.passes import (
    PASSES,
    PassContext,
    parallelize_embedding,
    run_model_passes,
    share_embedding,
    unfuse_qkv_gemm,
)
from tests.models import zoo
from tests.models.oracle import load_ours, read_from, relative_error
from tests.passes.support import FLOAT32, Net, by_name, create, logits

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def twin(
    change: float = 0.0, quants: tuple[str, str] = ("float32", "float32"), **options: Any
) -> tuple[Any, PassContext, Any]:
    """An untied Llama whose head is its table but for one value; a context that counts rows read."""
    hf = zoo.llama(**options)
    state = {name: value.clone() for name, value in hf.state_dict().items()}
    state[HEAD] = state[TABLE].clone()
    state[HEAD][40, 3] += change
    seen: list[Recipe] = []

    def read(recipe: Recipe) -> HostTensor:
        seen.append(recipe)
        return evaluate(recipe, read_from(state))

    def quant_of(recipe: Recipe) -> str:
        return quants[1] if recipe == Source(HEAD) else quants[0]

    return hf, PassContext(quant_of=quant_of, read=read), (state, seen)


def test_a_head_with_the_tables_values_is_stored_once() -> None:
    hf, context, (state, _) = twin()
    model, plain = create(hf), create(hf)
    report = share_embedding.run(model, context)
    assert (report.matched, report.changed) == (1, 1)
    assert HEAD not in nn.collect_recipes(model)
    (condition,) = report.conditions
    assert (condition.a, condition.b, condition.why) == (Source(TABLE), Source(HEAD), "share_embedding")
    for each in (model, plain):
        nn.load_weights(each, read_from(state))
    assert torch.equal(logits(model), logits(plain))


def test_a_network_as_wide_as_its_vocabulary_has_one_head() -> None:
    """Its gates have the table's shape, too."""
    hf, context, _ = twin(intermediate_size=zoo.llama().config.vocab_size)
    model = create(hf)
    assert share_embedding.run(model, context).changed == 1
    assert HEAD not in nn.collect_recipes(model)


def test_values_within_a_millionth_are_the_same() -> None:
    hf, context, _ = twin(change=5e-7)
    assert share_embedding.run(create(hf), context).changed == 1


def test_a_head_that_differs_is_refused_with_the_largest_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_embedding, "CHUNK", 32 * 16)
    hf, context, (_, seen) = twin(change=0.31)
    model = create(hf)
    report = share_embedding.run(model, context)
    assert report.skipped == (("lm_head", "lm_head differs (max 0.31 in rows 32 to 47)"),)
    assert HEAD in nn.collect_recipes(model)
    # In pieces, and no further than the difference.
    assert seen == [Rows(Source(name), i, i + 16) for i in (0, 16, 32) for name in (TABLE, HEAD)]


def test_a_head_of_another_type_is_refused_unread() -> None:
    hf, context, (_, seen) = twin(quants=("q4_k", "q6_k"))
    report = share_embedding.run(create(hf), context)
    assert report.skipped == (("lm_head", "lm_head is q6_k, the embedding q4_k"),)
    assert seen == []


@pytest.mark.parametrize("make", [lambda: zoo.llama(tie_word_embeddings=True), zoo.gpt2, zoo.gemma3])
def test_a_tied_head_is_no_match(make: Any) -> None:
    report = share_embedding.run(create(make()), FLOAT32)
    assert (report.matched, report.changed) == (0, 0)


# ---- parallelize_embedding ----


def rank_models(ranks: int, rows: int, columns: int) -> tuple[nn.Embedding, list[Any], list[Recipe]]:
    """A table, and the parts that each rank's pass makes of it, loaded by their recipes."""
    whole = nn.Embedding(rows, columns)
    torch.nn.init.normal_(whole.weight)
    state = {"embed.weight": whole.weight}
    made, recipes = [], []
    for rank in range(ranks):
        net = Net(lambda self, ids, positions: self.embed(ids))
        with torch.device("meta"):
            net.embed = nn.Embedding(rows, columns)
        context = replace(FLOAT32, mapping=Mapping(tp_size=ranks, rank=rank))
        assert parallelize_embedding.run(net, context).changed == 1
        recipes.append(nn.collect_recipes(net)["embed.weight"])
        nn.load_weights(net, read_from(state))
        made.append(net.embed)
    return whole, made, recipes


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "split"),
    [
        (2, 50, 32, "vocabulary"),
        (4, 50, 34, "vocabulary"),  # padded: 13 rows each, the last rank has 11
        (4, 3, 34, "vocabulary"),  # a rank without any row
        (4, 50, 32, "hidden"),
    ],
)
def test_all_ranks_together_give_the_whole_embedding(ranks: int, rows: int, columns: int, split: str) -> None:
    whole, parts, recipes = rank_models(ranks, rows, columns)
    ids = torch.randint(0, rows, (29,), dtype=torch.int32)
    results = [part.partial(ids) for part in parts]
    assert {part.split for part in parts} == {split}
    assert len({part.weight.shape for part in parts}) == 1
    together = torch.stack(results).sum(0) if split == "vocabulary" else torch.cat(results, -1)
    assert torch.equal(together, whole(ids))
    want = Columns if split == "hidden" else PadRows if rows % ranks else Rows
    assert isinstance(recipes[-1], want)
    # With the collective given, one rank's module gives the whole.
    parts[0].combine = lambda partial, how: together
    assert torch.equal(parts[0](ids), whole(ids))


def test_rows_of_block_types_are_split_and_padded_by_rows() -> None:
    net = Net(lambda self, ids, positions: self.embed(ids))
    context = replace(FLOAT32, quant_of=lambda _: "q4_0", mapping=Mapping(tp_size=3, rank=2))
    assert parallelize_embedding.run(net, context).changed == 1
    recipe = nn.collect_recipes(net)["embed.weight"]
    assert recipe == PadRows(Rows(Source("embed.weight"), 22, 32), 11)


def test_one_rank_needs_no_split() -> None:
    model = create(zoo.llama())
    assert parallelize_embedding.run(model, FLOAT32).note == "not needed: one rank"
    assert isinstance(model.model.embed_tokens, nn.Embedding)


def test_a_tied_table_is_not_split() -> None:
    context = replace(FLOAT32, mapping=Mapping(tp_size=2))
    report = parallelize_embedding.run(create(zoo.gemma()), context)
    assert report.skipped == (("model.embed_tokens", "the head is tied to it and is not split yet"),)


def test_without_its_collective_a_part_never_passes_for_the_whole() -> None:
    _, parts, _ = rank_models(2, 50, 32)
    with pytest.raises(BuildError, match="needs their collectives"):
        parts[0](torch.zeros(1, dtype=torch.int32))


def test_ranks_that_do_not_exist_are_refused() -> None:
    for size, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ConfigError, match=re.escape(f"rank {rank} of tp_size {size} does not exist")):
            Mapping(tp_size=size, rank=rank)
    assert [list(Mapping(tp_size=2, rank=r).share(5)) for r in (0, 1)] == [[0, 1, 2], [3, 4, 5]]


# ---- unfuse_qkv_gemm ----

UNFUSE = replace(FLOAT32, modes={"unfuse_qkv_gemm": "force"})


@pytest.mark.parametrize("make", [zoo.phi3, zoo.gpt2], ids=["phi3", "gpt2"])
def test_forced_packed_projections_come_apart(make: Any) -> None:
    hf = make()
    plain, model = load_ours(hf), create(hf)
    reports = by_name(run_model_passes(PASSES, model, UNFUSE))
    assert reports["unfuse_qkv_gemm"].changed == model.num_layers
    assert reports["fuse_qkv"].note == "unfuse_qkv_gemm is forced"
    names = list(nn.collect_recipes(model))
    assert not any("qkv_proj" in name for name in names)
    assert sum("v_proj.weight" in name for name in names) == model.num_layers
    nn.load_weights(model, read_from(hf.state_dict()))
    assert relative_error(logits(model), logits(plain)) < 1e-6


def test_what_nobody_wants_apart_stays_packed() -> None:
    report = unfuse_qkv_gemm.run(create(zoo.phi3()), FLOAT32)
    assert (report.matched, report.changed) == (0, 0)


def test_parts_of_different_types_come_apart_by_themselves() -> None:
    model = create(zoo.phi3(num_hidden_layers=1))
    attention = model.model.layers[0].self_attn
    stack = Concat(tuple(Source(f"{p}.weight") for p in "qkv"))
    attention.qkv_proj.given_recipes = {"weight": stack}
    context = replace(FLOAT32, quant_of=lambda r: "q6_k" if r == Source("v.weight") else "q4_k")
    reports = by_name(run_model_passes(PASSES, model, context))
    assert reports["unfuse_qkv_gemm"].changed == 1
    (skipped,) = reports["fuse_qkv"].skipped
    assert skipped[1] == "weight types differ: q_proj q4_k, k_proj q4_k, v_proj q6_k"
    recipes = nn.collect_recipes(model)
    assert recipes["model.layers.0.self_attn.v_proj.weight"] == Source("v.weight")


def test_forcing_it_on_a_model_without_packed_projections_fails() -> None:
    with pytest.raises(ConfigError, match="unfuse_qkv_gemm=force: nothing in this model fits"):
        run_model_passes(PASSES, create(zoo.llama()), UNFUSE)
