"""Builds as a whole: what is written, reported, refused, and left behind when one fails."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

from pelton.builder import weights
from pelton.builder.build import build
from pelton.builder.report import BuildReport
from pelton.builder.weights import WeightSpec
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.shards import Shards
from pelton.errors import BuildError, CheckpointError, ConfigError
from pelton.ir.tensors import HostTensor
from pelton.kernels.layouts import LAYOUTS
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

WIDE = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
SMALL = BuildConfig(max_batch_size=2, max_num_tokens=32)


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    said: list[str] = []
    stages: dict[str, int] = {}
    report = build(
        RandomCheckpoint(TINY_LLAMA),
        SMALL,
        output=tmp_path / "e",
        notify=said.append,
        progress=lambda stage, done, total: stages.update({stage: done}),
    )
    assert isinstance(report, BuildReport)
    engine = open_engine(tmp_path / "e", verify=True)
    assert report.machine is not None
    assert report.machine.engine_bytes == engine.nbytes + (engine.path / "manifest.json").stat().st_size
    assert report.num_parameters == engine.config.model.num_parameters
    assert report.memory.weights == engine.config.memory.weights == sum(report.stored.values())
    assert report.quality is not None
    assert report.quality.max_error < 1e-5
    assert report.quality.bound == "max_error <= 1e-04"
    assert {p.name: p.changed for p in report.passes}["fuse_qkv"] == 2
    # Nothing can be timed against another here, so there is a row per op and shapes for all steps.
    assert sum(t.calls for t in report.tactics) == len(engine.plan.instructions)
    assert said[0].startswith("needs weights ")
    assert stages["weights"] == report.memory.weights
    stages_of_a_build = {"open", "passes", "trace", "plan", "tactics", "tokenizer", "weights", "check"}
    assert stages_of_a_build == set(report.machine.seconds)
    text = report.text()
    assert text.splitlines()[0].startswith("  checkpoint  tiny  68.")
    assert "fuse_qkv 2" in text
    assert "top-1 agreement 100.0%" in text
    assert engine.report()["checkpoint"] == "tiny"


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    """Nothing of the machine or the clock is stored: times of day, free memory, where the engine was put.
    Times of tactics are the same in both builds, because they share a timing cache."""
    for name in ("a", "b", "b"):  # the second time it is replaced, which is told
        build(
            RandomCheckpoint(TINY_LLAMA, quant="q8_0"),
            SMALL,
            output=tmp_path / name,
            timing_cache=tmp_path / "times.json",
        )
    files = {p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert files == {p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*") if p.is_file()}
    assert Path("report.json") in files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_weights_are_safetensors_that_hold_the_checkpoints_values(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(TINY_LLAMA)
    build(checkpoint, SMALL, output=tmp_path / "e", check=False)
    (path,) = (tmp_path / "e" / "weights").iterdir()
    raw = safetensors.numpy.load_file(path)
    shards = Shards([path])
    assert set(raw) == set(shards.meta)
    for name, blob in raw.items():
        assert blob.dtype == np.uint8
        assert blob.size % 64 == 0
        np.testing.assert_array_equal(blob[: shards[name].size], shards[name])
        assert shards[name].ctypes.data % 64 == 0
    meta = shards.meta["model.layers.0.self_attn.qkv_proj.weight"]
    values = LAYOUTS[meta.layout].unpack(shards[meta.name], meta.quant, meta.shape)
    parts = [checkpoint.read(f"model.layers.0.self_attn.{p}_proj.weight").data for p in "qkv"]
    np.testing.assert_array_equal(values, np.concatenate(parts))


@pytest.mark.parametrize(
    ("quant", "config", "bound", "stored"),
    [
        ("bfloat16", {}, "max_error", "bfloat16"),
        ("bfloat16", {"kv_dtype": "bfloat16"}, "max_error", "bfloat16"),
        ("bfloat16", {"dtype": "float32"}, "max_error", "float32"),
        ("float16", {}, "max_error", "float16"),
        ("float16", {"dtype": "float32"}, "max_error", "float32"),
        ("float16", {"dtype": "bfloat16"}, "kl_mean", "bfloat16"),
        ("float32", {"dtype": "bfloat16"}, "kl_mean", "bfloat16"),
        ("q4_1", {"activations": "float32"}, "max_error", "q4_1"),
        ("q8_0", {}, "kl_mean", "q8_0"),
        ("q4_k", {"activations": "float32"}, "max_error", "q4_k"),
        ("q6_k", {}, "kl_mean", "q6_k"),
    ],
)
def test_value_types_are_kept_and_held_to_the_right_bound(
    tmp_path: Path, quant: str, config: dict[str, str], bound: str, stored: str
) -> None:
    settings = BuildConfig(max_batch_size=2, max_num_tokens=32, **config)
    report = build(RandomCheckpoint(WIDE, quant=quant), settings, output=tmp_path / "e")
    assert stored in report.stored
    assert report.quality is not None
    assert report.quality.bound.startswith(bound)


def test_a_mixed_checkpoint_is_not_stacked_where_types_differ(tmp_path: Path) -> None:
    def quant(name: str) -> str:
        return "q6_k" if "v_proj" in name else "q4_k"

    report = build(RandomCheckpoint(WIDE, quant=quant), SMALL, output=tmp_path / "e")
    fused = next(p for p in report.passes if p.name == "fuse_qkv")
    assert (fused.changed, sum(fused.skipped.values())) == (0, 1)
    assert "types differ" in next(iter(fused.skipped))


def test_an_engine_is_replaced_and_said_so(tmp_path: Path) -> None:
    output = tmp_path / "e"
    build(RandomCheckpoint(TINY_LLAMA), SMALL, output=output, check=False)
    before = open_engine(output).engine_id
    report = build(RandomCheckpoint(TINY_LLAMA, seed=1), SMALL, output=output, check=False)
    assert report.machine is not None
    assert report.machine.notes == ("e existed and is replaced",)
    assert open_engine(output, verify=True).engine_id != before
    assert leftovers(tmp_path) == ["e"]


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="notes exists and is not an engine; remove it or choose another"):
        build(RandomCheckpoint(TINY_LLAMA), output=tmp_path / "notes")
    with pytest.raises(ConfigError, match=r"there is no directory .*missing; make it first"):
        build(RandomCheckpoint(TINY_LLAMA), output=tmp_path / "missing" / "e")
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "years of work"


def test_non_finite_weights_name_the_tensor_and_leave_nothing(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(TINY_LLAMA)
    checkpoint.damage["model.layers.1.mlp.up_proj.weight"] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has 1 NaN"):
        build(checkpoint, SMALL, output=tmp_path / "e")
    assert leftovers(tmp_path) == []


def test_a_disk_too_small_is_said_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=500))
    with pytest.raises(ConfigError, match=rf"the engine needs .* in {tmp_path}, where 500 B are free"):
        build(RandomCheckpoint(TINY_LLAMA), SMALL, output=tmp_path / "e")
    assert leftovers(tmp_path) == []


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pelton.builder.build.write_weights", full)
    with pytest.raises(ConfigError, match=rf"the disk of {tmp_path} is full"):
        build(RandomCheckpoint(TINY_LLAMA), SMALL, output=tmp_path / "e")
    assert leftovers(tmp_path) == []


def test_a_failed_rebuild_keeps_the_engine(tmp_path: Path) -> None:
    output = tmp_path / "e"
    build(RandomCheckpoint(TINY_LLAMA), SMALL, output=output, check=False)
    before = open_engine(output).engine_id
    checkpoint = RandomCheckpoint(TINY_LLAMA)
    checkpoint.damage["model.norm.weight"] = float("inf")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        build(checkpoint, SMALL, output=output)
    assert open_engine(output, verify=True).engine_id == before
    assert leftovers(tmp_path) == ["e"]


def test_a_wrong_engine_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of streaming: one row of one weight is written wrongly."""

    unpacked = weights.unpacked

    def defective(spec: WeightSpec, read: Callable[[str], HostTensor]) -> tuple[HostTensor, str]:
        tensor, note = unpacked(spec, read)
        if spec.name == "model.layers.1.self_attn.qkv_proj.weight":
            tensor.data[70] *= np.float32(1.5)
        return tensor, note

    monkeypatch.setattr(weights, "unpacked", defective)
    with pytest.raises(BuildError, match=r"logits differ from the model's: max_error .* is beyond 1e-04"):
        build(RandomCheckpoint(TINY_LLAMA), SMALL, output=tmp_path / "e")
    assert leftovers(tmp_path) == []


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(TINY_LLAMA)
    tensors = dict(checkpoint.tensors)
    del tensors["model.norm.weight"]
    checkpoint.tensors = tensors
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        build(checkpoint, SMALL, output=tmp_path / "e")


