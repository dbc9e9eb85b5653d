"""A checkpoint folder that is either whole or not there, and what it holds beside the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pelton.engine.temporary import folder_beside
from pelton.errors import CheckpointError
from pelton.models.checkpoint.base import Checkpoint
from pelton.models.checkpoint.hf import HFCheckpoint

#: Files of a Hugging Face folder that go with it as they are.
_COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "LICENSE*",
)


@contextmanager
def checkpoint_folder(output: Path) -> Iterator[Path]:
    """A temporary folder beside ``output``, renamed to it when the block ends without an error.

    Raises ``CheckpointError`` when there is something at ``output``, or it cannot be written.
    """
    output = output.absolute()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(f"{output} exists; remove it or choose another output")
    try:
        with folder_beside(output, "writing") as folder:
            yield folder
            if output.exists():
                output.rmdir()
            folder.rename(output)
    except OSError as error:
        raise CheckpointError(f"cannot write {output}: {error.strerror or error}") from error


def write_metadata(folder: Path, base: Checkpoint, quantization: Mapping[str, Any], dtype: str) -> None:
    """config.json, generation_config.json and tokenizer files of ``base``; ``dtype``: of dense weights."""
    config = {k: v for k, v in base.config.items() if k not in ("torch_dtype", "quantization_config")}
    _write(folder / "config.json", {**config, "dtype": dtype, "quantization_config": quantization})
    if base.generation_config:
        _write(folder / "generation_config.json", base.generation_config)
    if isinstance(base, HFCheckpoint):
        for file in {file for pattern in _COPIED for file in base.path.glob(pattern)}:
            if file.is_dir():
                shutil.copytree(file, folder / file.name)
            elif file.suffix != ".safetensors":
                shutil.copyfile(file, folder / file.name)
    else:
        _write_tokenizer(folder, base)


def _write_tokenizer(folder: Path, base: Checkpoint) -> None:
    """Of another format: what an engine gets, and what transformers needs to open it."""
    base.write_tokenizer(folder)
    special_file = folder / "special_tokens.json"
    special = json.loads(special_file.read_text(encoding="utf-8"))
    special_file.unlink()
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    values = {name: special[name] for name in names if special.get(name) is not None}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **values})


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
