"""Factors and norm weights that go into the weights beside them, and where that would lose something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton import nn
from pelton.builder.trace import trace
from pelton.ir.graph import argument, op_name
from pelton.ir.printer import recipe_text
from pelton.ir.recipe import Full, Scale, ScaleColumns, Source
from pelton.nn import functional as F
from pelton.passes import PASSES, PassContext, cse, fold_norm_weight, fold_scaling, run_graph_passes
from tests.ir.graph_forward import graph_forward
from tests.models import zoo
from tests.models.oracle import load_ours, read_from, relative_error, texts
from tests.models.paged import PagedRunner, run_packed
from tests.passes.support import FLOAT32, Net, check_same, create, logits, ops, traced


def stored_as(quant: str) -> PassContext:
    return PassContext(
        quant_of=lambda recipe: "float32" if "norm" in recipe_text(recipe) else quant,
        stored_quant=lambda recipe, dimensions: quant if dimensions > 1 else "float32",
    )


BFLOAT16, Q4_1 = stored_as("bfloat16"), stored_as("q4_1")


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(32, 32, **options)


def scaled_rows(factor: float) -> Net:
    return Net(lambda self, ids, positions: self.embed(ids) * factor)


# ---- fold_scaling ----


@pytest.mark.parametrize("factor", [1.7, 4.0])
def test_a_factor_of_the_embedding_goes_into_its_rows(factor: float) -> None:
    net = scaled_rows(factor)
    graph = traced(net)
    assert fold_scaling.run(graph, FLOAT32).changed == 1
    assert graph.recipes["embed.weight"] == Scale(Source("embed.weight"), factor)
    assert ops(graph) == ["embedding", "take_rows"]
    check_same(net, graph, tolerance=0.0 if factor == 4.0 else 1e-6)


def test_a_narrow_weight_takes_powers_of_two_alone() -> None:
    assert fold_scaling.run(traced(scaled_rows(4.0)), BFLOAT16).changed == 1
    refused = fold_scaling.run(traced(scaled_rows(1.7)), BFLOAT16)
    why = "embed.weight is stored as bfloat16, where a product with 1.7 would be rounded"
    assert refused.skipped == (("mul", why),)
    assert fold_scaling.run(traced(scaled_rows(4.0)), Q4_1).skipped == (
        ("mul", "embed.weight is stored as q4_1 blocks"),
    )


def test_a_tied_table_is_not_scaled() -> None:
    graph = trace(create(zoo.gemma()), max_seq_len=64, block_size=4)
    report = fold_scaling.run(graph, FLOAT32)
    assert report.skipped == (("mul", "model.embed_tokens.weight is read elsewhere too"),)


def test_an_untied_one_is() -> None:
    """Gemma's embedding scale, with a head of its own."""
    hf = zoo.gemma(tie_word_embeddings=False)
    model = load_ours(hf)
    graph = trace(model, max_seq_len=64, block_size=4)
    assert fold_scaling.run(graph, FLOAT32).changed == 1
    graph.module.recompile()
    forward = graph_forward(graph, model, read_from(hf.state_dict()))
    got = torch.cat(run_packed(PagedRunner(model, forward=forward), texts((14, 9))))
    assert relative_error(got, logits(model)) < 1e-5


def test_the_bias_of_a_scaled_product_is_scaled_with_it() -> None:
    net = Net(lambda self, ids, positions: self.a(self.embed(ids)) * 0.3, a=linear(bias=True))
    graph = traced(net)
    assert fold_scaling.run(graph, FLOAT32).changed == 1
    assert graph.recipes["a.bias"] == Scale(Source("a.bias"), 0.3)
    check_same(net, graph, tolerance=1e-6)


def test_factors_before_a_product_leave_its_bias() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        return self.a(F.softcap(self.embed(ids), 3.0) * 0.3)

    net = Net(body, a=linear(bias=True))
    graph = traced(net)
    assert fold_scaling.run(graph, FLOAT32).changed == 1
    assert graph.recipes["a.bias"] == Source("a.bias")
    assert graph.recipes["a.weight"] == Scale(Source("a.weight"), 0.3)
    check_same(net, graph, tolerance=1e-6)


def test_a_factor_that_others_read_stays() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = F.softcap(self.embed(ids), 3.0) * 0.3
        return self.a(x_TD) + x_TD

    report = fold_scaling.run(traced(Net(body, a=linear())), FLOAT32)
    assert (report.changed, report.skipped) == (0, (("linear", "mul is read elsewhere too"),))


def test_the_factor_of_logits_goes_into_the_norm_where_the_head_is_quantised() -> None:
    """Granite's logits_scaling before a quantised or tied head: norm weights are float32 always."""

    def body(self: Any, ids: Any, positions: Any) -> Any:
        return self.head(self.norm(self.embed(ids))) * 0.3

    net = Net(body, norm=nn.RMSNorm(32, eps=1e-6), head=linear())
    graph = traced(net)
    assert fold_scaling.run(graph, Q4_1).changed == 1
    assert graph.recipes["norm.weight"] == Scale(Source("norm.weight"), 0.3)
    assert graph.recipes["head.weight"] == Source("head.weight")
    check_same(net, graph, tolerance=1e-6)


