"""Quantising layer by layer: every architecture, what is kept, resuming, and what is refused."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder.calibration import calibration_sequences
from pelton.builder.evaluation import eager_config, exact_model, windows
from pelton.builder.quantize import quantize
from pelton.builder.quantized_view import draft, places, plain_values, round_in_stream, row_parts
from pelton.builder.text import built_in, checkpoint_text
from pelton.errors import BuildError, CheckpointError, ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.kv_quant import KVQuant
from pelton.models.checkpoint import Checkpoint
from pelton.quant.config import WEIGHT_TYPES, Calibration, QuantConfig
from pelton.quant.recipes import RECIPES, with_fields
from pelton.quant.rounding import nearest_values
from tests.cli.text_engine import TextCheckpoint, text_checkpoint
from tests.models import zoo
from tests.models.oracle import hf_config_dict
from tests.serving.fake_engine import VOCAB_SIZE

SHORT = Calibration(sequences=16, length=64)
#: Widths that groups of 32 divide, and few layers.
WIDE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
ARCHITECTURES = {
    "llama": (zoo.llama, WIDE),
    "qwen2 with biases": (zoo.qwen2, WIDE),
    "qwen3": (zoo.qwen3, WIDE),
    "phi3, packed": (zoo.phi3, WIDE),
    "gemma": (zoo.gemma, WIDE),
    "gemma2": (zoo.gemma2, WIDE),
    "gemma3": (zoo.gemma3, {**WIDE, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": (zoo.mistral, WIDE),
    "gpt2, transposed": (zoo.gpt2, {"vocab_size": VOCAB_SIZE, "n_embd": 64}),
}


def short(recipe: str, **fields: Any) -> QuantConfig:
    weights = {"int4_g128": "int4_g32", "int3_g128": "int3_g32"}.get(RECIPES[recipe].weights)
    given = {"calibration": SHORT, **({"weights": weights} if weights else {}), **fields}
    return with_fields(RECIPES[recipe], **given)


def random_model(architecture: str) -> TextCheckpoint:
    make, options = ARCHITECTURES[architecture]
    return TextCheckpoint(hf_config_dict(make(**options)))


def logits(checkpoint: Checkpoint, tokens: int = 48) -> Any:
    """Of calibration text, by the eager model with its inputs rounded where the checkpoint says so."""
    config = eager_config(checkpoint)
    text = checkpoint_text(checkpoint, built_in(0), config.model.vocab_size, name="text").head(tokens)
    (batch,) = windows(text, config)
    return exact_model(checkpoint, config, round_inputs=True).run(batch)


def relative(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("scaling", ["awq", "smoothquant"])
def test_scaling_alone_changes_no_function(architecture: str, scaling: str, tmp_path: Path) -> None:
    """With 8-bit weights what is left is rounding; the exponent is given, so that every input is scaled."""
    base = random_model(architecture)
    activations = ActivationQuant("int8") if scaling == "smoothquant" else None
    config = QuantConfig(
        weights="int8_g32", scaling=scaling, alpha=0.7, activations=activations, calibration=SHORT
    )
    view, report = quantize(base, config, tmp_path / "p")
    view._activations.clear()
    scaled = [row for layer in report.layers for row in layer.linears if row.alpha is not None]
    assert len(scaled) >= 2 * len(report.layers)
    norms = [n for n, info in view.changed.items() if (info.quant == "float32" and "norm" in n) or "ln_" in n]
    assert norms, "factors went into norms"
    assert relative(logits(view), logits(base)) < 0.05, "wrong factors give about 1"


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_gptq_of_every_architecture_beats_nearest(architecture: str, tmp_path: Path) -> None:
    base = random_model(architecture)
    view, report = quantize(base, short("gptq-int4"), tmp_path / "p")
    plain = round_in_stream(base, short("int4"))
    assert view.changed.keys() == plain.changed.keys()
    for layer in report.layers:
        for row in layer.linears:
            place = next(p for p in places(draft(base)).values() if p.tensor == row.tensor)
            weight = place.parameter(evaluate(base.source(row.tensor), base.read))
            nearest = nearest_values(weight, row.quant)
            assert row.weight_error > 1.02 * relative(nearest, weight), "codes are chosen for outputs"
    exact = logits(base)
    assert relative(logits(view), exact) < relative(logits(plain), exact)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_runs(name: str, tmp_path: Path) -> None:
    """On a model that all their groups divide; what it gives is near the model it came from."""
    base = text_checkpoint(hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    config = with_fields(RECIPES[name], calibration=SHORT)
    view, report = quantize(base, config, tmp_path / "p")
    assert {view.tensors[row.tensor].quant for layer in report.layers for row in layer.linears} == {
        config.weights
    }
    assert len(report.layers[0].linears) == 7
    if not config.calibrated:
        stream = round_in_stream(base, config)
        for tensor in view.changed:
            np.testing.assert_array_equal(view.read(tensor).data, stream.read(tensor).data)
            assert view.activation_quant(tensor) == stream.activation_quant(tensor) == config.activations
    bound = {"int2": 1.2, "int3": 0.7}.get(config.weights.split("_")[0], 0.4)
    assert relative(logits(view), logits(base)) < bound
    assert "relative error: weights" in report.text()


BLOCKS = {"weights": "fp8_g128", "activations": ActivationQuant("fp8", group=128)}


@pytest.mark.parametrize(
    "config",
    [
        *(c for c in RECIPES.values() if c.activations and not c.calibrated),
        QuantConfig(name="scaled blocks", **BLOCKS, scaling="smoothquant", calibration=SHORT),
        QuantConfig(name="chosen blocks", **BLOCKS, rounding="gptq", calibration=SHORT),
    ],
    ids=lambda config: config.name,
)
def test_inputs_are_rounded_where_groups_do_not_divide(config: QuantConfig, tmp_path: Path) -> None:
    """Widths are 64 and 96: no 128 divides them, 64 only one."""
    base = text_checkpoint(num_hidden_layers=1)
    view = quantize(base, config, tmp_path / "p")[0] if config.calibrated else round_in_stream(base, config)
    for name, info in view.changed.items():
        quant = view.activation_quant(name)
        assert quant is None or not quant.group or info.shape[1] % quant.group == 0
    assert relative(logits(view), logits(base)) < 0.2


def test_static_scales_are_measured_for_each_input(tmp_path: Path) -> None:
    view, report = quantize(text_checkpoint(), short("fp8-static"), tmp_path / "p")
    found = {
        row.tensor: view.activation_quant(row.tensor) for layer in report.layers for row in layer.linears
    }
    scales = {a.scale for a in found.values() if a is not None}
    assert len(found) == 28 and len(scales) == 16, "four inputs in each of four layers"
    assert all(a is not None and a.per == "tensor" and a.scale > 0 for a in found.values())
    layer = "model.layers.0.self_attn."
    assert found[f"{layer}q_proj.weight"] == found[f"{layer}k_proj.weight"]


def test_types_by_module_and_groups_that_do_not_fit(tmp_path: Path) -> None:
    config = with_fields(
        RECIPES["gptq-int4"],
        calibration=SHORT,
        ignore=("*.layers.3.*",),
        overrides={"*.layers.1.*": "int8_row", "model.embed_tokens": "int8_row"},
    )
    view, report = quantize(text_checkpoint(), config, tmp_path / "p")
    types = {name: info.quant for name, info in view.changed.items()}
    assert types["model.layers.0.mlp.up_proj.weight"] == "int4_g64"
    assert types["model.layers.0.mlp.down_proj.weight"] == "int4_g32"
    assert types["model.layers.1.mlp.up_proj.weight"] == "int8_row"
    assert types["model.embed_tokens.weight"] == "int8_row"
    assert not any(".layers.3." in name for name in types)
    assert [layer.name for layer in report.layers] == [
        *(f"model.layers.{i}" for i in range(3)),
        "outside the layers",
    ]
    assert sorted(report.notes) == [
        "model.layers.0.mlp.down_proj and 1 more: int4_g128 does not divide 96 columns: int4_g32",
        "model.layers.0.self_attn.q_proj and 11 more: int4_g128 does not divide 64 columns: int4_g64",
    ]


def test_blocks_of_a_checkpoint_are_dequantised_first(tmp_path: Path) -> None:
    base = text_checkpoint("q8_0")
    view, _ = quantize(base, short("int4"), tmp_path / "p")
    name = "model.layers.0.mlp.up_proj.weight"
    expected = nearest_values(dequantize(base.read(name)), "int4_g32")
    np.testing.assert_array_equal(dequantize(view.read(name)), expected)
    assert view.tensors["model.embed_tokens.weight"].quant == "q8_0"


def state_of(folder: Path) -> Mapping[str, bytes]:
    found = {}
    for path in sorted(folder.glob("layer-*.npz")):
        with np.load(path) as arrays:
            found |= {f"{path.name} {name}": arrays[name].tobytes() for name in arrays.files}
    return found


@pytest.mark.parametrize("recipe", ["gptq-int4", "smoothquant-static"])
def test_a_killed_quantisation_goes_on_to_the_same_result(recipe: str, tmp_path: Path) -> None:
    """Killed for good after two layers of four: the rest is as if nothing had happened."""
    quantize(text_checkpoint(), short(recipe), tmp_path / "whole")
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.builder.test_quantize import *\n"
        "def progress(stage, done, total):\n"
        "    if done == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"quantize(text_checkpoint(), short({recipe!r}), Path(sys.argv[1]), progress=progress)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "killed")], env=_env(), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(state_of(tmp_path / "killed")) < len(state_of(tmp_path / "whole"))
    done: list[int] = []
    quantize(
        text_checkpoint(),
        short(recipe),
        tmp_path / "killed",
        progress=lambda stage, at, total: done.append(at),
    )
    assert state_of(tmp_path / "killed") == state_of(tmp_path / "whole")
    assert done == [0, 1, 2, 3, 4]


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_a_finished_one_is_read_without_running(tmp_path: Path) -> None:
    first, _ = quantize(text_checkpoint(), short("gptq-int4"), tmp_path / "p")
    before = state_of(tmp_path / "p")
    base = text_checkpoint()
    base.read = None  # type: ignore[assignment,method-assign]
    again, report = quantize(base, short("gptq-int4"), tmp_path / "p")
    assert state_of(tmp_path / "p") == before and len(report.layers) == 4
    for name in first.changed:
        np.testing.assert_array_equal(first.read(name).data, again.read(name).data)


def test_another_recipe_or_anything_else_in_the_folder_is_refused(tmp_path: Path) -> None:
    quantize(text_checkpoint(), short("int4"), tmp_path / "p")
    with pytest.raises(ConfigError, match=r"quantisation of another kind \(tiny, rtn int4_g32 sym"):
        quantize(text_checkpoint(), short("nf4"), tmp_path / "p")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="is in the way"):
        quantize(text_checkpoint(), short("int4"), tmp_path / "q")


def test_what_holds_no_layer_yet_is_in_nobodys_way(tmp_path: Path) -> None:
    """Stopped before its first layer: another recipe may take the folder."""

    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(text_checkpoint(), short("int4"), tmp_path / "p", progress=stop)
    quantize(text_checkpoint(), short("nf4"), tmp_path / "p")
    with pytest.raises(
        ConfigError, match=r"\(tiny, rtn nf4_g64, of other weights, settings or text\), not tiny"
    ):
        quantize(text_checkpoint(), short("nf4", ignore=("*.layers.0.*",)), tmp_path / "p")


@pytest.mark.parametrize("damage", ["cut", "emptied", "turned"])
def test_a_damaged_layer_is_named_and_made_anew(damage: str, tmp_path: Path) -> None:
    quantize(text_checkpoint(), short("gptq-int4"), tmp_path / "p")
    whole, path = state_of(tmp_path / "p"), tmp_path / "p" / "layer-0001.npz"
    data = bytearray(path.read_bytes())
    at = data.index(b"NUMPY") + 300
    data[at] ^= 255
    path.write_bytes({"cut": data[:1000], "emptied": b"", "turned": data}[damage])

    def again() -> None:
        view, _ = quantize(text_checkpoint(), short("gptq-int4"), tmp_path / "p")
        for name in view.changed:
            view.read(name)

    with pytest.raises(CheckpointError, match=r"layer-0001\.npz is damaged .*; delete it, and the same com"):
        again()
    path.unlink()
    quantize(text_checkpoint(), short("gptq-int4"), tmp_path / "p")
    assert state_of(tmp_path / "p") == whole
    (tmp_path / "p" / "state.json").write_text('{"dig')
    with pytest.raises(ConfigError, match=r"state\.json is damaged .*; delete .* to begin anew"):
        quantize(text_checkpoint(), short("gptq-int4"), tmp_path / "p")


def test_a_full_disk_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = np.savez, []

    def full(*arguments: Any, **arrays: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments, **arrays)

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(
        CheckpointError, match=r"cannot write .*layer-0002\.npz: No space left .* goes on there"
    ):
        quantize(text_checkpoint(), short("int4"), tmp_path / "p")
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == [
        "layer-0000.npz",
        "layer-0001.npz",
        "state.json",
    ]
    quantize(text_checkpoint(), short("int4"), tmp_path / "p")


def test_values_that_are_not_finite_stop_it_with_their_name(tmp_path: Path) -> None:
    base = text_checkpoint()
    base.damage["model.layers.2.mlp.up_proj.weight"] = float("nan")
    for recipe in ("int4", "gptq-int4"):
        with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight has 1 NaN"):
            quantize(base, short(recipe), tmp_path / recipe)
    base = text_checkpoint()
    base.damage["model.embed_tokens.weight"] = float("inf")
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight has 1 NaN or infinite"):
        quantize(base, short("int4"), tmp_path / "outside the layers")
    base = text_checkpoint()
    base.damage["model.layers.1.input_layernorm.weight"] = 3e38
    with pytest.raises(BuildError, match=r"model\.layers\.1.* not finite"):
        quantize(base, short("gptq-int4"), tmp_path / "activations")


@pytest.mark.parametrize("quant", ["int4_g32", "q4_0", "q8_0"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_values_that_no_scale_spans_stop_it_with_their_name(
    quant: str, symmetric: bool, tmp_path: Path
) -> None:
    base = text_checkpoint()
    base.damage["model.layers.2.mlp.up_proj.weight"] = 3e38
    config = QuantConfig(weights=quant, symmetric=symmetric)
    message = r"model\.layers\.2\.mlp\.up_proj\.weight cannot be quantised: .*does not fit in float16 \("
    with pytest.raises(CheckpointError, match=message):
        quantize(base, config, tmp_path / "p")
    view = round_in_stream(base, config)
    with pytest.raises(CheckpointError, match=message):
        view.read("model.layers.2.mlp.up_proj.weight")


def test_patterns_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    for fields in ({"ignore": ("*.mpl.*",)}, {"modules": ("*.mpl.*",)}, {"overrides": {"*.mpl.*": "none"}}):
        with pytest.raises(ConfigError, match=r"'\*\.mpl\.\*' fits no module of Llama.*like model\.l"):
            quantize(text_checkpoint(), short("int4", **fields), tmp_path / "p")
    with pytest.raises(ConfigError, match="quantises no module of LlamaForCausalLM"):
        quantize(text_checkpoint(), short("int4", ignore=("*",)), tmp_path / "p")


def test_calibration_text(tmp_path: Path) -> None:
    base = text_checkpoint()
    model = draft(base)
    path = tmp_path / "prose.txt"
    path.write_text("abcdefghij" * 20)
    found = calibration_sequences(Calibration(text=str(path), sequences=5, length=40, seed=3), base, model)
    assert found.shape == (5, 40) and len({tuple(row) for row in found}) > 1
    again = calibration_sequences(Calibration(text=str(path), sequences=5, length=40, seed=3), base, model)
    np.testing.assert_array_equal(found, again)
    assert calibration_sequences(Calibration(length=4096), base, model).shape[1] == 64, "the model's limit"
    path.write_text("short")
    with pytest.raises(ConfigError, match=r"prose\.txt has 5 tokens of this model, and a sequence 40"):
        calibration_sequences(Calibration(text=str(path), length=40), base, model)
    with pytest.raises(ConfigError, match=r"calibration text .* cannot be read"):
        calibration_sequences(Calibration(text=str(tmp_path / "none.txt")), base, model)


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("w8a8", "fp8_row", r"int8 activations do not go with fp8_row weights \(model\.layers\.0\.mlp\.down"),
        ("fp8", "nf4_g64", r"fp8 activations do not go with nf4_g64 weights \(.*for nf4_g64: none"),
        ("llm-int8", "int4_g32", r"int8_row weights \(LLM.int8\), not for int4_g32 \(model\.layers\.0\.mlp"),
    ],
)
def test_overrides_that_do_not_go_with_quantised_inputs_are_refused(
    recipe: str, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        round_in_stream(text_checkpoint(), short(recipe, overrides={"*.down_proj": override}))


def test_only_inputs_of_decoder_layers_are_quantised(tmp_path: Path) -> None:
    """Whether a recipe is followed layer by layer or as weights are read: the head's stays as it is."""
    base = text_checkpoint(num_hidden_layers=1, tie_word_embeddings=False)
    config = short("w8a8", overrides={"lm_head": "q8_0", "model.embed_tokens": "int8_row"})
    layers = quantize(base, config, tmp_path / "p")[0]
    for view in (layers, round_in_stream(base, config)):
        assert view.activation_quant("model.layers.0.mlp.up_proj.weight") == config.activations
        assert view.activation_quant("lm_head.weight") is None
        assert view.activation_quant("model.embed_tokens.weight") is None


