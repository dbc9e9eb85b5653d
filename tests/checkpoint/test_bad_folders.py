"""Folders and names that cannot be used: each ends in one sentence that says what and where."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pelton.engine.config import BuildConfig
from pelton.errors import CheckpointError, MissingDependencyError
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.engine_cache import cached_engine_path
from tests.checkpoint.spoil import NORM, cut, edit, only, rewrite_header, weights_to_pickle

#: what is done to a good folder -> what the error says
FOLDER_CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda d: only(d), "is an empty folder"),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json: it is not a Hugging Face"),
    "config not JSON": (
        lambda d: (d / "config.json").write_text('{\n "a": ]'),
        "config.json is not JSON: Expecting value at line 2, column 7",
    ),
    "config not an object": (
        lambda d: (d / "config.json").write_text("[]"),
        "config.json is not a JSON object",
    ),
    "config not text": (
        lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"),
        "config.json is not JSON text",
    ),
    "config is a folder": (
        lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
        "config.json cannot be read: Is a directory",
    ),
    "no architecture": (
        lambda d: edit(d / "config.json", architectures=None),
        "does not name its architecture",
    ),
    "architectures empty": (
        lambda d: edit(d / "config.json", architectures=[]),
        "does not name its architecture",
    ),
    "quantised": (
        lambda d: edit(d / "config.json", quantization_config={"quant_method": "hqq", "bits": 4}),
        "is quantised with hqq, which Pelton does not read (it reads gptq, awq, ",
    ),
    "generation config not JSON": (
        lambda d: (d / "generation_config.json").write_text("{"),
        "generation_config.json is not JSON",
    ),
    "pickles only": (weights_to_pickle, "has its weights as Python pickles (pytorch_model.bin)"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has a config.json but no weights"),
    "adapter": (
        lambda d: (only(d, "config.json"), (d / "adapter_config.json").write_text("{}")),
        "is a LoRA adapter, not a model; merge it into its base model first",
    ),
    "engine": (
        lambda d: [(d / name).write_text("{}") for name in ("manifest.json", "plan.json")],
        "is an engine, built already: give it to pelton run or pelton serve",
    ),
    "several GGUF files": (
        lambda d: (only(d), [(d / f"{n}.gguf").write_bytes(b"GGUF") for n in "ab"]),
        "has 2 GGUF files; give one of them",
    ),
    "several files, no index": (
        lambda d: [(d / "model.safetensors").rename(d / "a.safetensors"), (d / "b.safetensors").touch()],
        "has 2 safetensors files but neither model.safetensors nor model.safetensors.index.json",
    ),
    "no tokenizer": (
        lambda d: (d / "tokenizer.json").unlink(),
        "has no tokenizer: neither tokenizer.json, tokenizer.model, vocab.json, tekken.json nor tiktoken",
    ),
    "tokenizer config not JSON": (
        lambda d: (d / "tokenizer_config.json").write_text("nope"),
        "tokenizer_config.json is not JSON",
    ),
    "weights empty": (
        lambda d: (d / "model.safetensors").write_bytes(b""),
        "model.safetensors is truncated: its header extends beyond the file's 0 bytes; download it again",
    ),
    "header cut": (lambda d: cut(d / "model.safetensors", 100), "is truncated: its header"),
    "data cut": (lambda d: cut(d / "model.safetensors", 50_000), "is truncated: tensor "),
    "last byte missing": (
        lambda d: cut(d / "model.safetensors", (d / "model.safetensors").stat().st_size - 1),
        "is truncated: tensor ",
    ),
    "not safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"PK\x03\x04" * 99),
        "is damaged or not a safetensors file: its header claims",
    ),
    "header not JSON": (
        lambda d: (d / "model.safetensors").write_bytes((3).to_bytes(8, "little") + b"{x}"),
        "is damaged or not a safetensors file: its header is not JSON",
    ),
    "header a list": (
        lambda d: (d / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]"),
        "its header is not a JSON object",
    ),
    "entry without shape": (
        lambda d: rewrite_header(d, lambda h: h[NORM].pop("shape")),
        f"its entry for tensor {NORM} is malformed",
    ),
    "entry not an object": (
        lambda d: rewrite_header(d, lambda h: h.update({NORM: 3})),
        f"its entry for tensor {NORM} is malformed",
    ),
    "negative offsets": (
        lambda d: rewrite_header(d, lambda h: h[NORM].update(data_offsets=[-8, 248])),
        f"its entry for tensor {NORM} is malformed",
    ),
    "empty shape": (
        lambda d: rewrite_header(d, lambda h: h[NORM].update(shape=[2**60, 0])),
        f"its entry for tensor {NORM} is malformed",
    ),
    "shape and bytes disagree": (
        lambda d: rewrite_header(d, lambda h: h[NORM].update(shape=[65])),
        f"tensor {NORM} has 256 bytes, not the 260 of its shape and type",
    ),
    "git lfs pointer": (
        lambda d: (d / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        "is a Git LFS pointer, not the weights: run git lfs pull",
    ),
}


@pytest.mark.parametrize("case", FOLDER_CASES)
def test_bad_folder(case: str, good_folder: Path, tmp_path: Path) -> None:
    spoil, message = FOLDER_CASES[case]
    folder = tmp_path / "model"
    shutil.copytree(good_folder, folder)
    spoil(folder)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    open_checkpoint(good_folder)


SHARD_CASES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "shard missing": (lambda d, s: s.unlink(), "lacks 1 of "),
    "shard cut": (lambda d, s: cut(s, s.stat().st_size // 2), "is truncated"),
    "index without map": (
        lambda d, s: edit(d / "model.safetensors.index.json", weight_map=None),
        "has no weight_map",
    ),
    "index names a tensor the shard lacks": (
        lambda d, s: edit(d / "model.safetensors.index.json", weight_map={"x": s.name}),
        "says tensor x is in ",
    ),
    "shard outside the folder": (
        lambda d, s: edit(d / "model.safetensors.index.json", weight_map={"x": "../other.safetensors"}),
        "names a shard outside its folder: ../other.safetensors",
    ),
    "index not JSON": (
        lambda d, s: (d / "model.safetensors.index.json").write_text(""),
        "model.safetensors.index.json is not JSON",
    ),
}


@pytest.mark.parametrize("case", SHARD_CASES)
def test_bad_shards(case: str, good_shards: Path, tmp_path: Path) -> None:
    spoil, message = SHARD_CASES[case]
    folder = tmp_path / "model"
    shutil.copytree(good_shards, folder)
    spoil(folder, min(folder.glob("*.safetensors")))
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_tensor_in_two_shards(good_shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good_shards, folder)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    tensors = load_file(second)
    repeated = next(iter(load_file(first)))
    save_file({**tensors, repeated: torch.zeros(1)}, second)
    with pytest.raises(CheckpointError, match=f"tensor {repeated} of .* is in both"):
        open_checkpoint(folder)


# --- names that are no checkpoint -----------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"does not exist; give a Hugging Face folder, a .gguf file or a hub id"
    ):
        open_checkpoint(tmp_path / "nothing")
    for name in ("", "no-such-model", "./a/b", "folder/model.gguf"):
        with pytest.raises(CheckpointError, match="does not exist"):
            open_checkpoint(name or "nothing-at-all")


def test_a_file_that_is_no_checkpoint(good_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        CheckpointError, match=r"is not a checkpoint: give a Hugging Face folder or a .gguf file"
    ):
        open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match="is one file of a checkpoint; give its folder"):
        open_checkpoint(good_folder / "model.safetensors")


def test_a_hub_id_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r"needs huggingface_hub: pip install 'pelton\[hub\]'"):
        open_checkpoint("someone/some-model")


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def offline(*args, **kwargs):
        raise ConnectionError("no route to host\nmore lines")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    message = "someone/some-model is not a path here and could not be fetched from the hub: no route to host"
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint("someone/some-model")
    assert "\n" not in str(caught.value)


def test_a_hub_id_opens_what_was_downloaded_under_its_name(
    good_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--someone--some-model" / "snapshots" / "0123abc"
    shutil.copytree(good_folder, snapshot)
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: str(snapshot))
    assert open_checkpoint("someone/some-model").name == "some-model"
    assert open_checkpoint(snapshot).name == "some-model"
    assert cached_engine_path(snapshot, BuildConfig()).name.startswith("some-model-")


# --- tokenizers -----------------------------------------------------------------------------------------


TOKENIZER_CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "damaged": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json is damaged: "),
    "not JSON": (lambda d: (d / "tokenizer.json").write_text("nope"), "tokenizer.json is damaged: "),
    "template a number": (
        lambda d: edit(d / "tokenizer_config.json", chat_template=3),
        "has a chat_template that is neither text nor a list",
    ),
    "template without a name": (
        lambda d: edit(d / "tokenizer_config.json", chat_template=[{"template": "x"}]),
        "has a chat_template entry without name and template",
    ),
    "SentencePiece model damaged": (
        lambda d: [(d / "tokenizer.json").unlink(), (d / "tokenizer.model").write_bytes(b"\x0a\x50abc")],
        "tokenizer.model is damaged or not a SentencePiece model",
    ),
    "SentencePiece model empty": (
        lambda d: [(d / "tokenizer.json").unlink(), (d / "tokenizer.model").write_bytes(b"")],
        "tokenizer.model is damaged or not a SentencePiece model: it has no pieces",
    ),
}


@pytest.mark.parametrize("case", TOKENIZER_CASES)
def test_bad_tokenizers(case: str, folder: Path, tmp_path: Path) -> None:
    spoil, message = TOKENIZER_CASES[case]
    spoil(folder)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_checkpoint(folder).write_tokenizer(tmp_path)
    assert str(folder) in str(caught.value)
