"""``pelton quantize`` and ``--quant``: from a folder to a smaller one, and into engines."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pelton.builder.build import build
from pelton.builder.gate import QualityGate
from pelton.builder.quantize_state import alone_in
from pelton.builder.refit import refit
from pelton.builder.write_quantized import format_for
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import open_checkpoint
from pelton.quant.config import QuantConfig
from pelton.quant.recipes import RECIPES
from pelton.serving.cli.main import run_command
from tests.cli.text_engine import LIMITS, TextCheckpoint, text_checkpoint
from tests.models import zoo
from tests.models.oracle import hf_config_dict
from tests.serving.fake_engine import VOCAB_SIZE

SHORT = ["--sequences", "4", "--length", "32"]
CONFIG: dict[str, Any] = {**LIMITS, "timing": False}


def folder(path: Path, **changes: Any) -> Path:
    """A Hugging Face folder of random weights."""
    base = text_checkpoint(**changes)
    path.mkdir()
    base.write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(base.config))
    save_file(
        {name: np.ascontiguousarray(base.read(name).data) for name in base.tensors},
        path / "model.safetensors",
    )
    return path


@pytest.mark.parametrize(
    ("recipe", "fmt"),
    [
        ("gptq-int4", "compressed-tensors"),
        ("gptq-int4", "gptq"),
        ("awq-int4", "compressed-tensors"),
        ("smoothquant-static", "compressed-tensors"),
        ("fp8", "compressed-tensors"),
        ("nf4", "bitsandbytes"),
        ("llm-int8", "bitsandbytes"),
    ],
)
def test_a_folder_that_opens_and_builds(recipe: str, fmt: str, tmp_path: Path) -> None:
    source, out = folder(tmp_path / "model"), tmp_path / "small"
    calibrated = SHORT if RECIPES[recipe].calibrated else []
    assert (
        run_command(
            ["quantize", str(source), "--recipe", recipe, "-o", str(out), "--format", fmt, "-q", *calibrated]
        )
        == 0
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "small"], "nothing is left beside it"
    written = open_checkpoint(out)
    name = "model.layers.0.mlp.up_proj.weight"
    # 64 columns; GPTQ's checkpoints have one group size, that of the layers of 96.
    fits = {"int4_g128": "int4_g32" if fmt == "gptq" else "int4_g64"}
    assert written.tensors[name].quant == fits.get(RECIPES[recipe].weights, RECIPES[recipe].weights)
    wanted, found = RECIPES[recipe].activations, written.activation_quant(name)
    assert (found is None) == (wanted is None)
    if wanted is not None and found is not None:
        assert (found.dtype, found.per, found.outliers) == (wanted.dtype, wanted.per, wanted.outliers)
        assert (found.scale > 0) == (wanted.scale != 0)
    report = build(out, BuildConfig(**CONFIG), output=tmp_path / "e", gate=QualityGate(tokens=200))
    assert report.quality is not None and report.quality.evaluation is not None


def test_the_same_again_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = folder(tmp_path / "model"), tmp_path / "small"
    from pelton.builder.quantize import quantize
    from pelton.quant.config import Calibration
    from pelton.quant.recipes import with_fields

    config = with_fields(RECIPES["gptq-int4"], calibration=Calibration(sequences=4, length=32))

    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(open_checkpoint(source), config, tmp_path / "small.partial", progress=stop)
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "small.partial").glob("layer*")}
    assert len(times) == 2
    assert run_command(["quantize", str(source), "--recipe", "gptq-int4", "-o", str(out), *SHORT]) == 0
    assert not (tmp_path / "small.partial").exists()
    said = capsys.readouterr().out
    assert "model.layers.3" in said and "relative error: weights" in said
    assert (
        "small  gptq int4_g128 symmetric, 4." in said
        and "calibrated on 128 tokens, compressed-tensors" in said
    )


def test_weights_that_transformers_would_make_at_random_are_named(tmp_path: Path) -> None:
    """Tried with transformers 5.24 and compressed-tensors 0.20: it finds neither, and warns at most."""
    import pelton

    def said(name: str, base: TextCheckpoint, **fields: Any) -> tuple[str, ...]:
        config = QuantConfig(weights="int8_row", **fields)
        return pelton.quantize(base, config, tmp_path / name).notes

    embedding = (
        "model.embed_tokens.weight is quantised, and transformers finds no embeddings there; Pelton does",
    )
    plain = text_checkpoint(num_hidden_layers=1)
    assert said("a", plain) == ()
    assert said("b", plain, overrides={"model.embed_tokens": "int8_row"}) == embedding
    assert said("c", plain, overrides={"lm_head": "int8_row"}) == embedding, "they are one tensor"
    apart = text_checkpoint(num_hidden_layers=1, tie_word_embeddings=False)
    assert said("d", apart, overrides={"lm_head": "int8_row"}) == ()
    gpt2 = TextCheckpoint(hf_config_dict(zoo.gpt2(vocab_size=VOCAB_SIZE, n_embd=64)))
    (note,) = said("e", gpt2)
    assert "no quantised layers of GPT2LMHeadModel, which are Conv1D there" in note


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_heads_beside_transposed_layers_are_read_back(tied: bool, tmp_path: Path) -> None:
    """GPT-2's layers are stored (in, out), its embeddings and head are not."""
    import pelton

    base = TextCheckpoint(
        hf_config_dict(zoo.gpt2(vocab_size=VOCAB_SIZE, n_embd=64, tie_word_embeddings=tied))
    )
    config = QuantConfig(weights="int8_row", overrides={"lm_head": "int8_row", "transformer.wpe": "int8_row"})
    pelton.quantize(base, config, tmp_path / "small")
    written = open_checkpoint(tmp_path / "small")

    def dense(name: str) -> HostTensor:
        values = dequantize(written.read(name))
        return HostTensor("float32", values.shape, values)

    for name in base.tensors:
        found, wanted = evaluate(written.source(name), dense).data, base.read(name).data
        np.testing.assert_allclose(found, wanted, atol=np.abs(wanted).max() / 120, err_msg=name)


