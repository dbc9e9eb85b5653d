"""Checkpoints by Hugging Face hub id, through ``huggingface_hub`` and its cache."""

from __future__ import annotations

import re
from pathlib import Path

from pelton.errors import CheckpointError, MissingDependencyError

_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "additional_chat_templates/*",
    "tokenizer.model",
    "merges.txt",
)


def looks_like_hub_id(text: str) -> bool:
    """``owner/model``, not a path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) is not None


def download(hub_id: str) -> Path:
    """The folder of ``hub_id`` in the hub's cache, downloaded if need be.

    Raises ``MissingDependencyError`` without ``huggingface_hub``, ``CheckpointError`` when the model
    does not exist, may not be read, or there is no network and no cached copy.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingDependencyError(
            f"{hub_id} is not a path here, and fetching it from the hub needs huggingface_hub: "
            f"pip install 'pelton[hub]'"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_PATTERNS)))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{hub_id} is gated: accept its licence on the hub, then run hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{hub_id} is neither a path here nor a model on the hub that you may read"
        ) from error
    except Exception as error:  # network and cache errors of several libraries
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{hub_id} is not a path here and could not be fetched from the hub: "
            f"{reason.removeprefix('Got: ')}; check the name and the connection, or give a local folder"
        ) from error


def folder_name(folder: Path) -> str:
    """The model's name by its folder. In the hub's cache the folder is named after a commit and the
    model after ``models--OWNER--NAME``."""
    folder = folder.resolve()
    cache = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cache.startswith("models--"):
        return cache.rpartition("--")[2]
    return folder.name
