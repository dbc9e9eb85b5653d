"""llama.cpp as the CPU peer: its prebuilt library from the npm package, driven by ``harness.cpp``.

Needs npm, git and a C++ compiler; everything lands under ``.cache/llamacpp`` and nothing is
installed. The library picks its best CPU variant by itself; the headers come from the source
bundle of the same release.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

VERSION = "3.22.1"
PACKAGES = (f"node-llama-cpp@{VERSION}", f"@node-llama-cpp/linux-x64@{VERSION}")
HERE = Path(__file__).parent


def prepare(cache: Path) -> tuple[Path, Path]:
    """Fetch and compile; returns (harness, folder of libraries)."""
    for tool in ("npm", "git", "g++"):
        if shutil.which(tool) is None:
            raise SystemExit(f"the llama.cpp comparison needs {tool} on PATH")
    cache.mkdir(parents=True, exist_ok=True)
    modules = cache / "node_modules"
    libraries = modules / "@node-llama-cpp/linux-x64/bins/linux-x64"
    if not libraries.exists():
        for package in PACKAGES:
            folder = package.rsplit("@", 1)[0]
            out = subprocess.run(
                ["npm", "pack", package], cwd=cache, check=True, capture_output=True, text=True
            )
            archive = cache / out.stdout.split()[-1]
            target = modules / folder
            target.mkdir(parents=True)
            subprocess.run(["tar", "xzf", archive, "--strip-components=1", "-C", str(target)], check=True)
            archive.unlink()
    source = cache / "source"
    if not source.exists():
        bundle = modules / "node-llama-cpp/llama/gitRelease.bundle"
        subprocess.run(
            ["git", "clone", "-q", str(bundle), str(source)], check=True, stderr=subprocess.DEVNULL
        )
    harness = cache / "harness"
    if not harness.exists() or harness.stat().st_mtime < (HERE / "harness.cpp").stat().st_mtime:
        libs = [
            next(libraries.glob("libllama.v*")),
            next(libraries.glob("libggml.v*")),
            libraries / "libggml-base.so",
        ]
        subprocess.run(
            ["g++", "-O2", "-std=c++17", str(HERE / "harness.cpp"), "-o", str(harness), "-pthread"]
            + [f"-I{source}/include", f"-I{source}/ggml/include", *map(str, libs)]
            + [f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined"],
            check=True,
        )
    return harness, libraries


class LlamaCpp:
    """A running harness."""

    def __init__(self, model: Path, threads: int, cache: Path) -> None:
        harness, libraries = prepare(cache.resolve())
        self.process = subprocess.Popen(
            [str(harness), str(model), str(threads), str(libraries)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.info = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the llama.cpp harness stopped; run it by hand to see why")
        return line

    def __call__(self, command: str) -> list[float]:
        """Milliseconds (or GB/s) for ``command``; see harness.cpp."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return [float(x) for x in json.loads(self._line())]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
