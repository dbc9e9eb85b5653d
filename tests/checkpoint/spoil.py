"""Ways to damage a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file


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
