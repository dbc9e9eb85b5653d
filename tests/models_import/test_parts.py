"""The parts of the import that recognise something: masks, norms, rotations, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pelton import nn
from pelton.builder.trace import trace
from pelton.ir.graph import op_name
from pelton.ir.recipe import AddScalar, Rows, Source
from pelton.models.registry import create_model
from pelton.models.transformers_import.attention import NotImportable, window_of
from pelton.models.transformers_import.model import ImportedCausalLM
from pelton.passes import PASSES, run_graph_passes
from tests.ir.graph_forward import graph_forward
from tests.models.oracle import hf_logits, read_from, relative_error, texts
from tests.models.paged import PagedRunner, run_packed
from tests.models_import.families import config_dict, make_model
from tests.passes.support import FLOAT32

PELTON = torch.ops.pelton


def imported(family: str, **fields: Any) -> tuple[Any, ImportedCausalLM]:
    """The module of ``transformers`` and the imported model with its weights."""
    model = make_model(family, **fields)
    ours = create_model(config_dict(model), max_seq_len=64, impl="transformers")
    assert isinstance(ours, ImportedCausalLM)
    nn.load_weights(ours, read_from(model.state_dict()))
    return model, ours


def ops_of(model: ImportedCausalLM) -> list[str]:
    return [n.target._opname for n in model.graph.nodes if getattr(n.target, "namespace", "") == "pelton"]


def causal(window: int = 0, chunk: int = 0) -> Callable[..., Any]:
    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = key <= query
        if window:
            seen = seen & (key > query - window)
        return seen & (key // chunk == query // chunk) if chunk else seen

    return mask


@pytest.mark.parametrize(("window", "found"), [(0, 0), (1, 1), (7, 7), (39, 39), (40, 0), (1000, 0)])
def test_a_window_is_read_off_the_mask_function(window: int, found: int) -> None:
    assert window_of(causal(window), 40) == found


def test_other_masks_are_refused() -> None:
    for mask in (causal(chunk=8), causal(window=5, chunk=8), lambda b, h, query, key: key >= 0):
        with pytest.raises(NotImportable, match="neither causal nor a sliding window"):
            window_of(mask, 40)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "nemotron", "gptj"])
def test_norms_and_rotations_are_found_in_every_layer(family: str) -> None:
    _, ours = imported(family)
    ops = ops_of(ours)
    norms = ops.count("rms_norm") + ops.count("layer_norm")
    assert norms >= ours.num_layers + 1
    assert ops.count("rope") + ops.count("rope_interleaved") == 2 * ours.num_layers
    assert ops.count("rope_cos_sin") == 1
    assert not {"unary", "reduce", "copy"} & set(ops)


def test_two_kinds_of_layers_have_two_tables_and_two_kv_groups() -> None:
    _, ours = imported("gemma3_text")
    assert ops_of(ours).count("rope_cos_sin") == 2
    assert [g.window for g in ours.kv_groups()] == [16, 0]


@pytest.mark.parametrize(
    "activation",
    ["silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "quick_gelu", "relu2"],
)
def test_activations_are_found_however_they_are_spelled(activation: str) -> None:
    model, ours = imported("starcoder2", hidden_act=activation)
    known = activation not in ("quick_gelu",)
    assert ("activation" in ops_of(ours)) == known
    check(model, ours)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotations(rope: dict[str, Any]) -> None:
    model, ours = imported("olmo2", rope_parameters={"rope_theta": 10000.0, **rope})
    assert ops_of(ours).count("rope") == 2 * ours.num_layers
    check(model, ours)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 4.0}], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    ("family", "rotary"),
    [("stablelm", 0.25), ("persimmon", 0.25), ("phi", 0.25), ("phi", 0.5), ("nemotron", 0.25)],
)
def test_a_rotation_of_few_values_of_a_small_head(family: str, rotary: float, rope: dict[str, Any]) -> None:
    """Heads of 8 values of which 2 or 4 turn: sizes of 1 appear where others have dimensions."""
    parameters = {"rope_theta": 10000.0, "partial_rotary_factor": rotary, "rope_type": "default", **rope}
    model, ours = imported(family, hidden_size=32, rope_parameters=parameters)
    assert ops_of(ours).count("rope") == 2 * ours.num_layers
    check(model, ours)


def test_recipes_take_in_what_is_computed_from_weights() -> None:
    _, ours = imported("gemma2")
    recipes = nn.collect_recipes(ours)
    assert recipes["model.norm.weight"] == AddScalar(Source("model.norm.weight"), 1.0)
    _, opt = imported("opt", ffn_dim=96, word_embed_proj_dim=64)
    table = "model.decoder.embed_positions.weight"
    assert nn.collect_recipes(opt)[f"{table}.rows_2_130"] == Rows(Source(table), 2, 130)


@pytest.mark.parametrize(("family", "groups"), [("llama", 2), ("starcoder2", 1), ("cohere", 2)])
def test_layers_over_one_input_are_stacked(family: str, groups: int) -> None:
    """As in models with a file: q, k and v, and gate and up where there are two."""
    model, ours = imported(family)
    graph = trace(ours, max_seq_len=64, block_size=4)
    reports = {r.name: r for r in run_graph_passes(PASSES, graph, FLOAT32)}
    assert reports["fuse_products"].changed == groups * ours.num_layers
    products = [n for n in graph.calls if op_name(n) in ("linear", "linear_gated")]
    assert len(products) == 4 * ours.num_layers + 1
    forward = graph_forward(graph, ours, read_from(model.state_dict()))
    check(model, ours, PagedRunner(ours, forward=forward))


def check(model: Any, ours: ImportedCausalLM, runner: PagedRunner | None = None) -> None:
    """Packed, paged logits against the module itself."""
    inputs = texts()
    for got, tokens in zip(run_packed(runner or PagedRunner(ours), inputs), inputs, strict=True):
        assert relative_error(got, hf_logits(model, tokens)) < 1e-4
