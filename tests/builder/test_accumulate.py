"""Builds that ask for sums in float16: which calls have them, in which steps, and what says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pelton.builder.plugins import apply_plugins
from pelton.engine.artifact import Engine, open_engine
from pelton.errors import ConfigError
from pelton.kernels.tactic import SMALL_STEPS, NodeSpec, all_tactics
from tests.builder.paper_gpu import build_paper_engine
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

CONFIG = TINY_LLAMA | {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 512}
#: Four products and an attention of each layer; three products of the last are of the rows of logits alone.
OF_LAYERS = 5 * 2 - 3


def built(path: Path, quant: str = "float16", **settings: Any) -> Engine:
    checkpoint = RandomCheckpoint(CONFIG, quant=quant)
    return open_engine(build_paper_engine(path, checkpoint, dtype="float16", max_num_tokens=400, **settings))


def tables(engine: Engine) -> list[tuple[str, list[tuple[int, str]]]]:
    """Of every instruction: its op; steps and their tactics."""
    return [(i.op, [(c.max_tokens, c.tactic) for c in i.tactics]) for i in engine.plan.instructions]


@pytest.mark.parametrize(
    ("target", "quant", "settings", "endings"),
    [
        ("sm_90", "float16", {}, {".half_sums"}),
        ("sm_89", "float16", {"kv_dtype": "int8"}, {".half_sums"}),
        ("sm_89", "int4_g128", {}, {".half_sums", ".unpack_half_sums"}),
        ("sm_90", "float16", {"kv_dtype": "int8"}, {".half_sums", ".hopper8.half_sums"}),
    ],
)
def test_products_and_attention_of_large_steps_add_in_float16(
    target: str, quant: str, settings: dict[str, Any], endings: set[str], tmp_path: Path
) -> None:
    usual = built(tmp_path / "usual", quant, target=target, **settings)
    engine = built(tmp_path / "half", quant, target=target, accumulate="float16", **settings)
    assert not [c for _, table in tables(usual) for c in table if "half_sums" in c[1]]
    found = set()
    for (op, before), (same, table) in zip(tables(usual), tables(engine), strict=True):
        assert op == same
        largest, tactic = table[-1]
        assert largest == 400
        if "half_sums" not in tactic:
            assert [name for _, name in table] == [name for _, name in before]
            continue
        found.add(op)
        assert tactic.endswith(tuple(endings))
        assert table[-2][0] == SMALL_STEPS
        assert not any("half_sums" in name for _, name in table[:-1])
        small = [(end, name) for end, name in before if end < SMALL_STEPS]
        assert table[: len(small)] == small
    assert found == {"norm_linear", "rope_paged_attention", "linear_add", "norm_linear_gated"}
    names = {table[-1][1] for _, table in tables(engine)}
    assert all(any(name.endswith(ending) for name in names) for ending in endings)


def test_the_report_says_how_many_do_and_which_do_not(tmp_path: Path) -> None:
    engine = built(tmp_path / "half", accumulate="float16")
    notes = "\n".join(engine.report()["notes"])
    assert f"{OF_LAYERS} products and attentions add in float16" in notes
    assert "others add in float32: 2 linear_add, 1 norm_linear, 1 norm_linear_gated" in notes
    assert "gains nothing on sm_90" in notes
    assert engine.config.build.accumulate == "float16"


def test_a_tactic_that_adds_in_float16_is_not_taken_unasked() -> None:
    known = all_tactics()
    name = "cuda.paged_attention.half_sums"
    target = {n for n, t in known.items() if t.sums == "float32"}
    spec = NodeSpec(op="paged_attention", inputs=(), attrs={})
    with pytest.raises(ConfigError, match="set accumulate float16 for it, too"):
        apply_plugins({"paged_attention": name}, [spec], [[]], known, target)
