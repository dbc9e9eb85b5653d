"""What ``compiled/code.json`` must satisfy before its launches touch a GPU's memory.

Kernels are code, so an engine from elsewhere runs only with trust (``engine.trust``); this is about files
that were damaged or edited. A launch's kernel, grid and arguments exist, its addresses begin in memory that
is the session's, and what cuBLASLt is told to read and write lies in it. How far a kernel reaches from its
addresses is its own affair; that it gets as many arguments as it has parameters is seen when it is loaded,
and that those which this Pelton gives mean what they did when it was compiled, by ``Code.interface``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pelton.dtypes import ITEMSIZE
from pelton.engine.artifact import Engine
from pelton.engine.cuda.code import STEP_KERNELS, Code, Kernel, Launch, Matmul, Work
from pelton.engine.plan import Instruction, Operand, Plan
from pelton.engine.plan_check import dim_values
from pelton.engine.trust import FOLDER
from pelton.errors import EngineError
from pelton.kernels.gpu.driver import Device
from pelton.kernels.launch import COUNTER_BYTES, Argument, TensorMap, Term
from pelton.kernels.step_kernels import interface
from pelton.version import __version__

_MAX_THREADS = 1024
#: Most programs along each axis of a grid.
_MAX_GRID = ((1 << 31) - 1, 65535, 65535)
_MAX_SCRATCH = 4
_INT32 = 1 << 31
_MATMUL_TYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


def read_code(engine: Engine, device: Device) -> Code:
    """The launches of ``engine`` for ``device``. Raises ``EngineError`` where they cannot run there."""
    code = engine.read_json(f"{FOLDER}code.json", Code)
    if code.sm // 10 != device.sm // 10 or code.sm > device.sm:
        raise EngineError(
            f"{engine.path} was built for sm_{code.sm} GPUs and {device.name} is sm_{device.sm}; "
            "rebuild it here"
        )
    if code.interface != interface(int(engine.plan.operands[engine.plan.logits].shape[1])):
        raise EngineError(
            f"{engine.path} has kernels of Pelton {engine.manifest.pelton_version} that take other arguments "
            f"than this Pelton ({__version__}) gives them; rebuild the engine"
        )
    try:
        check_code(code, engine.plan, device.max_shared)
    except ValueError as error:
        raise EngineError(
            f"{engine.path / FOLDER} is damaged: code.json: {error}; copy the engine again or rebuild it"
        ) from error
    for file in {kernel.file for kernel in code.kernels}:
        engine.verify_file(file)
    return code


def check_code(code: Code, plan: Plan, max_shared: int) -> None:
    """Raise ``ValueError`` saying what is wrong with ``code`` as the launches of ``plan``.

    ``max_shared``: bytes of shared memory that a block may have.
    """
    for kernel in code.kernels:
        _check_kernel(kernel, max_shared)
    if missing := STEP_KERNELS - code.step_kernels.keys():
        raise ValueError(f"there is no kernel for {min(missing)}")
    for index in code.step_kernels.values():
        if not 0 <= index < len(code.kernels):
            raise ValueError(f"there is no kernel {index}")
    if len(code.launches) != len(plan.instructions):
        raise ValueError(f"{len(plan.instructions)} instructions have launches of {len(code.launches)}")
    for instruction, by_tactic in zip(plan.instructions, code.launches, strict=True):
        for choice in instruction.tactics:
            variants = by_tactic.get(choice.tactic)
            if variants is None:
                raise ValueError(f"{instruction.name} has no launches of its tactic {choice.tactic}")
            check = _Check(code, plan, instruction, max_shared)
            check.works((*variants.any, *(variants.decode or ())))


def _check_kernel(kernel: Kernel, max_shared: int) -> None:
    if not kernel.file.startswith(FOLDER) or not kernel.name:
        raise ValueError(f"kernel {kernel.name!r} is in {kernel.file!r}, no file of the engine's code")
    if not 0 < kernel.threads <= _MAX_THREADS or kernel.threads % 32:
        raise ValueError(f"kernel {kernel.name} has {kernel.threads} threads")
    if not 0 <= kernel.shared <= max_shared:
        raise ValueError(f"kernel {kernel.name} wants {kernel.shared} bytes of shared memory")
    if not 0 <= kernel.scratch <= _MAX_SCRATCH:
        raise ValueError(f"kernel {kernel.name} has {kernel.scratch} parameters of its own")


class _Check:
    """Of the launches of one instruction."""

    def __init__(self, code: Code, plan: Plan, instruction: Instruction, max_shared: int) -> None:
        self._code, self._plan, self._instruction = code, plan, instruction
        self._max_shared = max_shared
        self._dims: Mapping[str, int] = dim_values(plan.dims)

    def works(self, works: Iterable[Work]) -> None:
        for work in works:
            if isinstance(work, Launch):
                self._launch(work)
            else:
                self._matmul(work)

    def _refuse(self, why: str) -> ValueError:
        return ValueError(f"{self._instruction.name}: {why}")

    def _launch(self, launch: Launch) -> None:
        if not 0 <= launch.kernel < len(self._code.kernels):
            raise self._refuse(f"there is no kernel {launch.kernel}")
        if not 0 <= launch.footprint <= self._max_shared:
            raise self._refuse(f"a footprint of {launch.footprint} bytes of shared memory")
        if not 1 <= len(launch.grid) <= len(_MAX_GRID):
            raise self._refuse(f"a grid of {len(launch.grid)} axes")
        for axis, most in zip(launch.grid, _MAX_GRID, strict=False):
            for term in axis:
                self._term(term)
            if not 0 < sum(term.value(self._dims) for term in axis) <= most:
                raise self._refuse(f"a grid beyond {most} programs")
        for argument in launch.arguments:
            self._argument(argument)

    def _term(self, term: Term) -> None:
        if term.dim and term.dim not in self._dims:
            raise self._refuse(f"unknown dimension {term.dim}")
        if term.div < 1 or term.times < 1:
            raise self._refuse(f"a grid of {term.times} for each {term.div}")

    def _argument(self, argument: Argument) -> None:
        match argument.kind:
            case "input" | "output":
                operand = self._operand(argument)
                if not 0 <= argument.offset <= self._bytes_from(operand):
                    raise self._refuse(
                        f"an address {argument.offset} bytes into {argument.kind} {argument.index}"
                    )
            case "workspace":
                # At the very end where a kernel that can share its work has no need to.
                if not 0 <= argument.offset <= self._workspace or argument.offset % 16:
                    raise self._refuse(f"an address {argument.offset} bytes into the workspace")
            case "dim":
                if argument.dim not in self._dims:
                    raise self._refuse(f"unknown dimension {argument.dim}")
            case "int" | "float":
                whole = argument.kind == "float" or abs(argument.value) < _INT32
                if not math.isfinite(argument.value) or not whole:
                    raise self._refuse(f"the number {argument.value}")
            case "ahead":
                if not 0 <= argument.index < 3:
                    raise self._refuse(f"part {argument.index} of the next weight")
            case "tensor_map":
                if argument.map is None:
                    raise self._refuse("a tensor map without a map")
                last = self._last_byte(argument.map)
                if argument.of == "workspace":
                    if argument.offset % 16 or not 0 <= argument.offset <= self._workspace - last:
                        raise self._refuse(f"a tensor map {argument.offset} bytes into the workspace")
                else:
                    self._tensor_map(last, self._operand(argument))

    def _operand(self, argument: Argument) -> Operand:
        side = argument.of if argument.kind == "tensor_map" else argument.kind
        indices = self._instruction.outputs if side == "output" else self._instruction.inputs
        if not 0 <= argument.index < len(indices) or indices[argument.index] < 0:
            raise self._refuse(f"there is no {side} {argument.index}")
        return self._plan.operands[indices[argument.index]]

    def _last_byte(self, wanted: TensorMap) -> int:
        """How far a map reaches; copies read zeros outside of its shape."""
        rank = len(wanted.shape)
        if not 1 <= rank <= 5 or len(wanted.box) != rank or len(wanted.strides) != rank - 1:
            raise self._refuse(f"a tensor map of {rank} dimensions")
        if wanted.dtype not in ITEMSIZE or min(*wanted.shape, *wanted.box, *wanted.strides, 1 << 30) < 1:
            raise self._refuse(f"a tensor map of {list(wanted.shape)} {wanted.dtype}")
        if any(stride % 16 for stride in wanted.strides):
            raise self._refuse(f"a tensor map with steps of {list(wanted.strides)} bytes")
        steps = (ITEMSIZE[wanted.dtype], *wanted.strides)
        return sum((n - 1) * step for n, step in zip(wanted.shape, steps, strict=True)) + steps[0]

    def _tensor_map(self, last: int, operand: Operand) -> None:
        """The shape must be the operand's own memory."""
        buffer = self._plan.buffers[operand.buffer]
        # How many blocks a cache has is the session's affair: the map covers any number.
        if buffer.kind not in ("k_cache", "v_cache") and last > self._bytes_from(operand):
            raise self._refuse(f"a tensor map beyond {buffer.name}")

    def _matmul(self, work: Matmul) -> None:
        if min(work.n, work.k, work.x_row) < 1 or max(work.n, work.k, work.x_row) >= _INT32:
            raise self._refuse(f"a product of {work.n} columns over {work.k}, rows {work.x_row} apart")
        if work.dtype not in _MATMUL_TYPES or work.out_dtype not in _MATMUL_TYPES:
            raise self._refuse(f"a product of {work.dtype} to {work.out_dtype}")
        scales = work.x_scales, work.weight_scales
        if any((scale is not None) != (work.dtype == "float8_e4m3fn") for scale in scales):
            raise self._refuse(f"a product of {work.dtype} with {2 - scales.count(None)} vectors of scales")
        dim = self._plan.operands[self._instruction.inputs[0]].shape[0]
        rows = self._dims[dim] if isinstance(dim, str) else dim
        item, out_item = ITEMSIZE[work.dtype], ITEMSIZE[work.out_dtype]
        result = rows * work.n * out_item
        self._reach(work.x, ((rows - 1) * work.x_row + work.k) * item)
        self._reach(work.weight, work.n * work.k * item)
        self._reach(work.out, result)
        for scale, count in zip(scales, (rows, work.n), strict=True):
            if scale is not None:
                self._reach(scale, 4 * count)
        if work.residual is not None:
            row = work.residual_row or work.n
            if row < 1:
                raise self._refuse(f"a residual whose rows are {row} apart")
            self._reach(work.residual, ((rows - 1) * row + work.n) * out_item)

    def _reach(self, argument: Argument, nbytes: int) -> None:
        """An address with ``nbytes`` behind it."""
        if argument.kind not in ("input", "output", "workspace"):
            raise self._refuse(f"{argument.kind} is no address")
        self._argument(argument)
        if argument.kind == "workspace":
            room = self._workspace - argument.offset
        else:
            room = self._bytes_from(self._operand(argument)) - argument.offset
        if nbytes > room:
            raise self._refuse(f"a product that reaches beyond its {argument.kind} {argument.index}")

    def _bytes_from(self, operand: Operand) -> int:
        """Bytes of its buffer from where an operand begins."""
        buffer = self._plan.buffers[operand.buffer]
        nbytes = buffer.nbytes
        if buffer.kind == "input":
            nbytes = ITEMSIZE[buffer.dtype] * math.prod(
                self._dims[d] if isinstance(d, str) else d for d in buffer.shape
            )
        return nbytes - operand.offset * ITEMSIZE[buffer.dtype]

    @property
    def _workspace(self) -> int:
        return COUNTER_BYTES + self._plan.workspace_bytes