def test_scales_of_kv_caches_are_not_a_checkpoints_after_scaling(tmp_path: Path) -> None:
    """Scaling divides the rows that make values, so scales measured before are of other ones."""

    class Scaled(TextCheckpoint):
        def kv_quant(self) -> KVQuant:
            return KVQuant("fp8", ((0.01,),), ((0.01,),))

    base = Scaled({**text_checkpoint().config, "num_hidden_layers": 1})
    assert quantize(base, short("awq-int4"), tmp_path / "a")[0].kv_quant() == KVQuant("fp8")
    assert quantize(base, short("gptq-int4"), tmp_path / "b")[0].kv_quant() == base.kv_quant()
    assert round_in_stream(base, short("int4")).kv_quant() == base.kv_quant()


def test_a_model_without_a_file_is_refused(tmp_path: Path) -> None:
    base = text_checkpoint()
    base.config["architectures"] = ["OPTForCausalLM"]
    with pytest.raises(CheckpointError, match=r"OPTForCausalLM has no file of its own .*LlamaForCausalLM"):
        round_in_stream(base, short("int4"))


def test_sizes_are_those_of_the_blocks(tmp_path: Path) -> None:
    view, report = quantize(text_checkpoint(), short("awq-int4"), tmp_path / "p")
    kinds = {info.quant for info in view.changed.values()}
    assert kinds == {"int4_g32", "float32"}
    for name, info in view.changed.items():
        assert info.nbytes == view.read(name).nbytes
    assert report.weights == sum(i.nbytes for i in view.changed.values() if i.quant == "int4_g32")


