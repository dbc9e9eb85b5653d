"""The package of docs/extending.md, and processes that have it installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"


def install(folder: Path, **replacements: str) -> Path:
    """The page's package as ``pip install`` leaves it, in a folder for sys.path; texts replaced."""
    text = PAGE.read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        head, _, code = block.partition("\n")
        for old, new in replacements.items():
            code = code.replace(old, new)
        path = folder / head.removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(code)
    (project,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    described = tomllib.loads(project)["project"]
    info = folder / f"{described['name'].replace('-', '_')}-{described['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {described['name']}\nVersion: {described['version']}\n")
    (info / "top_level.txt").write_text("my_swish\n")
    lines = []
    for group, entries in described["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def python(program: str, *args: object, path: Path | None = None, **environment: str) -> tuple[int, str, str]:
    """Run ``program`` in a process that has the package of ``path``."""
    parts = [str(ROOT / "src"), *([str(path)] if path else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(parts), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def pelton(*args: object, path: Path | None = None, **environment: str) -> tuple[int, str, str]:
    return python("from pelton.serving.cli.main import main; main()", *args, path=path, **environment)