def test_models_whose_checkpoints_have_no_scales_of_caches_are_refused_first(tmp_path: Path) -> None:
    import pelton

    base = TextCheckpoint(hf_config_dict(zoo.gpt2(vocab_size=VOCAB_SIZE, n_embd=64)))
    with pytest.raises(ConfigError, match="checkpoints of GPT2LMHeadModel have no scales of KV caches"):
        pelton.quantize(base, QuantConfig(weights="int8_row", kv="int8"), tmp_path / "small")
    assert not any(tmp_path.iterdir())


def test_two_at_once_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second leaves the first one's layers alone; when it is gone, it goes on."""
    source, partial = folder(tmp_path / "model"), tmp_path / "small.partial"
    command = ["quantize", str(source), "--recipe", "int4", "-o", str(tmp_path / "small")]
    with alone_in(partial):
        assert run_command(command) == 2
        assert f"another process is quantising in {partial}; wait for it" in capsys.readouterr().err
        assert not any(partial.iterdir())
    assert run_command(command) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "small"]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    source = folder(tmp_path / "model")
    for name in (f".small.writing-{ended.pid}-0", f".e.quantising-{ended.pid}-0"):
        (tmp_path / name).mkdir()
    (tmp_path / f".small.writing-{os.getpid()}-0").mkdir()
    assert run_command(["quantize", str(source), "--recipe", "int4", "-o", str(tmp_path / "small")]) == 0
    build(source, BuildConfig(**CONFIG, quant="gptq-int4"), output=tmp_path / "e")
    found = sorted(p.name for p in tmp_path.iterdir())
    assert found == [f".small.writing-{os.getpid()}-0", "e", "model", "small"], "one that works is left"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "gptq-int5"], "there is no recipe 'gptq-int5'; did you mean gptq-int"),
        (
            ["--recipe", "nf4", "--format", "gptq"],
            "gptq checkpoints have no nf4_g64 weights (formats that do: bitsandbytes)",
        ),
        (["--recipe", "q4_k"], "no checkpoint format has q4_k weights; build an engine with it"),
        (
            ["--recipe", "int4", "--format", "awq"],
            "unknown checkpoint format 'awq' (known: compressed-tensors",
        ),
        (["--recipe", "int4", "--sequences", "3"], "the recipe int4 sees no text; leave sequences out"),
        (["--recipe", "int4", "--override", "lm_heat=int8_row"], "the pattern 'lm_heat' fits no module"),
        (["--recipe", "int4", "--weights", "int4"], "cannot be quantised to 'int4'"),
        (["--recipe", "int4", "--override", "down_proj"], "'down_proj' is not PATTERN=TYPE, such as"),
        (
            ["--recipe", "int4", "--damping", "0.1"],
            "damping is for gptq, not for the recipe int4; leave it out",
        ),
        (["--recipe", "int4", "--act-order"], "act_order is for gptq, not for the recipe int4"),
        (["--recipe", "gptq-int4", "--alpha", "0.5"], "alpha is for awq and smoothquant scaling, not for"),
        (
            ["--recipe", "nf4", "--asymmetric"],
            "symmetric is for groups of integers, the only types with zero",
        ),
        (["--recipe", "gptq-int4", "--seed", "-1"], "seed must not be negative, and is -1"),
        (["--recipe", "nf4", "--kv", "fp8"], "gptq no nf4_g64 weights, bitsandbytes no types of KV caches)"),
        (
            ["--recipe", "gptq-int4", "--calibration", "nil"],
            "calibration text nil cannot be read as text: No",
        ),
        (["--sweep", "--recipe", "gptq-int4", "--calibration", "nil"], "calibration text nil cannot be read"),
        (
            ["--sweep", "--recipe", "int4,nf4", "--damping", "0.1"],
            "damping is for gptq, and none of these is",
        ),
        (
            ["--sweep", "--recipe", "int4,nf4", "--length", "9"],
            "length is for recipes that see text, and none",
        ),
        (["--sweep", "--recipe", "int4,w8a8", "--ignore", "*.mpl.*"], "the pattern '*.mpl.*' fits no module"),
        (["--sweep", "--recipe", ""], "there is no recipe ''"),
        (
            ["--recipe", "gptq-int3", "--format", "gptq", "--override", "model.embed_tokens=int3_g32"],
            f"model.embed_tokens is {VOCAB_SIZE} x 64, and GPTQ's layout needs whole 32-bit words",
        ),
        (
            ["--recipe", "nf4", "--override", "*.down_proj=int8_row"],
            "model.layers.0.mlp.down_proj is int8_row, and a bitsandbytes checkpoint is all nf4_g64 or",
        ),
        ([], "--recipe NAME is missing"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder(tmp_path / "model")
    assert run_command(["quantize", str(source), "-o", str(tmp_path / "small"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_from_python(tmp_path: Path) -> None:
    import pelton

    source = folder(tmp_path / "model")
    report = pelton.quantize(source, "int4", tmp_path / "a")
    again = pelton.quantize(source, pelton.QuantConfig(weights="int4_g128"), tmp_path / "b")
    assert report.weights == again.weights
    with pytest.raises(ConfigError, match="exists; remove it"):
        pelton.quantize(source, "int4", tmp_path / "a")


def test_the_list_names_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["quantize", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.strip()][1:] == list(RECIPES)


def test_formats_by_what_a_recipe_needs() -> None:
    found = {}
    for name, config in RECIPES.items():
        try:
            found[name] = format_for(config)
        except ConfigError:
            found[name] = ""
    assert {name for name, fmt in found.items() if not fmt} == {"fp4", "q8_0", "q4_k", "awq-q4_k"}
    assert {name for name, fmt in found.items() if fmt == "bitsandbytes"} == {"nf4", "nf4-double", "llm-int8"}
    assert format_for(QuantConfig(), "gptq") == "gptq"


# ---- Engines ----


@pytest.mark.parametrize("recipe", ["int4", "gptq-int4", "awq-int4", "q8_0"])
def test_an_engine_of_a_recipe(recipe: str, tmp_path: Path) -> None:
    """What it is measured against on text is the model before it was quantised."""
    config = BuildConfig(**CONFIG, quant=recipe, activations="float32")
    report = build(text_checkpoint(), config, output=tmp_path / "e", gate=QualityGate(tokens=200))
    engine = open_engine(tmp_path / "e")
    assert engine.config.build.quant == recipe
    kept = "q8_0" if recipe == "q8_0" else "int4_g64"
    assert report.stored[kept] > 0
    assert f"28 tensors are quantised: {RECIPES[recipe].algorithm} " in "\n".join(report.notes)
    assert report.quality is not None and report.quality.evaluation is not None
    assert report.quality.max_error < 1e-3, "the engine computes the quantised model"
    assert report.quality.evaluation.kl_mean > 10 * report.quality.kl_mean
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e"]


def test_a_dry_run_knows_the_types_without_reading(tmp_path: Path) -> None:
    base = text_checkpoint()
    base.read = None  # type: ignore[assignment,method-assign]
    for recipe in ("int4", "gptq-int4"):
        report = build(base, BuildConfig(**CONFIG, quant=recipe), output=tmp_path / "e", dry_run=True)
        assert {"int4_g64", "int4_g32"} <= report.stored.keys()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_recipe_stops_a_build(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no recipe 'int44'; did you mean int4"):
        build(text_checkpoint(), BuildConfig(quant="int44"), output=tmp_path / "e")


@pytest.mark.parametrize("wrong", [{"kv_dtype": "int5"}, {"passes": {"fuse_qvk": "off"}}])
def test_settings_are_refused_before_a_model_is_calibrated(wrong: Any, tmp_path: Path) -> None:
    base = text_checkpoint()
    base.read = None  # type: ignore[assignment,method-assign]
    with pytest.raises(ConfigError, match="unknown"):
        build(base, BuildConfig(**CONFIG, quant="gptq-int4", **wrong), output=tmp_path / "e")


@pytest.mark.parametrize("recipe", ["int4", "gptq-int4"])
def test_a_refit_quantises_the_new_weights_alike(recipe: str, tmp_path: Path) -> None:
    config = BuildConfig(**CONFIG, quant=recipe)
    first, second = text_checkpoint(), text_checkpoint()
    second._seed = 5
    build(first, config, output=tmp_path / "a")
    build(second, config, output=tmp_path / "b")
    refit(tmp_path / "a", second)
    a, b = open_engine(tmp_path / "a"), open_engine(tmp_path / "b")
    for name in b.weights.meta:
        np.testing.assert_array_equal(a.weights[name], b.weights[name])


# ---- Sweeps ----


def test_a_sweep_is_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "model")
    command = ["quantize", str(source), "--sweep", "--recipe", "int8,int4,gptq-int4,w8a8", "--speed"]
    assert run_command([*command, "-o", str(tmp_path / "out"), *SHORT, "-q"]) == 0
    rows = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [row["recipe"] for row in rows] == ["int8", "int4", "gptq-int4", "w8a8"]
    by_name = {row["recipe"]: row for row in rows}
    assert by_name["int8"]["kl"] < by_name["w8a8"]["kl"] < by_name["int4"]["kl"]
    assert by_name["int8"]["bits"] > 8 > by_name["int4"]["bits"] == by_name["gptq-int4"]["bits"] > 4
    assert all(row["decode_ms"] > 0 and row["tokens"] == 4096 for row in rows)
    plot = (tmp_path / "out" / "sweep.svg").read_text()
    assert plot.count("<circle") == 4 and ">gptq-int4</text>" in plot and ">unquantised</text>" in plot
    assert "same top token" in capsys.readouterr().out


def test_a_sweep_says_what_it_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "model", num_hidden_layers=1)
    command = ["quantize", str(source), "--sweep", "--recipe", "int3", "--speed", "-o", str(tmp_path / "out")]
    assert run_command(command) == 0
    said = capsys.readouterr().err
    assert "no kernel here takes int3_g32, int3_g64: the time is of the engine's q8_0" in said


def test_round_numbers_of_an_axis() -> None:
    from pelton.serving.page.scatter import ticks

    assert ticks([11.3, 16.7]) == [11, 12, 13, 14, 15, 16, 17]
    assert len(ticks([0.1, 0.1])) >= 2
    assert ticks([4, 8.5])[0] <= 4 and ticks([4, 8.5])[-1] >= 8.5