def _build_until_killed(output: str) -> None:
    def stall(stage: str, done: int, total: int) -> None:
        if stage == "weights" and done:
            Path(output + ".stalled").touch()
            time.sleep(60)

    build(RandomCheckpoint(TINY_LLAMA), SMALL, output=output, progress=stall)


def test_a_killed_build_leaves_no_engine_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    output = tmp_path / "e"
    process = multiprocessing.get_context("spawn").Process(target=_build_until_killed, args=(str(output),))
    process.start()
    deadline = time.monotonic() + 120
    while not (tmp_path / "e.stalled").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (tmp_path / "e.stalled").unlink()
    assert not output.exists()
    assert any(".building-" in name for name in leftovers(tmp_path))
    build(RandomCheckpoint(TINY_LLAMA), SMALL, output=output, check=False)
    open_engine(output, verify=True)
    assert leftovers(tmp_path) == ["e"]


def test_a_vision_tower_and_a_copy_of_the_tied_head_are_left_out(tmp_path: Path) -> None:
    text = {
        **{key: TINY_LLAMA[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")},
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    checkpoint = RandomCheckpoint(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text,
            "max_position_embeddings": 64,
        }
    )
    embedding = checkpoint.tensors["language_model.model.embed_tokens.weight"]
    head = replace(embedding, name="language_model.lm_head.weight")
    tower = replace(embedding, name="vision_tower.embeddings.weight")
    checkpoint.tensors = {**checkpoint.tensors, head.name: head, tower.name: tower}
    report = build(checkpoint, SMALL, output=tmp_path / "e")
    assert report.quality is not None
    assert report.quality.max_error < 1e-5
    assert any("language_model.lm_head.weight differs from" in note for note in report.notes)
    assert any(note.startswith("left out 1 tensor (vision_tower.") for note in report.notes)


def test_a_pass_can_be_switched_off(tmp_path: Path) -> None:
    shown: list[str] = []
    config = BuildConfig(block_size=8, max_batch_size=2, max_num_tokens=16, passes={"fuse_qkv": "off"})
    report = build(RandomCheckpoint(TINY_LLAMA), config, output=tmp_path / "e", explain=shown.append)
    assert {p.name: p.note for p in report.passes}["fuse_qkv"] == "switched off"
    assert "fuse_qkv off" in report.text()
    assert not any("qkv_proj" in b.name for b in open_engine(tmp_path / "e").plan.buffers)
    assert [text.split("\n")[0] for text in shown] == [p.name for p in report.passes if p.changed]
