"""What is measured of an engine after its build goes into its ``report.json``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from pelton.builder.directory import engine_directory
from pelton.builder.engine_files import write_json
from pelton.engine.artifact import FileEntry, file_sha256, open_engine
from pelton.engine.trust import is_trusted, remember


def keep_quality(engine: Path, **facts: Any) -> None:
    """Put ``facts`` (plain data) into the report's quality, where ``inspect`` and ``diff`` find them.

    The engine is replaced by one that is whole; its other files stay the same ones.
    """
    opened = open_engine(engine)
    report: dict[str, Any] = dict(opened.report())
    report["quality"] = {**(report.get("quality") or {}), **facts}
    trusted = is_trusted(opened)
    path = opened.path.resolve()
    with engine_directory(path) as folder:
        entries = []
        for entry in opened.manifest.files:
            target = folder / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.path == "report.json":
                write_json(target, report)
                entry = FileEntry(path=entry.path, nbytes=target.stat().st_size, sha256=file_sha256(target))
            else:
                _link(path / entry.path, target)
            entries.append(entry)
        manifest = msgspec.structs.replace(opened.manifest, files=tuple(entries))
        write_json(folder / "manifest.json", manifest)
    if trusted:
        remember(open_engine(path))


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
