"""JSON files of a checkpoint, with errors that say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pelton.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; raises ``CheckpointError`` naming file, line and column."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON text") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value
