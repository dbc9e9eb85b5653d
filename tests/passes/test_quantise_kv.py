"""The pass that gives caches of 8 bits their scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pelton.builder.trace import trace
from pelton.ir.graph import Graph, argument, op_name
from pelton.ir.verifier import effects, verify
from pelton.passes import quantise_kv, rope_kv_write, rope_paged_attention
from tests.ir.graph_forward import graph_forward
from tests.models import zoo
from tests.models.oracle import load_ours, relative_error, texts
from tests.models.paged import PagedRunner, run_packed
from tests.models.sink_model import sink_model
from tests.passes.support import FLOAT32, ops

ARCHITECTURES = {"llama": zoo.llama, "qwen3": zoo.qwen3, "gemma2": zoo.gemma2, "gpt2": zoo.gpt2}


def measured(model: Any, largest: float) -> dict[int, tuple[list[float], list[float]]]:
    """Scales that tell layers, heads, K and V apart: the ranges of a run in float32."""
    runner = PagedRunner(model)
    run_packed(runner, texts((14, 9)))
    return {
        layer: tuple(  # type: ignore[misc]
            (cache.nan_to_num(0.0).abs().amax((0, 2, 3)) / largest).tolist() for cache in caches
        )
        for layer, caches in enumerate(zip(runner.k_caches, runner.v_caches, strict=True))
    }


def rounding(model: Any) -> dict[int, Any]:
    g = torch.Generator().manual_seed(0)
    return {
        layer: tuple(
            3 * torch.randn(kv.num_kv_heads, n * kv.head_dim, generator=g).abs().numpy() for n in (1, 2)
        )
        for layer, kv in enumerate(model.layer_kv())
    }


def run(model: Any, graph: Graph, kv_dtype: torch.dtype) -> torch.Tensor:
    runner = PagedRunner(model, forward=graph_forward(graph, model), kv_dtype=kv_dtype)
    return torch.cat(run_packed(runner, texts((14, 9))))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "largest", "bound"), [("int8", 127.0, 0.05), ("float8_e4m3fn", 448.0, 0.1)]
)
def test_logits_with_scaled_codes_are_near_the_exact_ones(
    architecture: str, dtype: str, largest: float, bound: float
) -> None:
    model = load_ours(ARCHITECTURES[architecture]())
    want = torch.cat(run_packed(PagedRunner(model), texts((14, 9))))
    graph = trace(model, max_seq_len=64, block_size=4, kv_dtype=dtype)
    writes = len(effects(graph))
    context = replace(FLOAT32, kv_scales=measured(model, largest))
    report = quantise_kv.run(graph, context)
    verify(graph)
    graph.module.recompile()
    assert report.changed == 2 * writes
    got = run(model, graph, getattr(torch, dtype))
    assert 0 < relative_error(got, want) < bound


def test_fused_ops_take_the_scales_along() -> None:
    model = load_ours(zoo.qwen3())
    graph = trace(model, max_seq_len=64, block_size=4, kv_dtype="int8")
    context = replace(FLOAT32, kv_scales=measured(model, 127.0), key_rounding=rounding(model))
    quantise_kv.run(graph, context)
    graph.module.recompile()
    want = run(model, graph, torch.int8)
    for fuse in (rope_kv_write, rope_paged_attention):
        assert fuse.run(graph, FLOAT32).changed
        verify(graph)
        graph.module.recompile()
        assert torch.equal(run(model, graph, torch.int8), want)
    (first, *_) = (n for n in graph.calls if op_name(n) == "rope_paged_attention")
    assert graph.input_of(argument(first, "v_scale")).name == "v_scale.0"
    assert graph.input_of(argument(first, "k_shift")).name == "k_shift.0"
    assert graph.input_of(argument(first, "k_queries")).name == "k_queries.0"


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_keys_less_a_vector_give_the_same_logits(architecture: str) -> None:
    """In a cache that rounds nothing the shift alone is left."""
    model = load_ours(ARCHITECTURES[architecture]())
    want = torch.cat(run_packed(PagedRunner(model), texts((14, 9))))
    graph = trace(model, max_seq_len=64, block_size=4)
    ones = {i: ([1.0] * kv.num_kv_heads,) * 2 for i, kv in enumerate(model.layer_kv())}
    context = replace(FLOAT32, kv_scales=ones, key_rounding=rounding(model))
    assert quantise_kv.run(graph, context).changed
    graph.module.recompile()
    assert relative_error(run(model, graph, torch.float32), want) < 1e-5


@pytest.mark.parametrize("make", [sink_model, lambda: load_ours(zoo.gemma2())], ids=["sinks", "capped"])
def test_keys_are_stored_as_they_are_where_softmax_would_see_a_vector_less(make: Any) -> None:
    model = make()
    want = torch.cat(run_packed(PagedRunner(model), texts((14, 9))))
    graph = trace(model, max_seq_len=64, block_size=4)
    ones = {i: ([1.0] * kv.num_kv_heads,) * 2 for i, kv in enumerate(model.layer_kv())}
    report = quantise_kv.run(graph, replace(FLOAT32, kv_scales=ones, key_rounding=rounding(model)))
    assert report.changed
    assert "would see a shift" in report.note
    writes = [n for n in graph.calls if op_name(n) == "kv_write"]
    assert all(argument(n, "k_scale") is not None and argument(n, "k_shift") is None for n in writes)
    graph.module.recompile()
    assert relative_error(run(model, graph, torch.float32), want) < 1e-5


def test_fused_ops_take_sinks_along() -> None:
    model = sink_model()
    graph = trace(model, max_seq_len=64, block_size=4, kv_dtype="int8")
    quantise_kv.run(graph, replace(FLOAT32, kv_scales=measured(model, 127.0)))
    graph.module.recompile()
    want = run(model, graph, torch.int8)
    for fuse in (rope_kv_write, rope_paged_attention):
        assert fuse.run(graph, FLOAT32).changed
        verify(graph)
        graph.module.recompile()
        assert torch.equal(run(model, graph, torch.int8), want)
    fused = [n for n in graph.calls if op_name(n) == "rope_paged_attention"]
    names = [graph.input_of(argument(n, "sinks")).name for n in fused]
    assert names == [f"model.layers.{i}.self_attn.sinks" for i in range(2)]


def test_caches_without_scales_are_left_alone() -> None:
    graph = trace(load_ours(zoo.llama()), max_seq_len=64, block_size=4)
    before = ops(graph)
    report = quantise_kv.run(graph, FLOAT32)
    assert (report.matched, report.changed) == (0, 0)
    assert "no scales" in report.note
    assert ops(graph) == before
