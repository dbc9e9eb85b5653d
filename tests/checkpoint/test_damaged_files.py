"""Whatever happens to the bytes of a checkpoint, the answer is a checkpoint or a ``CheckpointError``."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton.errors import CheckpointError
from pelton.models.checkpoint import assert_finite, open_checkpoint
from tests.checkpoint.makers import tiny_gguf, tiny_hf_checkpoint

FAST = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf("llama", tmp_path_factory.mktemp("gguf"), quant="Q4_1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_checkpoint("llama", tmp_path_factory.mktemp("hf"))


def message_of_using(path: Path, directory: Path) -> str:
    """Do everything a build does with a checkpoint; the refusal, or nothing where it went well."""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.source(name)
            assert_finite(checkpoint.read(name), name)
        checkpoint.write_tokenizer(directory)
        checkpoint.fingerprint()
    except CheckpointError as error:
        return str(error)
    return ""


def header_end(raw: bytes) -> int:
    """Where the tensor data of the tiny GGUF file roughly begins."""
    return raw.rindex(b"output_norm.weight") + 64


@FAST
@given(data=st.data())
def test_a_gguf_file_cut_anywhere_is_refused(gguf_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = gguf_file.read_bytes()
    end = header_end(raw)
    keep = data.draw(st.integers(0, end) | st.integers(0, last_data_byte(gguf_file) - 1))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(raw[:keep])
    with pytest.raises(CheckpointError, match=r"truncated|not a GGUF file"):
        open_checkpoint(cut)


def last_data_byte(gguf_file: Path) -> int:
    """End of the last tensor; the file may have padding after it, which nobody misses."""
    from pelton.models.checkpoint.gguf_file import GGUFFile

    return max(t.offset + t.nbytes for t in GGUFFile(gguf_file).tensors.values())


@FAST
@given(data=st.data())
def test_a_gguf_file_with_wrong_bytes_is_refused_or_read(
    gguf_file: Path, tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(gguf_file.read_bytes())
    end = header_end(bytes(raw))
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, end), st.integers(0, 255)), max_size=3)):
        raw[at] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(raw)
    assert "\n" not in message_of_using(damaged, tmp_path)


@FAST
@given(keep=st.integers(0, 10**9))
def test_a_safetensors_file_cut_anywhere_is_refused(folder: Path, tmp_path: Path, keep: int) -> None:
    copy = copy_folder(folder, tmp_path)
    raw = (folder / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(raw[: keep % len(raw)])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(copy)


@FAST
@given(data=st.data())
def test_a_safetensors_file_with_wrong_bytes_is_refused_or_read(
    folder: Path, tmp_path: Path, data: st.DataObject
) -> None:
    copy = copy_folder(folder, tmp_path)
    raw = bytearray((folder / "model.safetensors").read_bytes())
    end = 8 + int.from_bytes(raw[:8], "little") + 8
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, end), st.integers(0, 255)), max_size=3)):
        raw[at] = value
    (copy / "model.safetensors").write_bytes(raw)
    assert "\n" not in message_of_using(copy, tmp_path)


@FAST
@given(name=st.sampled_from(["config.json", "tokenizer_config.json", "tokenizer.json"]), data=st.data())
def test_a_json_file_with_wrong_bytes_is_refused_or_read(
    folder: Path, tmp_path: Path, name: str, data: st.DataObject
) -> None:
    copy = copy_folder(folder, tmp_path)
    raw = bytearray((folder / name).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : data.draw(st.integers(at, len(raw)))] = data.draw(st.binary(max_size=3))
    (copy / name).write_bytes(raw)
    message = message_of_using(copy, tmp_path)
    assert not message or str(copy) in message


def copy_folder(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy
