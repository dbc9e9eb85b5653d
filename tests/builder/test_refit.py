"""Strip and refit: new weights in the same plan, and never a half-written or a wrong engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder.build import build
from pelton.builder.refit import refit
from pelton.builder.strip import strip
from pelton.engine.artifact import Engine, file_sha256, open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.errors import CheckpointError, ConfigError, EngineError
from pelton.ir.condition import SameValues, broken
from pelton.ir.recipe import AddScalar, Concat, PermuteRows, Rows, Source, Transpose
from pelton.ir.recipe_json import from_data, to_data
from pelton.ir.tensors import HostTensor
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

CONFIG = BuildConfig(block_size=8, max_batch_size=4, max_num_tokens=40)
QWEN = TINY_LLAMA | {"architectures": ["Qwen2ForCausalLM"]}


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy.engine"
    shutil.copytree(tiny_engine, copy)
    return copy


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine of other weights, built afresh."""
    output = tmp_path_factory.mktemp("other") / "other.engine"
    build(RandomCheckpoint(TINY_LLAMA, seed=1, name="other"), CONFIG, output=output, check=False)
    return output


def files(engine: Path) -> dict[str, bytes]:
    return {str(p.relative_to(engine)): p.read_bytes() for p in engine.rglob("*") if p.is_file()}


def weight(engine: Engine, name: str) -> bytes:
    return engine.weights[name].tobytes()


def test_a_refit_engine_is_the_one_a_build_makes(engine: Path, other: Path) -> None:
    before = open_engine(engine).engine_id
    report = refit(engine, RandomCheckpoint(TINY_LLAMA, seed=1, name="other"))
    assert report.kept == 0
    made, built = files(engine), files(other)
    for name in made.keys() - {"report.json", "manifest.json"}:
        assert made[name] == built[name], name
    opened = open_engine(engine, verify=True)
    assert opened.engine_id != before
    assert opened.report()["quality"] is None
    assert "all weights refitted from other" in str(opened.report()["notes"])