def test_inputs_are_rounded_only_where_that_is_asked_for() -> None:
    view = round_in_stream(text_checkpoint(), short("w8a8"))
    config = eager_config(view)
    text = checkpoint_text(view, built_in(0), config.model.vocab_size, name="text").head(20)
    (batch,) = windows(text, config)
    exact, rounded = (exact_model(view, config, round_inputs=r).run(batch) for r in (False, True))
    assert 1e-4 < relative(rounded, exact) < 0.1


@pytest.mark.parametrize(
    "fields",
    [
        *({"weights": quant} for quant in WEIGHT_TYPES),
        {"weights": "int8_row", "per_tensor": True},
        {"weights": "nf4_g64", "double_quantization": True},
        {"weights": "int4_g32", "progressive": True, "activations": ActivationQuant("int8")},
    ],
    ids=str,
)
def test_parts_of_a_weight_are_rounded_as_the_whole(fields: dict[str, Any]) -> None:
    """Searches round parts, so that no more than a part lies beside a large weight."""
    config, weight = QuantConfig(**fields), np.random.default_rng(0).standard_normal((2500, 256), np.float32)
    weight[2000:] *= 5
    parts = row_parts(weight, config.weights, config)
    found = np.concatenate([plain_values(part, config.weights, config) for part in parts])
    np.testing.assert_array_equal(found, plain_values(weight, config.weights, config))
    alone = fields.keys() & {"per_tensor", "double_quantization"} or config.weights == "nvfp4"
    assert len(parts) == (1 if alone else 3)
