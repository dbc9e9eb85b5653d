"""Writing an engine's JSON files and its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pelton.engine.artifact import FORMAT_VERSION, NATIVE_ABI, FileEntry, Manifest, file_sha256
from pelton.engine.plan import Plan
from pelton.version import __version__


def write_json(path: Path, value: object) -> None:
    """``value`` (a struct, or plain data) as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))


def write_compact(path: Path, value: object) -> None:
    """The same without spaces, for long tables that nobody reads."""
    path.write_bytes(msgspec.json.encode(value))


def file_entries(folder: Path, hashes: Mapping[Path, str]) -> tuple[FileEntry, ...]:
    """Every file of an engine but its manifest; ``hashes``: SHA-256 of those that are known already."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")
    return tuple(
        FileEntry(
            path=path.relative_to(folder).as_posix(),
            nbytes=path.stat().st_size,
            sha256=hashes.get(path) or file_sha256(path),
        )
        for path in files
    )


def write_manifest(folder: Path, plan: Plan, hashes: Mapping[Path, str], target: str, cpu_level: str) -> None:
    """``manifest.json`` of a new engine for ``target`` over every other file."""
    python = [t for t in plan.external.values() if t.kind == "python"]
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        pelton_version=__version__,
        native_abi=NATIVE_ABI,
        target=target,
        cpu_level=cpu_level,
        packages={t.package or t.function.partition(".")[0]: t.version for t in python},
        files=file_entries(folder, hashes),
    )
    write_json(folder / "manifest.json", manifest)


def total_size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
