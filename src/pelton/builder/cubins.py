"""Compiles kernels of CUDA tactics, in Triton and CUDA C++, without a GPU, into an engine's ``compiled``."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pelton.engine.cuda.code import Code, Kernel, Launch, Matmul, Variants
from pelton.engine.cuda.code import Work as StoredWork
from pelton.engine.resources import cores
from pelton.errors import BuildError, MissingDependencyError, PeltonError
from pelton.kernels.gpu import nvrtc
from pelton.kernels.launch import CudaSource, KernelSource, LaunchSpec, Source, Work
from pelton.kernels.step_kernels import interface, step_sources

#: Shared memory that a block may have, bytes, by compute capability.
MAX_SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_LEAST_SHARED = 99 << 10
#: First compute capability with programmatic dependent launch.
_DEPENDENT_SM = 90
#: The constant by which a kernel says how many loads of its loop are in flight.
_STAGES = "STAGES"
#: A process more pays from so many kernels on: it takes a second to start.
_WORTH_A_PROCESS = 4


@dataclass(frozen=True)
class Cubin:
    """What a compiled kernel needs to be launched."""

    image: bytes
    name: str
    threads: int
    shared: int
    scratch: int = 0
    """Trailing pointer parameters that the compiler added."""


def check_compilers() -> None:
    """Load the compilers of kernels; ``MissingDependencyError`` where one is not here.

    Every engine for GPUs needs both: what picks its tokens is in CUDA C++, what edits its logits in Triton.
    """
    missing = []
    for load in (_triton, nvrtc.library):
        try:
            load()
        except MissingDependencyError as error:
            missing.append(str(error))
    if len(missing) > 1:
        raise MissingDependencyError(
            "engines for GPUs are compiled with Triton and NVRTC, and neither is here; install them with: "
            "pip install 'pelton[cuda]'"
        )
    if missing:
        raise MissingDependencyError(missing[0])


def _triton() -> Any:
    """The module. Raises ``MissingDependencyError``."""
    try:
        import triton
        import triton.backends.compiler
        import triton.compiler
    except ImportError as error:
        raise MissingDependencyError(
            f"engines for GPUs are compiled with Triton, which is not here ({error}); "
            "install it with: pip install triton"
        ) from error
    return triton


def compile_kernel(source: Source, sm: int) -> Cubin:
    """The machine code of ``source`` for compute capability ``sm``. Raises ``BuildError``.

    A Triton kernel that wants more shared memory than there is gets fewer loads in flight.
    """
    cubin = _compile_cuda(source, sm) if isinstance(source, CudaSource) else _compile_triton(source, sm)
    limit = MAX_SHARED.get(sm, _LEAST_SHARED)
    while cubin.shared > limit and (fewer := _fewer_stages(source)):
        source = fewer
        cubin = _compile_triton(fewer, sm)
    if cubin.shared > limit:
        raise BuildError(
            f"the kernel {source.function} wants {cubin.shared} bytes of shared memory; sm_{sm} has {limit}"
        )
    return cubin


def _fewer_stages(source: Source) -> KernelSource | None:
    """``source`` with one load less in flight; None where it has but one. Its arithmetic stays the same."""
    if isinstance(source, CudaSource):
        return None
    own = dict(source.constants).get(_STAGES, 1)
    assert isinstance(own, int)
    most = max(own, source.num_stages) - 1
    if not most:
        return None
    constants = tuple((n, min(own, most)) if n == _STAGES else (n, v) for n, v in source.constants)
    return dataclasses.replace(source, constants=constants, num_stages=min(source.num_stages, most))


def _compile_cuda(source: CudaSource, sm: int) -> Cubin:
    image = nvrtc.compile_file(source.file, f"sm_{sm}{source.suffix}", source.constants)
    return Cubin(image=image, name=source.function, threads=source.threads, shared=source.shared)


def _compile_triton(source: KernelSource, sm: int) -> Cubin:
    triton = _triton()
    function = getattr(importlib.import_module(source.module), source.function)
    types, constants = dict(source.types), dict(source.constants)
    if source.dependent:
        constants["DEPENDENT"] = sm >= _DEPENDENT_SM
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    unknown = (types.keys() | constants.keys()) ^ set(function.arg_names)
    assert not unknown, f"{source.function}: parameters do not match its launch: {sorted(unknown)}"
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in source.aligned
    }
    try:
        compiled = triton.compile(
            triton.compiler.ASTSource(function, signature, constants, attributes),
            target=triton.backends.compiler.GPUTarget("cuda", sm, 32),
            options={"num_warps": source.num_warps, "num_stages": source.num_stages},
        )
    except Exception as error:
        raise BuildError(
            f"the kernel {source.function} could not be compiled for sm_{sm}: {type(error).__name__}: {error}"
        ) from error
    metadata = compiled.metadata
    if metadata.global_scratch_size:
        raise BuildError(f"the kernel {source.function} wants scratch memory of its own")
    return Cubin(
        image=compiled.asm["cubin"],
        name=metadata.name,
        threads=32 * metadata.num_warps,
        shared=metadata.shared,
        scratch=2,
    )


def _stored(works: Sequence[Work], index: Mapping[Source, int], sm: int) -> tuple[StoredWork, ...]:
    return tuple(_launch(w, index, sm) if isinstance(w, LaunchSpec) else Matmul(**vars(w)) for w in works)


def _launch(spec: LaunchSpec, index: Mapping[Source, int], sm: int) -> Launch:
    dependent = spec.kernel.dependent and sm >= _DEPENDENT_SM
    return Launch(
        kernel=index[spec.kernel],
        grid=spec.grid,
        arguments=spec.arguments,
        dependent=dependent,
        footprint=spec.footprint if dependent else 0,
    )


@dataclass
class CodeWriter:
    """Gathers the launches of a plan's instructions, compiles their kernels once, writes the files."""

    sm: int
    vocab: int
    launches: list[dict[str, tuple[tuple[Work, ...], tuple[Work, ...] | None]]] = field(default_factory=list)

    def add(self, by_tactic: dict[str, tuple[tuple[Work, ...], tuple[Work, ...] | None]]) -> None:
        """The next instruction's work by tactic: in any step, in decode steps (None: the same)."""
        self.launches.append(by_tactic)

    def sources(self) -> list[Source]:
        """The kernels, each once, in the order of first use."""
        variants = (v for by_tactic in self.launches for pair in by_tactic.values() for v in pair if v)
        found = (spec.kernel for works in variants for spec in works if isinstance(spec, LaunchSpec))
        return list(dict.fromkeys((*found, *step_sources(self.vocab).values())))

    def write(
        self,
        folder: Path,
        progress: Callable[[str, int, int], None],
        failures: dict[Source, PeltonError] | None = None,
    ) -> Code:
        """Compile into ``folder`` (an engine's ``compiled``) -> what ``code.json`` says.

        ``failures``: gets the kernels that do not compile, which then have no file; without it they raise.
        """
        sources = self.sources()
        kernels = []
        folder.mkdir()
        for i, (source, cubin) in enumerate(zip(sources, compile_all(sources, self.sm), strict=True)):
            if isinstance(cubin, PeltonError):
                if failures is None:
                    raise cubin
                failures[source] = cubin
                kernels.append(Kernel(file="", name=source.function, threads=0, shared=0, scratch=0))
                continue
            file = hashlib.sha256(cubin.image).hexdigest()[:16] + ".cubin"
            (folder / file).write_bytes(cubin.image)
            kernels.append(
                Kernel(
                    file=f"{folder.name}/{file}",
                    name=cubin.name,
                    threads=cubin.threads,
                    shared=cubin.shared,
                    scratch=cubin.scratch,
                )
            )
            progress("kernels", i + 1, len(sources))
        index = {source: i for i, source in enumerate(sources)}
        return Code(
            sm=self.sm,
            kernels=tuple(kernels),
            launches=tuple(
                {
                    tactic: Variants(
                        any=_stored(always, index, self.sm),
                        decode=None if decode is None else _stored(decode, index, self.sm),
                    )
                    for tactic, (always, decode) in by_tactic.items()
                }
                for by_tactic in self.launches
            ),
            step_kernels={name: index[source] for name, source in step_sources(self.vocab).items()},
            dependent=tuple(
                name
                for name, source in step_sources(self.vocab).items()
                if source.dependent and self.sm >= _DEPENDENT_SM
            ),
            interface=interface(self.vocab),
        )