def test_a_stripped_engine_says_what_to_do_and_can_be_filled(
    engine: Path, other: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small.engine"
    strip(engine, small)
    stripped = open_engine(small, verify=True)
    assert stripped.stripped
    assert stripped.nbytes < open_engine(engine).nbytes / 3
    with pytest.raises(EngineError, match="is stripped: it holds no weights; put some in with: pelton refit"):
        Session(small)
    with pytest.raises(EngineError, match="is stripped"):
        strip(small, tmp_path / "smaller.engine")
    with pytest.raises(ConfigError, match="is stripped, so there is nothing to keep"):
        refit(small, RandomCheckpoint(TINY_LLAMA), names=["*.q_proj.*"])
    refit(small, RandomCheckpoint(TINY_LLAMA, seed=1, name="other"))
    assert not open_engine(small, verify=True).stripped
    assert files(small)["plan.json"] == files(other)["plan.json"]
    shard = "weights/model-00001-of-00001.safetensors"
    assert files(small)[shard] == files(other)[shard]


def test_named_weights_are_replaced_and_others_kept(engine: Path, tiny_engine: Path, other: Path) -> None:
    report = refit(engine, RandomCheckpoint(TINY_LLAMA, seed=1, name="other"), names=["*.1.*.down_proj.*"])
    assert (report.weights, report.kept > 5) == (1, True)
    old, new, built = open_engine(tiny_engine), open_engine(engine, verify=True), open_engine(other)
    for buffer in new.plan.buffers:
        if buffer.kind in ("weight", "constant"):
            source = built if "1.mlp.down_proj" in buffer.name else old
            assert weight(new, buffer.name) == weight(source, buffer.name), buffer.name
    assert new.config.model.name == "tiny"


def test_a_fused_weight_is_made_anew_when_a_part_of_it_is_named(engine: Path, other: Path) -> None:
    refit(engine, RandomCheckpoint(TINY_LLAMA, seed=1), names=["model.layers.0.self_attn.q_proj.weight"])
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert weight(open_engine(engine), name) == weight(open_engine(other), name)


def test_a_refit_can_leave_the_engine_and_write_another(engine: Path, other: Path, tmp_path: Path) -> None:
    before = files(engine)
    refit(engine, RandomCheckpoint(TINY_LLAMA, seed=1, name="other"), output=tmp_path / "new.engine")
    assert files(engine) == before
    assert files(tmp_path / "new.engine")["config.json"] == files(other)["config.json"]


def without(name: str) -> Callable[[RandomCheckpoint], None]:
    return lambda c: c.tensors.pop(name) and None  # type: ignore[attr-defined]


def with_config(**values: Any) -> Callable[[RandomCheckpoint], None]:
    return lambda c: c.config.update(values)


def other_quant(c: RandomCheckpoint) -> None:
    made = RandomCheckpoint(TINY_LLAMA, quant="q8_0")
    c.tensors = made.tensors


def mixed_quants(c: RandomCheckpoint) -> None:
    c.tensors = RandomCheckpoint(TINY_LLAMA, quant=lambda n: "q8_0" if "k_proj" in n else "float32").tensors


def other_shape(c: RandomCheckpoint) -> None:
    made = RandomCheckpoint(TINY_LLAMA | {"intermediate_size": 128})
    c.tensors = made.tensors


def infinite(c: RandomCheckpoint) -> None:
    c.damage["model.layers.1.mlp.up_proj.weight"] = float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_config(architectures=["Qwen2ForCausalLM"]),
            "is a Qwen2ForCausalLM and .* a LlamaForCausalLM; rebuild",
        ),
        (
            with_config(rope_theta=5e5),
            r"in its config, rope_theta is 500000.0 and not 10000.0; reb",
        ),
        (with_config(tie_word_embeddings=False), "tie_word_embeddings is False and not True"),
        (with_config(attention_bias=True), "attention_bias is True and not absent"),
        (
            without("model.norm.weight"),
            "has no tensor model.norm.weight, which .* needs; give a whole",
        ),
        (other_quant, "has .* as q8_0, and the engine's plan stores float32; rebuild"),
        (mixed_quants, "q_proj.weight, .* as float32, q8_0, and the engine's plan stores float32; rebuild"),
        (other_shape, r"is 128 x 64, and .* was built from 96 x 64; rebuild"),
        (infinite, "model.layers.1.mlp.up_proj.weight has 1 NaN or infinite values"),
    ],
)
def test_another_checkpoint_is_refused_and_the_engine_stays(
    engine: Path, change: Callable[[RandomCheckpoint], None], message: str
) -> None:
    before = files(engine)
    checkpoint = RandomCheckpoint(TINY_LLAMA, seed=1)
    change(checkpoint)
    with pytest.raises(CheckpointError, match=message) as caught:
        refit(engine, checkpoint)
    assert "\n" not in str(caught.value)
    assert files(engine) == before
    assert [p.name for p in engine.parent.iterdir()] == [engine.name]


def test_what_does_not_change_the_model_may_differ(engine: Path) -> None:
    checkpoint = RandomCheckpoint(TINY_LLAMA, seed=1)
    checkpoint.config |= {"transformers_version": "9", "torch_dtype": "float16", "eos_token_id": 5, "x": None}
    refit(engine, checkpoint)


def test_a_name_that_fits_nothing_is_refused(engine: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weight of .* has a name like 'q_porj'; it has model\."):
        refit(engine, RandomCheckpoint(TINY_LLAMA), names=["q_porj"])


def test_damage_is_not_kept_under_a_new_hash(engine: Path) -> None:
    shard = next((engine / "weights").iterdir())
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(EngineError, match="does not have the SHA-256"):
        refit(engine, RandomCheckpoint(TINY_LLAMA), names=["*norm*"])


def test_values_a_pass_relied_on_are_looked_at_again(engine: Path) -> None:
    path = engine / "weights.json"
    sources = json.loads(path.read_text())
    a, b = (to_data(Source(f"model.layers.{i}.input_layernorm.weight")) for i in (0, 1))
    sources["conditions"] = [{"a": a, "b": b, "tolerance": 1e-6, "why": "share_norms"}]
    path.write_text(json.dumps(sources))
    manifest = json.loads((engine / "manifest.json").read_text())
    entry = next(f for f in manifest["files"] if f["path"] == "weights.json")
    entry["nbytes"], entry["sha256"] = path.stat().st_size, file_sha256(path)
    (engine / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"a pass \(share_norms\) that needs equal values, but .* dif"):
        refit(engine, RandomCheckpoint(TINY_LLAMA))


class OneTable(RandomCheckpoint):
    """A head beside the embedding, with its values unless ``apart``."""

    apart = False

    def read(self, name: str) -> HostTensor:
        return super().read(name if self.apart else name.replace("lm_head", "model.embed_tokens"))


def test_a_shared_embedding_stays_shared_only_while_the_head_is_equal(tmp_path: Path) -> None:
    config = TINY_LLAMA | {"tie_word_embeddings": False}
    engine = tmp_path / "shared.engine"
    build(OneTable(config), CONFIG, output=engine, check=False)
    assert [c.why for c in open_engine(engine).weight_sources().conditions] == ["share_embedding"]
    refit(engine, OneTable(config, seed=5))
    apart = OneTable(config, seed=5)
    apart.apart = True
    with pytest.raises(
        CheckpointError, match=r"\(share_embedding\) that needs equal values, but .* differ by"
    ):
        refit(engine, apart)
    del apart.tensors["lm_head.weight"]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"has no tensor lm_head.weight, which .* needs"):
        refit(engine, apart)


