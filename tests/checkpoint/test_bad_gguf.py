"""GGUF files that cannot be used: each ends in one sentence that says what and where."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from pelton.errors import CheckpointError
from pelton.models.checkpoint import open_checkpoint
from tests.checkpoint.makers import tiny_gguf
from tests.checkpoint.spoil import cut


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
