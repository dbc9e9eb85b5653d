"""Checkpoints that cannot be used: each ends in one sentence that says what and where."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pelton.errors import CheckpointError, MissingDependencyError
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import assert_finite, check_tensors, open_checkpoint
from pelton.quant.blocks import quantize
from tests.checkpoint.makers import tiny_gguf, tiny_hf_checkpoint, tiny_model


@pytest.fixture(scope="session")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_checkpoint("llama", tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="session")
def good_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_checkpoint("llama", tmp_path_factory.mktemp("shards"), max_shard_size="150KB")


@pytest.fixture(scope="session")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf("llama", tmp_path_factory.mktemp("gguf"))


def edit(path: Path, **changes) -> None:
    """Change keys of a JSON file; None removes one."""
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def change_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def rewrite_header(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the JSON index of model.safetensors and leave the data alone."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def only(folder: Path, *names: str) -> None:
    """Remove every file but these."""
    for file in folder.iterdir():
        if file.name not in names:
            file.unlink()


def weights_to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


NORM = "model.norm.weight"

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
        lambda d: edit(d / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "is quantised with gptq, which Pelton does not read yet; use the unquantised checkpoint or a GGUF ",
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


def first_string(raw: bytes, text: bytes) -> int:
    at = raw.index(text)
    return at - 8


def patch(path: Path, at: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


def patch_tensor(path: Path, name: bytes, at: int, data: bytes) -> None:
    """Change the index entry of tensor ``name``, ``at`` bytes after its name."""
    patch(path, path.read_bytes().index(name) + len(name) + at, data)


GGUF_CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda f: f.write_bytes(b""), "is truncated: its header extends beyond the file's 0 bytes"),
    "wrong magic": (
        lambda f: patch(f, 0, b"GGML"),
        "is not a GGUF file: it starts with b'GGML', not b'GGUF'",
    ),
    "version 1": (
        lambda f: patch(f, 4, struct.pack("<I", 1)),
        "is GGUF version 1; Pelton reads versions 2 and 3",
    ),
    "version 9": (
        lambda f: patch(f, 4, struct.pack("<I", 9)),
        "is GGUF version 9; Pelton reads versions 2 and 3",
    ),
    "big endian": (lambda f: patch(f, 4, struct.pack(">I", 3)), "is a big-endian GGUF file"),
    "header cut": (lambda f: cut(f, 20), "is truncated: its header"),
    "metadata cut": (lambda f: cut(f, 300), "is truncated: "),
    "data cut": (lambda f: cut(f, f.stat().st_size - 1000), "is truncated: tensor "),
    "absurd tensor count": (
        lambda f: patch(f, 8, struct.pack("<Q", 2**60)),
        f"is truncated: {2**60} tensors and ",
    ),
    "absurd string": (lambda f: patch(f, 24, struct.pack("<Q", 2**63)), "is truncated: its header"),
    "key not UTF-8": (lambda f: patch(f, 32, b"\xff\xfe"), "is damaged: a name in its header is not UTF-8"),
    "unknown value type": (
        lambda f: patch(f, 32 + len("general.architecture"), struct.pack("<I", 99)),
        "is damaged: metadata general.architecture has unknown value type 99",
    ),
    "unknown tensor type": (
        lambda f: patch_tensor(f, b"output_norm.weight", 4 + 8, struct.pack("<I", 250)),
        "tensor output_norm.weight of ",
    ),
    "integer weights": (
        lambda f: patch_tensor(f, b"output_norm.weight", 4 + 8, struct.pack("<I", 26)),
        "tensor output_norm.weight has type int32, which is no type for weights",
    ),
    "rows no multiple of a block": (
        lambda f: patch_tensor(f, b"output_norm.weight", 4 + 8, struct.pack("<I", 14)),
        "tensor output_norm.weight has rows of 64 values, no multiple of q6_k's block of 256",
    ),
    "blocks in a vector": (
        lambda f: patch_tensor(f, b"output_norm.weight", 4 + 8, struct.pack("<I", 8)),
        "tensor output_norm.weight has 1 dimensions of q8_0 blocks; only matrices can be quantised",
    ),
    "too many dimensions": (
        lambda f: patch_tensor(f, b"output_norm.weight", 0, struct.pack("<I", 5)),
        "is damaged: tensor output_norm.weight has 5 dimensions",
    ),
    "empty dimension": (
        lambda f: patch_tensor(f, b"output_norm.weight", 4, struct.pack("<Q", 0)),
        "is damaged: tensor output_norm.weight has an empty dimension",
    ),
    "misaligned tensor": (
        lambda f: patch_tensor(f, b"output_norm.weight", 4 + 8 + 4, struct.pack("<Q", 3)),
        "is damaged: tensor output_norm.weight is not aligned to 32",
    ),
}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_bad_gguf_bytes(case: str, good_gguf: Path, tmp_path: Path) -> None:
    spoil, message = GGUF_CASES[case]
    file = tmp_path / "model.gguf"
    shutil.copy(good_gguf, file)
    spoil(file)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_checkpoint(file)
    assert str(file) in str(caught.value)
    open_checkpoint(good_gguf)


METADATA_CASES: dict[str, tuple[dict, str]] = {
    "architecture unknown": (
        {"general.architecture": "mamba"},
        "has architecture 'mamba', which Pelton does not support (supported: gemma, gemma2, gemma3, gpt2, ",
    ),
    "split": ({"split.count": 3}, "is one of 3 shards of a split GGUF file; join them first"),
    "experts": ({"llama.expert_count": 8}, "is a mixture of experts (8 experts)"),
    "key missing": ({"llama.embedding_length": None}, "lacks the metadata llama.embedding_length"),
    "key of another type": (
        {"llama.block_count": "three"},
        "has llama.block_count = 'three', not an integer",
    ),
    "heads vary": (
        {"llama.attention.head_count_kv": [2, 1, 2]},
        "has llama.attention.head_count_kv varying by layer, which Pelton does not support",
    ),
    "number of another type": (
        {"llama.rope.freq_base": "ten thousand"},
        "has llama.rope.freq_base = 'ten thousand', not a positive number",
    ),
    "negative number": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -2.0},
        "has llama.rope.scaling.factor = -2.0, not a positive number",
    ),
    "no heads": (
        {"llama.attention.head_count": 0},
        "has llama.attention.head_count = 0, which must be positive",
    ),
    "rows do not divide into heads": (
        {"llama.attention.head_count": 5},
        "is damaged: the 64 rows of blk.0.attn_q.weight do not divide into 5 heads",
    ),
    "values wider than keys": (
        {"llama.attention.value_length": 32},
        "has keys of 16 and values of 32 per head",
    ),
    "RoPE scaling unknown": (
        {"llama.rope.scaling.type": "spiral"},
        "uses RoPE scaling 'spiral', which Pelton does not know (known: none, linear, yarn, longrope)",
    ),
    "no tokenizer": ({"tokenizer.ggml.model": None}, "carries no tokenizer"),
    "tokenizer kind unknown": ({"tokenizer.ggml.model": "rwkv"}, "has a tokenizer of kind 'rwkv'"),
    "pre-tokenizer unknown": (
        {"tokenizer.ggml.pre": "newest-bpe"},
        "uses the pre-tokenizer 'newest-bpe', which Pelton does not know (known: bloom, codeshell, command-r",
    ),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "has a gpt2 tokenizer without tokenizer.ggml.tokens"),
    "no merges": ({"tokenizer.ggml.merges": None}, "has a gpt2 tokenizer without tokenizer.ggml.merges"),
    "types too few": ({"tokenizer.ggml.token_type": [1, 1]}, "has 288 tokens but 2 token types"),
    "eos beyond the tokens": (
        {"tokenizer.ggml.eos_token_id": 5000},
        "has tokenizer.ggml.eos_token_id = 5000, beyond its 288 tokens",
    ),
    "BOS wanted but unnamed": (
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
        "asks for BOS before every text but names no BOS token",
    ),
    "alignment": ({"general.alignment": 3}, "is damaged: alignment 3 is not a power of two"),
}


@pytest.mark.parametrize("case", METADATA_CASES)
def test_bad_gguf_metadata(case: str, tmp_path: Path) -> None:
    metadata, message = METADATA_CASES[case]
    file = tiny_gguf("llama", tmp_path, metadata=metadata)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_checkpoint(file)
    assert str(file) in str(caught.value)


def test_a_tensor_the_architecture_lacks(tmp_path: Path) -> None:
    extra = {f"blk.{i}.ssm_a.weight": np.zeros(4, np.float32) for i in range(4)}
    file = tiny_gguf("llama", tmp_path, tensors=extra)
    message = "has 4 tensors that a llama model does not have: blk.0.ssm_a.weight, blk.1.ssm_a.weight, "
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(file)


def test_a_gguf_without_an_embedding(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("output_norm.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"has no token_embd.weight: it is not a language model"):
        open_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("merge", "message"),
    [("hello", "has a merge that is not two tokens: 'hello'"), ("zz qq", "has a damaged tokenizer: ")],
)
def test_bad_merges_are_found_when_the_tokenizer_is_written(merge: str, message: str, tmp_path: Path) -> None:
    file = tiny_gguf("llama", tmp_path, metadata={"tokenizer.ggml.merges": [merge]})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(file).write_tokenizer(tmp_path)


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


def test_a_hub_id_opens_what_was_downloaded(good_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: str(good_folder))
    assert open_checkpoint("someone/some-model").name == "some-model"


# --- tensors against the architecture ---------------------------------------------------------------------


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(good_folder, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def expected() -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tiny_model("llama").state_dict().items()}


TENSOR_CASES: dict[str, tuple[Callable[[dict], object], str]] = {
    "missing": (
        lambda t: [t.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 2)],
        "2 tensors (model.layers.0.mlp.up_proj.weight, model.layers.2.mlp.up_proj.weight) missing",
    ),
    "many missing": (
        lambda t: [t.pop(name) for name in list(t) if "self_attn" in name],
        "12 tensors (model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight, "
        "model.layers.0.self_attn.v_proj.weight and 9 more) missing",
    ),
    "unexpected": (
        lambda t: t.update({"model.layers.0.extra": torch.ones(1)}),
        "1 tensor (model.layers.0.extra) unexpected",
    ),
    "mis-shaped": (
        lambda t: t.update({NORM: torch.ones(65)}),
        f"wrong shape: {NORM} is 65, not 64",
    ),
    "transposed": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}),
        "wrong shape: lm_head.weight is 64 x 288, not 288 x 64",
    ),
    "of a type for no weights": (
        lambda t: t.update({NORM: torch.ones(64, dtype=torch.int64)}),
        f"unsupported type: {NORM} is int64",
    ),
    "float8": (
        lambda t: t.update({NORM: torch.ones(64).to(torch.float8_e4m3fn)}),
        f"unsupported type: {NORM} is float8_e4m3",
    ),
}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors_that_do_not_fit(case: str, folder: Path, expected: dict, tmp_path: Path) -> None:
    change, message = TENSOR_CASES[case]
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        check_tensors(expected, open_checkpoint(folder))
    assert "model does not match its architecture LlamaForCausalLM" in str(caught.value)


def test_reading_a_type_for_no_weights_is_refused(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({NORM: torch.ones(64, dtype=torch.int64)}))
    message = f"tensor {NORM} of model has type int64, which is no type for weights"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).read(NORM)


def test_harmless_and_ignored_tensors_pass(folder: Path, expected: dict) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.1.mtp": torch.ones(1, dtype=torch.int64),
    }
    change_tensors(folder, lambda t: t.update(extra))
    notes = check_tensors(expected, open_checkpoint(folder), ignore=("*.mtp",))
    assert len(notes) == 1
    assert notes[0].startswith("ignored 2 tensors (")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_non_finite_weights_are_named(dtype: str, value: float, tmp_path: Path) -> None:
    folder = tiny_hf_checkpoint("llama", tmp_path, dtype=dtype)
    change_tensors(folder, lambda t: t[NORM].__setitem__(5, value))
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.tensors:
        if name != NORM:
            assert_finite(checkpoint.read(name), name)
    with pytest.raises(CheckpointError, match=f"tensor {NORM} has 1 NaN or infinite values"):
        assert_finite(checkpoint.read(NORM), NORM)


@pytest.mark.parametrize("quant", ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_non_finite_block_scales_are_named(quant: str) -> None:
    good = quantize(np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32), quant)
    assert_finite(good, "w")
    data = good.data.copy()
    at = 208 if quant == "q6_k" else 0
    data[2, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match="tensor w has 1 NaN or infinite block scales"):
        assert_finite(HostTensor(quant, good.shape, data), "w")


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
