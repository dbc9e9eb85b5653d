"""Which layout the weights of engines for GPUs get: one for all steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pelton.builder.refit import refit
from pelton.engine.artifact import Engine, open_engine
from pelton.kernels.layouts import LAYOUTS
from tests.builder.paper_gpu import build_paper_engine
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

CONFIG = TINY_LLAMA | {"hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 128}


def of_layers(quant: str) -> Callable[[str], str]:
    return lambda name: quant if ".layers." in name else "bfloat16"


def built(path: Path, checkpoint: RandomCheckpoint, **settings: object) -> Engine:
    return open_engine(build_paper_engine(path, checkpoint, dtype="bfloat16", **settings))


def layouts(engine: Engine) -> dict[str, set[str]]:
    """Of each stored type."""
    found: dict[str, set[str]] = {}
    for buffer in engine.plan.buffers:
        if buffer.layout and len(buffer.shape) == 2:
            found.setdefault(buffer.quant, set()).add(buffer.layout)
    return found


@pytest.mark.parametrize("quant", ["fp8_row", "int8_row"])
def test_codes_with_a_scale_a_row_lie_in_rows_on_sm_90(quant: str, tmp_path: Path) -> None:
    engine = built(tmp_path / "e", RandomCheckpoint(CONFIG, quant=of_layers(quant)), max_num_tokens=128)
    assert layouts(engine) == {"bfloat16": {"rows"}, quant: {"rows8"}}
    tables = [i.tactics for i in engine.plan.instructions if any("rows8" in c.tactic for c in i.tactics)]
    assert len(tables) == 2 * 4  # a layer's products
    for table in tables:
        by_step = [(c.max_tokens, c.tactic.rpartition(".")[2]) for c in table]
        assert by_step[:2] == [(8, "rows8_few8"), (16, "rows8_few16")]
        assert by_step[-1][0] == 128 and all("rows8" in name for _, name in by_step)


@pytest.mark.parametrize("activations", ["fp8", "bfloat16"])
def test_deterministic_engines_have_them_in_rows_too(activations: str, tmp_path: Path) -> None:
    """Inputs are codes in every step, or in none."""
    checkpoint = RandomCheckpoint(CONFIG, quant=of_layers("fp8_row"))
    engine = built(
        tmp_path / "e", checkpoint, max_num_tokens=128, deterministic=True, activations=activations
    )
    assert layouts(engine) == {"bfloat16": {"rows"}, "fp8_row": {"rows8"}}
    ending = ".fp8" if activations == "fp8" else ""
    for instruction in engine.plan.instructions:
        names = [c.tactic.split(".", 2)[-1] for c in instruction.tactics]
        if any("rows8" in name for name in names):
            assert names == [f"rows8_invariant{m}{ending}" for m in (8, 32, 64, 128)]


def test_codes_with_a_scale_for_128_columns_lie_in_rows_where_inputs_are_rounded_so(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(CONFIG, quant=of_layers("fp8_g128"))
    engine = built(tmp_path / "e", checkpoint, max_num_tokens=128, activations="fp8")
    assert layouts(engine) == {"bfloat16": {"rows"}, "fp8_g128": {"rows8"}}
    tables = [i.tactics for i in engine.plan.instructions if any("blocks" in c.tactic for c in i.tactics)]
    assert len(tables) == 2 * 4
    for table in tables:
        names = [c.tactic.rpartition(".")[2] for c in table]
        assert names[:2] == ["rows8_few8", "rows8_few16"] and all("blocks" in n for n in names[2:])
    assert layouts(built(tmp_path / "f", checkpoint))["fp8_g128"] == {"mma16"}


@pytest.mark.parametrize(
    ("quant", "settings"),
    [
        (of_layers("fp8_row"), {"target": "sm_80"}),
        (of_layers("fp8_row"), {"target": "sm_89"}),
        (of_layers("int8_g64"), {}),
        # A table of embeddings that is the head too: rows of it are looked up.
        (lambda name: "fp8_row" if "embed" in name else "bfloat16", {}),
    ],
    ids=["sm_80", "sm_89", "groups", "tied"],
)
def test_other_weights_of_codes_lie_in_the_order_of_fragments(
    quant: Callable[[str], str], settings: dict[str, object], tmp_path: Path
) -> None:
    engine = built(tmp_path / "e", RandomCheckpoint(CONFIG, quant=quant), **settings)
    found = layouts(engine)
    found.pop("bfloat16", None)
    assert list(found.values()) == [{"mma16"}]


def test_weights_of_narrow_rows_lie_in_the_order_of_fragments(tmp_path: Path) -> None:
    config = CONFIG | {"hidden_size": 64, "num_attention_heads": 2}
    engine = built(tmp_path / "e", RandomCheckpoint(config, quant=of_layers("fp8_row")))
    by_width = {b.shape[1]: b.layout for b in engine.plan.buffers if b.quant == "fp8_row"}
    assert by_width == {64: "mma16", 384: "rows8"}


def test_refitted_rows_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(CONFIG, quant=of_layers("fp8_row"))
    engine = built(tmp_path / "e", checkpoint)
    other = RandomCheckpoint(CONFIG, quant=of_layers("fp8_row"), seed=1)
    refit(engine.path, other, output=tmp_path / "f")
    refitted = open_engine(tmp_path / "f")
    name = next(b.name for b in engine.plan.buffers if "down_proj" in b.name)
    tensor = other.read(name)
    packed = LAYOUTS["rows8"].pack(tensor)
    assert np.array_equal(refitted.weights[name], packed)
    assert not np.array_equal(engine.weights[name], packed)
