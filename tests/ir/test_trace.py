"""Tracing: the graph computes what the model computes, at any size, and names what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pelton import nn
from pelton.builder.calls import extract
from pelton.builder.trace import trace
from pelton.engine.plan import Plan
from pelton.errors import BuildError
from pelton.ir.graph import Graph, input_key
from pelton.ir.verifier import effects
from pelton.models.registry import create_model
from pelton.nn import functional as F
from pelton.passes import PASSES, PassContext, run_graph_passes, run_model_passes
from tests.builder.untimed import untimed_plan
from tests.ir.export_oracle import export
from tests.ir.graph_forward import graph_forward
from tests.models import zoo
from tests.models.oracle import hf_config_dict, load_ours
from tests.models.paged import PagedRunner
from tests.passes.support import FLOAT32


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


def plan_of(graph: Graph) -> Plan:
    """The plan of ``graph`` for float32 weights."""
    context = PassContext(quant_of=lambda _: "float32")
    run_graph_passes(PASSES, graph, context)
    return untimed_plan(extract(graph), {"T": 40, "B": 4, "N": 40})


@pytest.mark.parametrize("architecture", zoo.ZOO)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_the_plan_is_the_one_that_torch_export_gives(architecture: str, fused: bool) -> None:
    """Instructions, operands with their views, tactics, buffers and the arena's layout, names included."""
    model = create_model(hf_config_dict(zoo.ZOO[architecture]()), max_seq_len=64)
    if fused:
        run_model_passes(PASSES, model, FLOAT32)
    options: dict[str, Any] = {"max_seq_len": 64, "block_size": 4, "kv_dtype": "float16"}
    ours, theirs = plan_of(trace(model, **options)), plan_of(export(model, **options))
    assert len(ours.instructions) > 10
    assert ours == theirs


def sized(forward: Any) -> nn.CausalLM:
    """A model whose ``forward`` is ``forward(self, embedded (T, 8), ids, seq_lens_B, rows)``."""

    class Sized(nn.CausalLM):
        vocab_size, hidden_size, num_layers, max_position_embeddings = 8, 8, 1, 64

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)
            self.inner = nn.Linear(8, 8)
            self.loose = [torch.ones(8)]

        def layer_kv(self) -> list[nn.LayerKV]:
            return [nn.LayerKV(1, 8)]

        def forward(self, ids: Any, positions: Any, k: Any, v: Any, groups: Any, rows: Any) -> Any:
            x = forward(self, self.embed(ids), ids, groups[0].seq_lens_B)
            return F.take_rows(x, rows)

    return Sized()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda m, x, ids, lens: x if x.shape[0] > 5 else x + x, "calls .* at some sizes"),
        (
            lambda m, x, ids, lens: x if len(ids) == 1 else m.inner(x),
            "calls .* at some sizes",
        ),
        (lambda m, x, ids, lens: x if len(ids) % 2 else x + x, "calls .* at some sizes"),
        (
            lambda m, x, ids, lens: x if len(ids) > len(lens) else x + x,
            "calls .* at some sizes",
        ),
        (lambda m, x, ids, lens: x * (1.0 / len(ids)), "makes aten.mul.Tensor depend on the step's sizes"),
        (lambda m, x, ids, lens: F.softcap(x, float(len(lens))), "makes softcap depend on the step's sizes"),
        (lambda m, x, ids, lens: x[: len(ids) // 2], "makes aten.slice.Tensor depend on the step's sizes"),
        (lambda m, x, ids, lens: x[: len(lens)], "makes aten.slice.Tensor depend on the step's sizes"),
        (
            lambda m, x, ids, lens: m.embed.weight[:1].expand(len(ids), 8) + x,
            "passes the step's T to aten.expand",
        ),
        (lambda m, x, ids, lens: x[2:], "makes aten.slice.Tensor depend on the step's sizes"),
        (lambda m, x, ids, lens: x * float(lens[0]), "reads the value of a tensor"),
        (lambda m, x, ids, lens: x * lens.max().item(), "reads the value of a tensor"),
        (lambda m, x, ids, lens: x if (ids > 0).all() else x + x, "reads the value of a tensor"),
        (lambda m, x, ids, lens: x * m.loose[0], r"uses a tensor of shape \(8,\) that is neither an input"),
        (lambda m, x, ids, lens: m.inner(x.view(-1, 16)), "invalid for input of size"),
    ],
)
def test_a_forward_that_depends_on_sizes_or_values_is_refused(forward: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        trace(sized(forward), max_seq_len=64)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x, ids, lens: x.view(len(ids), 2, 4).view(x.shape[0], -1),
        lambda m, x, ids, lens: x[: len(ids)] + x.reshape(ids.shape[0], 8),
        # With one token the shapes are equal, and it is the same sum.
        lambda m, x, ids, lens: (x + m.embed.weight[:1]) * m.embed.weight[3:4] + x,
        lambda m, x, ids, lens: x.view(-1, 1, 8).expand(len(ids), 2, 8)[:, 1] + x,
    ],
)
def test_sizes_that_an_op_can_infer_are_not_baked_in(forward: Any) -> None:
    model = sized(forward)
    torch.nn.init.normal_(model.embed.weight)
    graph = trace(model, max_seq_len=64)
    for n in (1, 2, 9):
        ids = torch.arange(n, dtype=torch.int32) % 8
        group = nn.AttentionInputs(ids, ids[None], ids[:2], ids[:1])
        arguments = (ids, ids, [ids], [ids], [group], ids[-1:])
        assert torch.equal(graph_forward(graph, model)(*arguments), model(*arguments))


def test_the_model_is_left_as_it_was(model: nn.CausalLM) -> None:
    """Parameters are its own again, and no hook stays, also after a failure."""
    before = {name: id(p) for name, p in model.named_parameters()}
    trace(model, max_seq_len=64)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    broken = sized(lambda m, x, ids, lens: m.inner(x.view(-1, 16)))
    with pytest.raises(BuildError):
        trace(broken, max_seq_len=64)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in broken.modules())
    assert not any(p.is_meta for p in broken.parameters())
