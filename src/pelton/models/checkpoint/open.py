"""Open whatever the user named: a folder, a GGUF file or a hub id."""

from __future__ import annotations

from pathlib import Path

from pelton.errors import CheckpointError
from pelton.models.checkpoint.base import Checkpoint


def open_checkpoint(path_or_hub_id: str | Path) -> Checkpoint:
    """The checkpoint at a path (Hugging Face folder, ``.gguf`` file).

    Raises ``CheckpointError`` saying what is wrong with it.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_file():
        from pelton.models.checkpoint.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise CheckpointError(f"{path_or_hub_id} does not exist")
