"""SentencePiece's ``tokenizer.model``: the pieces of its protocol buffer, without the library.

Only the fields Pelton needs are read (``sentencepiece_model.proto``): ModelProto.pieces (1: piece 1,
score 2, type 3), trainer_spec (2: model_type 3, ids 40-43), normalizer_spec (3: precompiled_charsmap
2, add_dummy_prefix 3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pelton.errors import CheckpointError

_BPE = 2


def read_sentencepiece(path: Path) -> dict[str, Any] | None:
    """The model as GGUF tokenizer metadata (piece types have the same numbers in both).

    None when the file is no SentencePiece BPE model, or one whose normaliser has rules of its own.
    Raises ``CheckpointError`` when it is damaged.
    """
    try:
        data = path.read_bytes()
        return _metadata(data)
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged or not a SentencePiece model: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _metadata(data: bytes) -> dict[str, Any] | None:
    tokens, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(bytes(piece.get(1, b"")).decode())
            scores.append(piece.get(2, 0.0))
            types.append(piece.get(3, 1))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not tokens:
        raise ValueError("it has no pieces")
    if trainer.get(3, 1) != _BPE or normalizer.get(2):
        return None
    prefix = "tokenizer.ggml."
    metadata: dict[str, Any] = {
        prefix + "model": "llama",
        prefix + "tokens": tokens,
        prefix + "scores": scores,
        prefix + "token_type": types,
        prefix + "add_space_prefix": bool(normalizer.get(3, 1)),
    }
    nowhere = len(tokens)
    ids = {
        "unknown_token_id": trainer.get(40, 0),
        "bos_token_id": trainer.get(41, 1),
        "eos_token_id": trainer.get(42, 2),
        "padding_token_id": trainer.get(43, nowhere),
    }
    # An id of -1 is written as a huge number: there is no such token.
    metadata |= {prefix + key: index for key, index in ids.items() if index < nowhere}
    return metadata


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protocol buffer message: ints, float32s, bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: Any
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 1:
            value, at = data[at : at + 8], at + 8
        elif wire == 2:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif wire == 5:
            (value,) = struct.unpack_from("<f", data, at)
            at += 4
        else:
            raise ValueError(f"wire type {wire}")
        if at > len(data):
            raise ValueError("it is truncated")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")