def compile_all(sources: Sequence[Source], sm: int) -> list[Cubin | PeltonError]:
    """Each one's machine code, or why there is none; by several processes where it pays."""
    workers = min(cores(), len(sources) // _WORTH_A_PROCESS)
    if workers < 2:
        return [_compiled(source, sm) for source in sources]
    # Processes of their own: a fork of one that runs threads may hang, and a spawned one would run
    # the caller's script again.
    shares = [list(sources[i::workers]) for i in range(workers)]
    children: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            children += [_compiler() for _ in shares]
            done = list(pool.map(lambda child, share: _compile_elsewhere(child, share, sm), children, shares))
        except BaseException:  # an interrupted build does not wait for them
            for child in children:
                child.kill()
            raise
    return [done[i % workers][i // workers] for i in range(len(sources))]


def _compiled(source: Source, sm: int) -> Cubin | PeltonError:
    try:
        return compile_kernel(source, sm)
    except PeltonError as error:
        return error


def _compiler() -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", f"from {__name__} import work; work()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )


def _compile_elsewhere(
    child: subprocess.Popen[bytes], sources: list[Source], sm: int
) -> list[Cubin | PeltonError]:
    """``_compiled`` of each, by ``child``. Raises ``BuildError`` where that dies."""
    out, _ = child.communicate(pickle.dumps((sources, sm)))
    if child.returncode:
        raise BuildError(f"compiling GPU kernels failed (exit code {child.returncode}); see the lines above")
    result: list[Cubin | PeltonError] = pickle.loads(out)
    return result


def work() -> None:
    """The other process: sources on stdin, what became of each on stdout."""
    sources, sm = pickle.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    os.dup2(2, 1)  # what compilers print is no result
    result = [_compiled(source, sm) for source in sources]
    with os.fdopen(out, "wb") as pipe:
        pipe.write(pickle.dumps(result))
