"""What a checkpoint is to the rest of Pelton: the Hugging Face view of weights, config, tokenizer.

Readers (``hf.py``, ``gguf.py``) present names, shapes and config keys of the Hugging Face model
whatever the file format. They map files into memory and read one tensor at a time.
"""

from __future__ import annotations

import fnmatch
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.dtypes import is_dense
from pelton.errors import CheckpointError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import scales
from pelton.ir.evaluate import infer_shape
from pelton.ir.kv_quant import KVQuant
from pelton.ir.recipe import Recipe, Source
from pelton.ir.tensors import HostTensor, ValuesNotRead


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What ``Checkpoint.read`` gives for a tensor."""

    name: str
    """Of the Hugging Face model."""
    shape: tuple[int, ...]
    quant: str
    """Dense dtype or block type as in ``HostTensor``; another lower-case GGUF type name (``iq4_nl``)
    when ``read`` dequantises it to float32 because Pelton has no such block type."""
    nbytes: int
    """In the file."""
    note: str = ""
    """What the build report should say of it, when it is not read as it is stored."""


class Checkpoint(ABC):
    """An opened checkpoint. Opening reads headers only; ``read`` maps one tensor."""

    name: str
    """Shown to users and served as the model's id: what they call it, the last part of the path (a file's
    without its suffix) or of the hub id."""
    path: Path
    config: dict[str, Any]
    """As in a Hugging Face ``config.json``, with ``architectures``."""
    generation_config: dict[str, Any]
    """As in ``generation_config.json``; empty when there is none."""
    tensors: Mapping[str, TensorInfo]
    zero_biases: tuple[str, ...] = ()
    """Tensors that a quantiser wrote whether the model has them or not; without them, they must be zero."""

    def activation_quant(self, name: str) -> ActivationQuant | None:
        """How the input of the linear layer with weight ``name`` is quantised; None: it is not."""
        return None

    def kv_quant(self) -> KVQuant | None:
        """How KV caches are quantised; None: they are not."""
        return None

    def read_notes(self) -> list[str]:
        """What reading tensors changed in them so far, and headers do not say: sentences for the report."""
        return []

    @abstractmethod
    def read(self, name: str) -> HostTensor:
        """The tensor's values, a read-only view of the mapped file where possible.

        Raises ``CheckpointError`` when the file cannot be read, ``KeyError`` for an unknown name.
        """

    def source(self, name: str) -> Recipe:
        """The recipe of the Hugging Face tensor ``name`` over what ``read`` gives.

        ``Source(name)`` except where a format stores other values than Hugging Face: GGUF files keep
        Gemma's norm weights plus one (``AddScalar(Source, -1)``) and GPT-2's Conv1D weights
        transposed (``Transpose(Source)``). A model that undoes just that (``add_scalar(source, 1)``,
        ``transpose(source)``) folds to the stored tensor, bit for bit.
        """
        return Source(name)

    @abstractmethod
    def write_tokenizer(self, directory: Path) -> None:
        """Write what an engine needs to turn text into tokens and back, into an existing directory:

        - ``tokenizer.json``, Hugging Face tokenizers' format; its post-processor adds BOS exactly
          when the checkpoint wants it;
        - ``chat_template.jinja``, when there is one;
        - ``special_tokens.json``: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` (text or
          null), ``bos_token_id`` (int or null), ``eos_token_ids`` (list), ``add_bos`` (bool).

        Raises ``CheckpointError`` when the tokenizer is missing or of an unknown kind.
        """

    @abstractmethod
    def files(self) -> Iterable[Path]:
        """The files this checkpoint consists of."""

    def fingerprint(self) -> str:
        """A cheap content id for the engine cache: names, sizes and times of the files."""
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted(self.files()):
            stat = file.stat()
            digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        return digest.hexdigest()


def is_order(info: TensorInfo) -> bool:
    """Whether a tensor is the order in which a weight's columns are stored, and no weight itself: what a
    reader adds to the tensors that the Hugging Face model has."""
    return info.quant == "int32" and info.name.endswith(".input_order")


#: Values looked at at a time.
_CHUNK = 1 << 22

#: Tensors that some checkpoints carry although no model reads them: buffers that are recomputed.
HARMLESS = (
    "*.rotary_emb.inv_freq",  # LLaMA checkpoints saved by early transformers
    "*.self_attn.rotary_emb.*",
    "transformer.h.*.attn.bias",  # GPT-2's causal mask
    "transformer.h.*.attn.masked_bias",
)


#: Value types that a file may hold but ``read`` refuses.
_NOT_WEIGHTS = frozenset(
    [
        "float64",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "float8_e4m3",
        "float8_e5m2",
        "float8_e8m0",
    ]
)


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    *,
    ignore: Iterable[str] = (),
    tied_head: tuple[str, str] | None = None,
) -> list[str]:
    """Account for every tensor: all ``expected`` (name -> Hugging Face shape) present and of that
    shape, none besides except ``HARMLESS`` and ``ignore`` (shell patterns).

    ``tied_head``, such as ``("lm_head.weight", "model.embed_tokens.weight")``, says that the first
    is tied to the second and so not expected: a copy of it in the file is compared by value.

    Returns sentences for the build report. Raises ``CheckpointError`` naming the first few tensors
    that are missing, unexpected or mis-shaped, and how many there are.
    """
    notes: list[str] = []
    ignore = tuple(ignore)
    present = dict(checkpoint.tensors)
    if tied_head is not None and tied_head[0] in present and tied_head[0] not in expected:
        notes.append(_tied_note(checkpoint, *tied_head))
        del present[tied_head[0]]

    spare = [name for name in checkpoint.zero_biases if name in present and name not in expected]
    absent = [name for name in spare if _is_zero(checkpoint, name)]
    for name in absent:
        del present[name]
    if absent:
        notes.append(f"left out {_some(absent)}: zeros, and the model has no biases there")

    problems = []
    missing = [name for name in expected if name not in present]
    if missing:
        problems.append(f"{_some(missing)} missing")
    extra = [name for name, info in present.items() if name not in expected and not is_order(info)]
    harmless = [name for name in extra if _matches(name, HARMLESS)]
    unused = [name for name in extra if _matches(name, ignore) and name not in harmless]
    unexpected = [name for name in extra if not _matches(name, (*HARMLESS, *ignore))]
    if unexpected:
        problems.append(f"{_some(unexpected)} unexpected")
    wrong = []
    for name, shape in expected.items():
        if name in present:
            actual = infer_shape(checkpoint.source(name), checkpoint.tensors)
            if actual != tuple(shape):
                wrong.append(f"{name} is {_dims(actual)}, not {_dims(shape)}")
    if wrong:
        problems.append("wrong shape: " + _first(wrong))
    foreign = [
        f"{name} is {present[name].quant}"
        for name in expected
        if name in present and present[name].quant in _NOT_WEIGHTS
    ]
    if foreign:
        problems.append("unsupported type: " + _first(foreign))
    if problems:
        raise CheckpointError(
            f"{checkpoint.name} does not match its architecture "
            f"{checkpoint.config.get('architectures', ['?'])[0]}: {'; '.join(problems)}; "
            f"the checkpoint is incomplete or its config belongs to another model"
        )
    if harmless:
        notes.append(f"ignored {_some(harmless)}: recomputed, not weights")
    if unused:
        notes.append(f"left out {_some(unused)}: parts of the checkpoint that the model does not use")
    return notes


def assert_finite(tensor: HostTensor, name: str) -> None:
    """Raise ``CheckpointError`` naming the tensor when a value (or a block's scale) is NaN or infinite."""
    bad = count_non_finite(tensor)
    if bad:
        what = "values" if tensor.dense else "block scales"
        raise CheckpointError(
            f"tensor {name} has {bad} NaN or infinite {what}; "
            f"the checkpoint is damaged or its training diverged"
        )


def count_non_finite(tensor: HostTensor) -> int:
    """How many values, or scales of blocks, are NaN or infinite; a few MB of temporaries."""
    flat = tensor.data.reshape(-1) if tensor.dense else tensor.data
    step = _CHUNK if tensor.dense else max(1, _CHUNK // max(1, flat.shape[-1]))
    parts = (flat[start : start + step] for start in range(0, len(flat), step))
    return sum(_count_non_finite(part, tensor.quant) for part in parts)


def _count_non_finite(data: npt.NDArray[Any], quant: str) -> int:
    if quant in ("float32", "float16"):
        return int(data.size - np.isfinite(data).sum())
    if quant == "bfloat16":
        exponent = data.view(np.uint16) & 0x7F80
        return int((exponent == 0x7F80).sum())
    if is_dense(quant):
        return 0
    return sum(int(s.size - np.isfinite(s).sum()) for s in scales(data, quant))


def _tied_note(checkpoint: Checkpoint, head: str, embedding: str) -> str:
    """Say whether a head that the config ties to the embedding repeats it or differs."""
    if embedding in checkpoint.tensors:
        try:
            a, b = checkpoint.read(head), checkpoint.read(embedding)
        except ValuesNotRead:
            return f"{head} is tied to {embedding}: one copy is used, whatever its values, which are not read"
        if a.quant == b.quant and a.shape == b.shape and _same_bytes(a.data, b.data):
            return f"{head} repeats the tied {embedding}: one copy is used"
    return f"{head} differs from {embedding}, to which the config ties it: the embedding is used"


def _is_zero(checkpoint: Checkpoint, name: str) -> bool:
    try:
        return not checkpoint.read(name).data.any()
    except ValuesNotRead:
        return True


def _same_bytes(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Row by row, since both are as large as a vocabulary."""
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: list[str]) -> str:
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun} ({_first(names)})"


def _first(items: list[str], limit: int = 3) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
