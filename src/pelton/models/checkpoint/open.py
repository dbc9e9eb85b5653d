"""Open whatever the user named: a folder, a GGUF file or a hub id."""

from __future__ import annotations

from pathlib import Path

from pelton.errors import CheckpointError
from pelton.models.checkpoint.base import Checkpoint
from pelton.models.checkpoint.gguf import GGUFCheckpoint
from pelton.models.checkpoint.hf import HFCheckpoint
from pelton.models.checkpoint.hub import download, looks_like_hub_id

#: Weights in Python pickles: loading one runs whatever code it contains.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def open_checkpoint(path_or_hub_id: str | Path) -> Checkpoint:
    """The checkpoint at a path (Hugging Face folder, ``.gguf`` file) or of a hub id (``owner/model``).

    Raises ``CheckpointError`` (``MissingDependencyError`` for a missing optional library) saying in
    one sentence what is wrong and what to do.
    """
    text = str(path_or_hub_id)
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.is_file():
            return _open_file(path)
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if path.exists():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    if looks_like_hub_id(text) and path.suffix not in (".gguf", ".safetensors", ".engine"):
        return HFCheckpoint(download(text))
    raise CheckpointError(
        f"{text!r} does not exist; give a Hugging Face folder, a .gguf file or a hub id such as "
        f"HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def _open_file(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == b"GGUF":
        return GGUFCheckpoint(path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise CheckpointError(f"{path} is one file of a checkpoint; give its folder: {path.parent}")
    raise CheckpointError(f"{path} is not a checkpoint: give a Hugging Face folder or a .gguf file")


def _open_folder(path: Path) -> Checkpoint:
    if (path / "manifest.json").exists() and (path / "plan.json").exists():
        raise CheckpointError(f"{path} is an engine, built already: give it to pelton run or pelton serve")
    if not any(path.iterdir()):
        raise CheckpointError(f"{path} is an empty folder")
    ggufs = sorted(path.glob("*.gguf"))
    has_config = (path / "config.json").exists()
    if ggufs and not has_config:
        if len(ggufs) > 1:
            raise CheckpointError(f"{path} has {len(ggufs)} GGUF files; give one of them, such as {ggufs[0]}")
        return GGUFCheckpoint(ggufs[0])
    if (path / "adapter_config.json").exists() and not any(path.glob("model*.safetensors")):
        raise CheckpointError(f"{path} is a LoRA adapter, not a model; merge it into its base model first")
    has_weights = any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists()
    if not has_weights:
        pickles = [file.name for pattern in _PICKLES for file in sorted(path.glob(pattern))]
        if pickles:
            raise CheckpointError(
                f"{path} has its weights as Python pickles ({pickles[0]}), which Pelton does not load "
                f"because they can run code; convert it to safetensors (save_pretrained of transformers does)"
            )
    if not has_config:
        raise CheckpointError(f"{path} has no config.json: it is not a Hugging Face checkpoint")
    if not has_weights:
        raise CheckpointError(f"{path} has a config.json but no weights (no .safetensors file)")
    return HFCheckpoint(path)
