"""Tracing: the graph computes what the model computes, at any size, and names what it holds."""

from __future__ import annotations

import pytest
import torch

from pelton import nn
from pelton.builder.trace import trace
from pelton.ir.graph import Graph, input_key
from pelton.ir.verifier import effects
from tests.ir.graph_forward import graph_forward
from tests.models import zoo
from tests.models.oracle import load_ours
from tests.models.paged import PagedRunner


@pytest.fixture(scope="module")
def model() -> nn.CausalLM:
    return load_ours(zoo.llama(num_hidden_layers=2, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def graph(model: nn.CausalLM) -> Graph:
    return trace(model, max_seq_len=64, block_size=4)


@pytest.mark.parametrize("lengths", [(1,), (2,), (2, 2), (1, 1), (5, 1, 3), (96, 1, 1, 1)], ids=str)
def test_traced_logits_equal_eager_bit_for_bit_at_any_size(
    model: nn.CausalLM, graph: Graph, lengths: tuple[int, ...]
) -> None:
    eager = PagedRunner(model, max_seq_len=100)
    traced = PagedRunner(model, max_seq_len=100, forward=graph_forward(graph, model))
    prefill = [(i, [(7 * i + j) % 61 for j in range(n)]) for i, n in enumerate(lengths)]
    decode = [(i, [i + 1]) for i in range(len(lengths))]
    for step in (prefill, decode, decode):
        want, got = eager.step(step), traced.step(step)
        for sequence in want:
            assert torch.equal(got[sequence], want[sequence])


def test_traced_graph_takes_one_row_of_logits(model: nn.CausalLM, graph: Graph) -> None:
    runner = PagedRunner(model)
    arguments = runner.arguments([(0, [1, 2, 3]), (1, [4])], rows=[2])
    assert graph_forward(graph, model)(*arguments).shape == (1, 61)


def test_dimensions_are_named_and_inputs_described(model: nn.CausalLM, graph: Graph) -> None:
    keys = {input_key(i): graph.type_of(n) for n in graph.nodes if (i := graph.inputs.get(n.name))}
    assert keys["input_ids"].shape == ("T",)
    assert keys["cu_seqlens"].shape == ("B+1",)
    assert keys["seq_lens"].shape == ("B",)
    assert keys["block_table.0"].shape == ("B", 16)
    assert keys["logits_indices"].shape == ("N",)
    assert keys["k_cache.1"].shape == ("P0", 2, 4, 8)
    assert graph.type_of(graph.logits).shape == ("N", 61)
    assert set(graph.weights()) == set(dict(model.named_parameters()))
    assert "lm_head.weight" not in graph.weights()
    torch.testing.assert_close(graph.constants["model.rotary_emb.inv_freq"], model.model.rotary_emb.inv_freq)


def test_kv_writes_are_effects_in_layer_order(graph: Graph) -> None:
    assert effects(graph) == [(0, 0), (1, 0)]
    assert [n.name for n in graph.calls if graph.is_effect(n)] == ["kv_write", "kv_write_1"]
    caches = {n.name: i for n in graph.nodes if (i := graph.inputs.get(n.name)) and i.kind == "k_cache"}
    assert [(i.layer, i.group) for i in caches.values()] == [(0, 0), (1, 0)]


def test_tracing_needs_no_weights(model: nn.CausalLM, graph: Graph) -> None:
    with torch.device("meta"):
        bare = type(model)(model.config)
    fresh = trace(bare, max_seq_len=64, block_size=4)
    assert [str(n.target) for n in fresh.calls] == [str(n.target) for n in graph.calls]
