"""The pass that makes a layer's rotation, KV write and attention one op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from pelton.builder.trace import trace
from pelton.ir.graph import Graph, argument, op_name
from pelton.ir.verifier import effects
from pelton.kernels.tactic import NodeSpec
from pelton.passes import (
    PASSES,
    Mode,
    PassContext,
    rope_kv_write,
    rope_paged_attention,
    run_graph_passes,
)
from tests.models import zoo
from tests.models.oracle import load_ours
from tests.passes.support import FLOAT32, create, logits, ops


def graph_of(make: Any) -> Graph:
    graph = trace(create(make()), max_seq_len=64, block_size=4)
    rope_kv_write.run(graph, FLOAT32)
    return graph


@pytest.fixture
def graph() -> Graph:
    return graph_of(zoo.llama)


def node_of(graph: Graph, op: str) -> fx.Node:
    return next(n for n in graph.calls if op_name(n) == op)


@pytest.mark.parametrize("make", [zoo.llama, zoo.qwen3, zoo.gemma2], ids=["llama", "qwen3", "gemma2"])
def test_a_fused_layer_gives_the_same_bits(make: Any) -> None:
    """With norms of heads, windows and soft-caps too."""
    model = load_ours(make())
    graph = trace(model, max_seq_len=64, block_size=4)
    rope_kv_write.run(graph, FLOAT32)
    want, writes = logits(model, graph), effects(graph)
    report = rope_paged_attention.run(graph, FLOAT32)
    graph.module.recompile()
    assert report.matched == report.changed == len(writes)
    assert not {"rope_kv_write", "paged_attention"} & set(ops(graph))
    assert effects(graph) == writes
    assert torch.equal(logits(model, graph), want)


def test_every_argument_finds_its_place() -> None:
    graph = graph_of(zoo.gemma2)
    write, attention = node_of(graph, "rope_kv_write"), node_of(graph, "paged_attention")
    wanted = {
        p: argument(write, p) for p in ("q", "k", "v", "cos_sin", "k_cache", "slot_mapping", "q_weight")
    }
    wanted |= {p: argument(attention, p) for p in ("block_table", "seq_lens", "scale", "window", "softcap")}
    rope_paged_attention.run(graph, FLOAT32)
    fused = node_of(graph, "rope_paged_attention")
    assert {name: argument(fused, name) for name in wanted} == wanted
    assert wanted["softcap"] > 0


def test_targets_without_the_kernel_keep_their_ops(graph: Graph) -> None:
    def has_tactic(spec: NodeSpec) -> bool:
        return spec.op != "rope_paged_attention"

    context = PassContext(quant_of=lambda _: "float32", has_tactic=has_tactic)
    report = rope_paged_attention.run(graph, context)
    assert (report.matched, report.changed) == (3, 0)
    assert report.skipped[0][1] == "the target has no kernel for rope_paged_attention of these types"


def test_the_kernel_is_asked_for_with_caches_and_numbers(graph: Graph) -> None:
    asked: list[NodeSpec] = []

    def has_tactic(spec: NodeSpec) -> bool:
        asked.append(spec)
        return True

    rope_paged_attention.run(graph, PassContext(quant_of=lambda _: "float32", has_tactic=has_tactic))
    assert {spec.op for spec in asked} == {"rope_paged_attention"}
    k_cache = asked[0].inputs[4]
    assert k_cache is not None
    assert k_cache.shape == ("P0", 2, 4, 8)
    assert asked[0].attrs["window"] == 0


def test_a_rotated_q_that_is_read_elsewhere_stays(graph: Graph) -> None:
    write = node_of(graph, "rope_kv_write")
    graph.insert_call("softcap", (write, 3.0), like=write, before=write.next)
    report = rope_paged_attention.run(graph, FLOAT32)
    assert report.skipped == (("rope_kv_write", "the rotated q has 2 readers, not one"),)
    assert report.changed == 2


def test_attention_to_another_layers_cache_stays(graph: Graph) -> None:
    attention = node_of(graph, "paged_attention")
    other = [n for n in graph.calls if op_name(n) == "rope_kv_write"][1]
    args = list(attention.args)
    args[2] = argument(other, "v_cache")
    attention.args = tuple(args)
    report = rope_paged_attention.run(graph, FLOAT32)
    assert report.skipped == (("rope_kv_write", "the attention op has another cache"),)


def test_a_write_and_an_attention_of_other_scales_stay(graph: Graph) -> None:
    """Both are given those of their layer: what has others is not a layer as this pass knows it."""
    attention = node_of(graph, "paged_attention")
    scale = graph.insert_constant("other", torch.ones(2))
    attention.args = (*attention.args[:6], argument(attention, "scale"), 0, 0.0, scale, scale)
    report = rope_paged_attention.run(graph, FLOAT32)
    assert report.skipped == (("rope_kv_write", "the attention op has other scales"),)


def test_a_cache_that_is_written_twice_before_it_is_read_stays(graph: Graph) -> None:
    write, attention = node_of(graph, "rope_kv_write"), node_of(graph, "paged_attention")
    again = (*write.args[1:3], *write.args[4:7])
    graph.insert_call("kv_write", again, like=write, before=attention)
    report = rope_paged_attention.run(graph, FLOAT32)
    assert report.skipped == (("rope_kv_write", "the cache is written again before it is read"),)


def test_a_rotated_q_that_no_attention_reads_stays(graph: Graph) -> None:
    write, attention = node_of(graph, "rope_kv_write"), node_of(graph, "paged_attention")
    capped = graph.insert_call("softcap", (write, 3.0), like=write, before=attention)
    attention.args = (capped, *attention.args[1:])
    report = rope_paged_attention.run(graph, FLOAT32)
    assert report.skipped == (("rope_kv_write", "the rotated q is not read by an attention op"),)


@pytest.mark.parametrize("mode", ["off", "force"])
def test_it_is_a_choice_of_its_own(graph: Graph, mode: Mode) -> None:
    context = PassContext(quant_of=lambda _: "float32", modes={"rope_paged_attention": mode})
    run_graph_passes(PASSES, graph, context)
    assert ("rope_paged_attention" in ops(graph)) == (mode == "force")
    assert ("rope_kv_write" in ops(graph)) == (mode == "off")