def test_a_factor_of_queries_goes_into_the_scale_of_attention() -> None:
    hf = zoo.llama(num_hidden_layers=1)
    model = load_ours(hf)
    graph = trace(model, max_seq_len=64, block_size=4)
    attention = next(n for n in graph.calls if op_name(n) == "paged_attention")
    query = attention.args[0]
    with graph.fx_graph.inserting_before(attention):
        scaled = graph.fx_graph.call_function(torch.ops.aten.mul.Tensor, (query, 0.5))
    scaled.meta = dict(query.meta)  # type: ignore[union-attr]
    attention.update_arg(0, scaled)
    graph.module.recompile()
    want, scale = logits(model, graph), argument(attention, "scale")
    assert fold_scaling.run(graph, FLOAT32).changed == 1
    graph.module.recompile()
    assert argument(attention, "scale") == scale * 0.5
    assert relative_error(logits(model, graph), want) < 1e-6


# ---- fold_norm_weight ----


def side_by_side(norms: Any) -> Net:
    """Attention and MLP of one layer that read their own norm of the same tensor."""

    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = self.embed(ids)
        return self.a(self.norm_a(x_TD)) + self.b(self.norm_b(x_TD))

    return Net(body, norm_a=norms(), norm_b=norms(), a=linear(bias=True), b=linear())


def rms(**options: Any) -> nn.RMSNorm:
    return nn.RMSNorm(32, eps=1e-6, **options)


@pytest.mark.parametrize("norms", [rms, lambda: nn.LayerNorm(32, eps=1e-5)], ids=["rms_norm", "layer_norm"])
def test_two_norms_of_one_tensor_become_one(norms: Any) -> None:
    net = side_by_side(norms)
    graph = traced(net)
    assert fold_norm_weight.run(graph, net.context()).changed == 2
    assert graph.recipes["norm_a.weight"] == Full(32, 1.0)
    assert graph.recipes["a.weight"] == ScaleColumns(Source("a.weight"), Source("norm_a.weight"))
    check_same(net, graph, tolerance=2e-6)
    cse.run(graph, FLOAT32)
    assert [op for op in ops(graph) if "norm" in op] == ["rms_norm" if norms is rms else "layer_norm"]
    check_same(net, graph, tolerance=2e-6)


def test_the_offset_that_a_checkpoint_leaves_out_is_folded_too() -> None:
    net = side_by_side(lambda: rms(stored_offset=1.0))
    graph = traced(net)
    assert fold_norm_weight.run(graph, net.context()).changed == 2
    graph.module.recompile()
    weights = nn.collect_recipes(net)["norm_a.weight"]
    assert graph.recipes["a.weight"] == ScaleColumns(Source("a.weight"), weights)


def test_nothing_is_folded_where_nothing_would_be_saved() -> None:
    graph = trace(create(zoo.llama()), max_seq_len=64, block_size=4)
    assert fold_norm_weight.run(graph, FLOAT32).matched == 0


def test_forced_it_folds_every_norm() -> None:
    hf = zoo.llama()
    model, read = load_ours(hf), read_from(hf.state_dict())
    context = PassContext(quant_of=lambda _: "float32", modes={"fold_norm_weight": "force"})
    graph = trace(model, max_seq_len=64, block_size=4)
    reports = run_graph_passes(PASSES, graph, context)
    assert next(r.changed for r in reports if r.name == "fold_norm_weight") == 7
    forward = graph_forward(graph, model, read)
    got = torch.cat(run_packed(PagedRunner(model, forward=forward), texts((14, 9))))
    assert relative_error(got, logits(model)) < 1e-5


@pytest.mark.parametrize(
    ("make", "context", "why"),
    [
        (zoo.llama, BFLOAT16, "products have weights stored as bfloat16, which would be rounded"),
        (zoo.llama, Q4_1, "products have weights stored as q4_1 blocks"),
        (lambda: zoo.llama(tie_word_embeddings=True), FLOAT32, "embed_tokens.weight is read elsewhere too"),
    ],
    ids=["narrow", "blocks", "tied"],
)
def test_where_a_fold_would_lose_something_it_is_refused(make: Any, context: PassContext, why: str) -> None:
    graph = trace(create(make()), max_seq_len=64, block_size=4)
    report = fold_norm_weight.run(graph, replace(context, modes={"fold_norm_weight": "force"}))
    where, said = report.skipped[-1]
    assert where == "model.norm"
    assert said.endswith(why)


def test_a_norm_that_is_not_read_by_products_alone_is_left() -> None:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = self.embed(ids)
        y_TD = self.norm_a(x_TD)
        return self.a(y_TD) + y_TD + self.a2(self.norm_b(x_TD))

    graph = traced(Net(body, norm_a=rms(), norm_b=rms(), a=linear(), a2=linear()))
    report = fold_norm_weight.run(graph, FLOAT32)
    assert report.skipped == (("norm_a", "it is read by aten.add.Tensor, not by products alone"),)
    assert report.changed == 1
