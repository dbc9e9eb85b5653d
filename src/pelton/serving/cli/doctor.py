"""``pelton doctor`` and ``pelton version``."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from typing import Any

import click

import pelton

#: The compiler of CUDA C++: a library, not a module.
_NVRTC = "NVRTC"
#: (import name, what it is for, how to get it)
_OPTIONAL = (
    ("torch", "building engines", "pelton[build]"),
    ("safetensors", "building from Hugging Face folders", "pelton[build]"),
    ("gguf", "building from GGUF files", "pelton[build]"),
    ("triton", "building engines for GPUs", "pelton[cuda]"),
    (_NVRTC, "building engines for GPUs", "pelton[cuda]"),
    ("rich", "progress bars", "pelton[build]"),
    ("fastapi", "pelton serve", "pelton[serve]"),
    ("uvicorn", "pelton serve", "pelton[serve]"),
    ("zmq", "pelton serve", "pelton[serve]"),
    ("prometheus_client", "pelton serve", "pelton[serve]"),
    ("huggingface_hub", "models by hub id", "pelton[hub]"),
)


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"pelton {pelton.__version__}")


@click.command(
    epilog="""\b
Examples:
  pelton doctor
  pelton doctor --json

Exits with 1 when engines cannot run here."""
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Check this installation and this machine: native library, GPU, extras, cores, memory, cache."""
    report = _examine()
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        for name, value in report["facts"].items():
            click.echo(f"{name:<16}{value}")
        for part in report["optional"]:
            state = "yes" if part["installed"] else f"no: pip install '{part['extra']}'"
            click.echo(f"{part['name']:<18}{state:<38}{part['for']}")
        for problem in report["problems"]:
            click.echo(f"problem: {problem}")
        if not report["problems"]:
            click.echo("Engines run here.")
    if report["problems"]:
        sys.exit(1)


def _examine() -> dict[str, Any]:
    from pelton.engine.resources import available_memory, cores, human_bytes
    from pelton.serving.engine_cache import cache_dir

    problems: list[str] = []
    facts: dict[str, str] = {
        "pelton": pelton.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "machine": f"{platform.machine()}, {cores()} cores, {human_bytes(available_memory())} free",
        "native library": _native(problems),
        **_gpu(),
        "cache": f"{cache_dir()} ({_cache_state()})",
    }
    optional = [
        {"name": name, "installed": _installed(name), "for": purpose, "extra": extra}
        for name, purpose, extra in _OPTIONAL
    ]
    return {"facts": facts, "optional": optional, "problems": problems}


def _installed(name: str) -> bool:
    if name == _NVRTC:
        from pelton.kernels.gpu import nvrtc

        return nvrtc.available()
    return importlib.util.find_spec(name) is not None


def _native(problems: list[str]) -> str:
    try:
        from pelton.kernels import native

        native.load_library()
        return f"{native.cpu_level()} kernels, {native.LIBRARY_PATH}"
    except Exception as error:
        if importlib.util.find_spec("torch") is None:
            problems.append(f"the native library does not load and torch is not installed: {error}")
        return f"missing: engines run on the slow PyTorch path ({error})"


def _gpu() -> dict[str, str]:
    """What a GPU engine finds here, and what the GPU was measured to do."""
    from pelton.engine.resources import human_bytes
    from pelton.errors import PeltonError
    from pelton.kernels.gpu import cublaslt
    from pelton.kernels.gpu.driver import Device, driver_version
    from pelton.kernels.gpu.roofline import measure

    try:
        device = Device()
    except PeltonError as error:
        return {"gpu": f"none ({str(error).partition(';')[0]})"}
    free, total = device.memory()
    blas = "with cuBLASLt" if cublaslt.available() else "no cuBLASLt: pip install nvidia-cublas"
    found = (
        f"{device.name}, sm_{device.sm}, {human_bytes(free)} of {human_bytes(total)} free, driver for CUDA "
        f"{driver_version()}, {blas}"
    )
    try:
        rates = measure("bfloat16", device)
    except PeltonError as error:
        return {"gpu": found, "gpu rates": f"not measured: {error}"}
    return {
        "gpu": found,
        "gpu rates": f"{rates.memory / 1e9:.0f} GB/s, {rates.matrix / 1e12:.0f} T bfloat16 operations/s",
    }


def _cache_state() -> str:
    from pelton.serving.engine_cache import cache_dir

    engines = cache_dir() / "engines"
    if not engines.is_dir():
        return "empty"
    found = [entry for entry in os.scandir(engines) if entry.name.endswith(".engine")]
    return f"{len(found)} engines"