def test_conditions_compare_values_whatever_their_type() -> None:
    one = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensors = {
        "a": HostTensor("float32", (3, 2), one),
        "b": HostTensor("float16", (3, 2), one.astype(np.float16)),
        "c": HostTensor("float32", (3, 2), one + np.float32(1e-3)),
        "d": HostTensor("float32", (2, 2), one[:2]),
    }

    def check(b: str) -> str | None:
        condition = SameValues(a=Source("a"), b=Source(b), tolerance=1e-6, why="test")
        return broken(condition, tensors.__getitem__)

    assert check("a") is None
    assert check("b") is None
    assert check("c") == "a and c differ by 0.001"
    assert check("d") == "a and d have shapes [3, 2] and [2, 2]"


@pytest.mark.parametrize(
    "recipe",
    [
        Source("a"),
        Concat((Rows(Source("a"), 0, 4), PermuteRows(Source("b"), 2, 4))),
        AddScalar(Transpose(Source("a")), -1.0),
    ],
)
def test_recipes_survive_as_data(recipe: Any) -> None:
    assert from_data(json.loads(json.dumps(to_data(recipe)))) == recipe


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "is no recipe"),
        ({"type": "Exec", "name": "x"}, "there is no recipe 'Exec'"),
        ({"type": "Concat", "parts": []}, "recipe Concat has .* as parts"),
        ({"type": "Concat", "parts": [{"type": "Source", "name": "x"}, 3]}, "recipe Concat has .* as parts"),
        ({"type": "Source", "name": 3}, "recipe Source has 3 as name"),
        ({"type": "Transpose", "base": "x"}, "recipe Transpose has 'x' as base"),
        ({"type": "Rows", "base": {"type": "Source", "name": "x"}, "start": 0.5, "stop": 2}, "0.5 as start"),
        ({"type": "Source"}, "recipe Source has fields type"),
    ],
)
def test_data_that_is_no_recipe_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_data(data)


REFIT = """
import sys
from pelton.builder import refit as module
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint
class Slow(RandomCheckpoint):
    def read(self, name):
        print(name, flush=True)
        return super().read(name)
module.refit(sys.argv[1], Slow(TINY_LLAMA, seed=1, name="other"))
"""


@pytest.mark.parametrize("after", [1, 9, 17])
def test_a_killed_refit_leaves_the_old_engine(engine: Path, after: int) -> None:
    before = files(engine)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", REFIT, str(engine)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout is not None
        for _ in range(after):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert files(engine) == before
    open_engine(engine, verify=True)
    # The next one removes what the killed one left.
    refit(engine, RandomCheckpoint(TINY_LLAMA, seed=1, name="other"))
    assert [p.name for p in engine.parent.iterdir()] == [engine.name]


def test_running_sessions_keep_the_weights_they_opened(engine: Path, other: Path) -> None:
    with Session(engine, kv_blocks=4, runner="reference") as session:
        name = "model.norm.weight"
        before = weight(session.engine, name)
        refit(engine, RandomCheckpoint(TINY_LLAMA, seed=1, name="other"))
        assert weight(session.engine, name) == before
    assert weight(open_engine(engine), name) == weight(open_engine(other), name)


def test_nothing_is_written_inside_an_engine(engine: Path) -> None:
    before = sorted(engine.rglob("*"))
    inner = engine / "weights" / "inner.engine"
    for write in (
        lambda: strip(engine, output=inner),
        lambda: refit(engine, RandomCheckpoint(TINY_LLAMA), output=inner),
        lambda: build(RandomCheckpoint(TINY_LLAMA), CONFIG, output=inner),
    ):
        with pytest.raises(ConfigError, match="lies inside the engine"):
            write()
    assert sorted(engine.rglob("*")) == before
