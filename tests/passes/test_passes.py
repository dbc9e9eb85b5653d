"""Passes change how logits are computed, never what they are, and say what they left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from pelton import nn
from pelton.builder.trace import trace
from pelton.errors import BuildError
from pelton.ir.evaluate import evaluate
from pelton.ir.graph import Graph, op_name
from pelton.ir.recipe import Concat, Recipe, Source
from pelton.ir.verifier import effects, verify
from pelton.passes import (
    PASSES,
    PassContext,
    PassReport,
    add_rms_norm,
    dead_code,
    early_take_rows,
    fuse_gate_mlp,
    fuse_qkv,
    rope_kv_write,
    run_graph_passes,
    run_model_passes,
)
from tests.ir.graph_forward import graph_forward
from tests.models import zoo
from tests.models.oracle import load_ours, read_from, relative_error, texts
from tests.models.paged import PagedRunner, run_packed
from tests.passes.support import (
    FLOAT32,
    Net,
    as_pass,
    by_name,
    check_same,
    create,
    logits,
    ops,
    traced,
)


@pytest.mark.parametrize("architecture", zoo.ZOO)
def test_graph_passes_keep_logits_bit_for_bit(architecture: str) -> None:
    model = load_ours(zoo.ZOO[architecture]())
    want = logits(model)
    graph = trace(model, max_seq_len=64, block_size=4)
    writes = effects(graph)
    rounding = [p.name for p in PASSES if p.kind == "graph" and p.bound != "bit for bit"]
    run_graph_passes(PASSES, graph, replace(FLOAT32, modes=dict.fromkeys(rounding, "off")))
    assert effects(graph) == writes
    assert torch.equal(logits(model, graph), want)


@pytest.mark.parametrize("architecture", zoo.ZOO)
def test_all_passes_together_keep_logits_to_rounding(architecture: str) -> None:
    """Model passes, trace, graph passes, then weights by the recipes that are left: as a build does."""
    hf = zoo.ZOO[architecture]()
    plain, fused, read = load_ours(hf), create(hf), read_from(hf.state_dict())
    context = replace(FLOAT32, read=lambda recipe: evaluate(recipe, read))
    run_model_passes(PASSES, fused, context)
    graph = trace(fused, max_seq_len=64, block_size=4)
    run_graph_passes(PASSES, graph, context)
    got = torch.cat(run_packed(PagedRunner(fused, forward=graph_forward(graph, fused, read)), texts((14, 9))))
    assert relative_error(got, logits(plain)) < 1e-5


@pytest.mark.parametrize("architecture", zoo.ZOO)
def test_model_passes_keep_logits_and_read_the_same_checkpoint(architecture: str) -> None:
    """Fused before loading, as the build does: only recipes say how the weights come about."""
    hf = zoo.ZOO[architecture]()
    plain, fused = load_ours(hf), create(hf)
    sources = sorted(s for r in nn.collect_recipes(fused).values() for s in r.sources())
    run_model_passes(PASSES, fused, FLOAT32)
    assert sorted(s for r in nn.collect_recipes(fused).values() for s in r.sources()) == sources
    nn.load_weights(fused, read_from(hf.state_dict()))
    assert relative_error(logits(fused), logits(plain)) < 1e-6


@pytest.fixture
def llama_graph() -> Graph:
    return trace(create(zoo.llama()), max_seq_len=64, block_size=4)


def test_what_is_left_of_a_llama_layer() -> None:
    model = create(zoo.llama(num_hidden_layers=1))
    model_reports = by_name(run_model_passes(PASSES, model, FLOAT32))
    graph = trace(model, max_seq_len=64, block_size=4)
    reports = by_name(run_graph_passes(PASSES, graph, FLOAT32))
    assert (model_reports["fuse_qkv"].changed, model_reports["fuse_gate_mlp"].changed) == (1, 1)
    assert [op for op in ops(graph) if "aten" not in op and op != "getitem"] == [
        "embedding",
        "rope_cos_sin",
        "rms_norm",
        "linear",
        "rope_paged_attention",
        "take_rows",
        "linear",
        "take_rows",
        "add_rms_norm",
        "linear_gated",
        "linear",
        "add_rms_norm",
        "linear",
    ]
    assert (reports["add_rms_norm"].changed, reports["rope_kv_write"].changed) == (2, 1)


def test_fused_q_k_and_v_are_views_of_one_tensor() -> None:
    model = create(zoo.llama())
    run_model_passes(PASSES, model, FLOAT32)
    assert isinstance(nn.collect_recipes(model)["model.layers.0.self_attn.qkv_proj.weight"], Concat)
    graph = trace(model, max_seq_len=64, block_size=4)
    run_graph_passes(PASSES, graph, FLOAT32)
    fused = next(n for n in graph.calls if op_name(n) == "rope_paged_attention")
    q, k, v = (graph.type_of(n) for n in fused.args[:3])  # type: ignore[arg-type]
    assert (q.shape, k.shape, v.shape) == (("T", 4, 8), ("T", 2, 8), ("T", 2, 8))
    assert {t.strides for t in (q, k, v)} == {(64, 8, 1)}
    assert [t.offset for t in (q, k, v)] == [0, 32, 48]


@pytest.mark.parametrize(
    ("run", "odd", "where", "why"),
    [
        (fuse_qkv.run, "v_proj", "self_attn", "weight types differ: q_proj q4_k, k_proj q4_k, v_proj q6_k"),
        (fuse_gate_mlp.run, "up_proj", "mlp", "weight types differ: gate_proj q4_k, up_proj q6_k"),
    ],
)
def test_projections_of_different_types_stay_apart(
    run: Callable[..., PassReport], odd: str, where: str, why: str
) -> None:
    def quant_of(recipe: Recipe) -> str:
        return "q6_k" if recipe == Source(f"model.layers.1.{where}.{odd}.weight") else "q4_k"

    model = create(zoo.llama())
    report = run(model, PassContext(quant_of=quant_of))
    assert (report.matched, report.changed) == (3, 2)
    assert report.skipped == ((f"model.layers.1.{where}", why),)
    assert f"model.layers.1.{where}.{odd}.weight" in nn.collect_recipes(model)


def test_a_part_without_bias_stays_apart() -> None:
    model = create(zoo.qwen2(num_hidden_layers=1))
    model.model.layers[0].self_attn.v_proj.bias = None
    report = fuse_qkv.run(model, FLOAT32)
    assert report.skipped == (
        ("model.layers.0.self_attn", "only some of q_proj, k_proj, v_proj have a bias"),
    )


@pytest.mark.parametrize("make", [zoo.phi3, zoo.gpt2], ids=["phi3", "gpt2"])
def test_packed_checkpoints_are_left_as_they_are(make: Callable[..., Any]) -> None:
    report = fuse_qkv.run(create(make()), FLOAT32)
    assert report.changed == 0
    assert {why for _, why in report.skipped} == {"qkv_proj is packed in the checkpoint"}


def test_gate_packed_in_the_checkpoint_is_left_as_it_is() -> None:
    report = fuse_gate_mlp.run(create(zoo.phi3()), FLOAT32)
    assert (report.changed, len(report.skipped)) == (0, 3)
    assert report.skipped[0] == ("model.layers.0.mlp", "gate_up_proj is packed in the checkpoint")


def test_head_norms_are_folded_into_the_rotation() -> None:
    for make in (zoo.qwen3, zoo.gemma3):
        graph = trace(create(make()), max_seq_len=64, block_size=4)
        before = ops(graph).count("rms_norm")
        rope_kv_write.run(graph, FLOAT32)
        assert ops(graph).count("rms_norm") == before - 6
        fused = next(n for n in graph.calls if op_name(n) == "rope_kv_write")
        assert fused.args[7] is graph.weights()["model.layers.0.self_attn.q_norm.weight"]
        assert fused.args[9] == 1e-6


def test_keys_that_are_not_rotated_are_left_alone() -> None:
    graph = trace(create(zoo.gpt2()), max_seq_len=64, block_size=4)
    report = rope_kv_write.run(graph, FLOAT32)
    assert (report.matched, report.changed) == (2, 0)
    assert report.skipped[0] == ("kv_write", "k is not rotated")


def test_rotations_by_different_tables_are_left_alone(llama_graph: Graph) -> None:
    table = next(n for n in llama_graph.calls if op_name(n) == "rope_cos_sin")
    q_rope = next(n for n in llama_graph.calls if op_name(n) == "rope")
    with llama_graph.fx_graph.inserting_before(q_rope):
        other = llama_graph.fx_graph.node_copy(table, lambda n: n)
    q_rope.args = (q_rope.args[0], other)
    report = rope_kv_write.run(llama_graph, FLOAT32)
    assert report.skipped == (("kv_write", "q and k are rotated by different tables"),)
    assert report.changed == 2


def test_rotated_keys_that_are_read_elsewhere_are_left_alone(llama_graph: Graph) -> None:
    k_rope = next(n for n in llama_graph.calls if op_name(n) == "kv_write").args[0]
    assert isinstance(k_rope, fx.Node)
    llama_graph.insert_call("softcap", (k_rope, 3.0), like=k_rope, before=k_rope.next)
    report = rope_kv_write.run(llama_graph, FLOAT32)
    assert report.skipped == (("kv_write", "the rotated k is read elsewhere too"),)


def test_a_sum_that_is_normalised_twice_is_fused_once() -> None:
    class Twice(nn.CausalLM):
        vocab_size, hidden_size, num_layers, max_position_embeddings = 8, 8, 0, 64

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)
            self.a, self.b = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)

        def layer_kv(self) -> list[nn.LayerKV]:
            return []

        def forward(self, ids: Any, positions: Any, k: Any, v: Any, groups: Any, rows: Any) -> Any:
            total = self.embed(ids) + self.embed(positions)
            return nn.functional.take_rows(self.a(total) + self.b(total), rows)

    graph = trace(Twice(), max_seq_len=64)
    report = add_rms_norm.run(graph, FLOAT32)
    verify(graph)
    assert (report.matched, report.changed) == (2, 1)
    assert report.skipped == (("rms_norm_1", "getitem_1 is already fused with another norm"),)


def test_rows_are_taken_right_after_the_last_attention() -> None:
    model = load_ours(zoo.llama())
    graph = trace(model, max_seq_len=64, block_size=4)
    report = early_take_rows.run(graph, FLOAT32)
    graph.module.recompile()
    verify(graph)
    assert (report.matched, report.changed) == (1, 1)
    rows = {n.meta["where"]: graph.type_of(n).shape[0] for n in graph.calls if op_name(n) == "linear"}
    assert {w for w, first in rows.items() if first == "N"} == {
        "model.layers.2.self_attn.o_proj",
        *(f"model.layers.2.mlp.{p}_proj" for p in ("gate", "up", "down")),
        "lm_head",
    }
    arguments = PagedRunner(model).arguments([(0, [1, 2, 3]), (1, [4, 5])], rows=[2, 4])
    assert relative_error(graph_forward(graph, model)(*arguments), model(*arguments)) < 1e-6


def test_rows_that_other_readers_need_are_taken_late(llama_graph: Graph) -> None:
    """The last sum is read by one more KV write, which needs every row of it."""
    take = next(n for n in llama_graph.calls if op_name(n) == "take_rows")
    write = [n for n in llama_graph.calls if op_name(n) == "kv_write"][-1]
    with llama_graph.fx_graph.inserting_before(take):
        keys = llama_graph.fx_graph.call_function(torch.ops.aten.view.default, (take.args[0], [-1, 4, 8]))
    keys.meta = {"val": torch.ops.aten.view.default(take.args[0].meta["val"], [-1, 4, 8]), "where": ""}  # type: ignore[union-attr]
    llama_graph.insert_call("kv_write", (keys, keys, *write.args[2:]), like=write, before=take)
    report = early_take_rows.run(llama_graph, FLOAT32)
    assert report.skipped == (("take_rows", "add_5 is read elsewhere or is not row-wise"),)


def test_rows_are_taken_before_elementwise_ops_too() -> None:
    """However a gated MLP is spelled: a square, a number, a vector, each is of one row alone."""

    def body(self: Any, ids: Any, positions: Any) -> Any:
        x_TD = nn.functional.softcap(self.embed(ids), 3.0)
        gate = (self.a(x_TD).square() + 0.5) * self.b.bias
        return x_TD + gate * self.b(x_TD)

    net = Net(body, a=nn.Linear(32, 32), b=nn.Linear(32, 32, bias=True))
    graph = traced(net)
    assert {"unary", "binary", "binary_scalar"} <= set(ops(graph))
    assert early_take_rows.run(graph, FLOAT32).changed == 1
    rows = {op_name(n): graph.type_of(n).shape[0] for n in graph.calls}
    assert {op for op, first in rows.items() if first == "T"} == {"embedding"}
    check_same(net, graph)


def test_dead_code_keeps_effects_and_drops_the_weights_of_what_it_drops(llama_graph: Graph) -> None:
    """The last layer's attention is disconnected; its KV write must survive."""
    last = [n for n in llama_graph.calls if op_name(n) == "aten.add.Tensor"][-2]
    assert last.meta["where"] == "model.layers.2"
    last.replace_all_uses_with(last.args[0])
    before = effects(llama_graph)
    report = dead_code.run(llama_graph, FLOAT32)
    llama_graph.module.recompile()
    verify(llama_graph)
    assert effects(llama_graph) == before
    assert report.changed > 3
    weights = llama_graph.weights()
    assert "model.layers.2.self_attn.o_proj.weight" not in weights
    assert "model.layers.2.self_attn.k_proj.weight" in weights


def test_a_pass_that_loses_a_kv_write_is_caught(llama_graph: Graph) -> None:
    def careless(graph: Graph, context: PassContext) -> PassReport:
        graph.erase(next(n for n in graph.calls if op_name(n) == "kv_write"))
        return PassReport(name="careless", matched=1, changed=1)

    with pytest.raises(BuildError, match="the pass careless changed the order or number of KV writes"):
        run_graph_passes((as_pass(careless),), llama_graph, FLOAT32)


def test_a_pass_that_breaks_a_shape_is_caught(llama_graph: Graph) -> None:
    def careless(graph: Graph, context: PassContext) -> PassReport:
        linear = next(n for n in graph.calls if op_name(n) == "linear")
        linear.args = (linear.args[0], graph.weights()["model.embed_tokens.weight"])
        return PassReport(name="careless", matched=1, changed=1)

    message = r"graph node linear \(linear, in model\.layers\.0\.self_attn\.q_proj\) is recorded as .*'T', 32"
    with pytest.raises(BuildError, match=message):
        run_graph_passes((as_pass(careless),), llama_graph, FLOAT32)


def test_explain_shows_what_each_pass_changed(llama_graph: Graph) -> None:
    shown: list[str] = []
    run_graph_passes(PASSES, llama_graph, FLOAT32, explain=shown.append)
    assert [text.split("\n")[0] for text in shown] == [
        "early_take_rows",
        "fuse_products",
        "add_rms_norm",
        "rope_kv_write",
        "rope_paged_attention",
        "gemm_swiglu",
        "dead_code",
    ]
    assert "-kv_write = kv_write(rope_1, view_2, k_cache.0, v_cache.0, slot_mapping.0) -> ()" in shown[3]
    assert "+rope_kv_write = rope_kv_write(view, view_1, view_2, rope_cos_sin, k_cache.0" in shown[3]


def test_rows_of_one_of_several_results_are_taken_after_it() -> None:
    """The other part of the product is read as heads, so the split itself needs every row."""

    def body(self: Any, ids: Any, positions: Any) -> Any:
        a, b = self.wide(self.embed(ids)).split(32, dim=-1)
        heads = nn.functional.softcap(b.view(-1, 4, 8), 3.0).view(-1, 32)
        return nn.functional.softcap(a, 3.0) + heads

    net = Net(body, wide=nn.Linear(32, 64))
    graph = traced(net)
    assert early_take_rows.run(graph, FLOAT32).changed == 1
    shapes = [graph.type_of(n).shape[0] for n in graph.calls if op_name(n) == "softcap"]
    assert sorted(shapes) == ["N", "T"]
    check_same(net, graph)
