"""Conformance of CUDA tactics on a GPU: kernels compiled as for an engine, run by an engine's launcher.

All cases are compiled into one folder first, by several processes; running them then needs neither Triton nor
PyTorch's CUDA. Operands lie in allocations of the driver, between margins that must stay as they were, or
(``exact``) of exactly their size: compute-sanitizer finds what reaches beyond an allocation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pelton.builder.cubins import CodeWriter
from pelton.engine.cuda.code import Code, Launch, Variants, Work
from pelton.engine.cuda.launcher import Launcher
from pelton.engine.plan import Buffer, Instruction, Operand, Plan, TacticChoice
from pelton.errors import PeltonError
from pelton.kernels.conformance import ConformanceError
from pelton.kernels.conformance_cuda import Case, CaseCall, CaseResult, call_of, flat_copy, span
from pelton.kernels.gpu.driver import Device, Memory, Stream
from pelton.kernels.launch import COUNTER_BYTES, LaunchSpec, Source

#: Bytes around an operand, a multiple of every alignment that kernels are told of.
MARGIN = 256
SENTINEL, NAN = 0x5A, 0xFF
_CODE, _COMPILED, _FAILED = "code.json", "compiled", "failed.json"
_ANY = 1 << 30
#: Rows of logits are of no interest here.
_VOCAB = 512
#: Stands for the memory of every operand, of which a launcher is told where it is.
_OPERAND = Buffer(name="operand", kind="input", dtype="uint8", shape=())


Bytes = npt.NDArray[np.uint8]


def compile_cases(cases: Iterable[Case], sm: int, folder: Path) -> dict[str, str]:
    """Compile what ``cases`` launch into ``folder``, which may not exist -> by case, why it cannot be."""
    writer = CodeWriter(sm=sm, vocab=_VOCAB)
    works = {str(case): call_of(case).works for case in cases}
    for name, launches in works.items():
        writer.add({name: (launches, None)})
    folder.mkdir(parents=True)
    failures: dict[Source, PeltonError] = {}
    code = writer.write(folder / _COMPILED, lambda *_: None, failures)
    failed = {
        name: str(failures[w.kernel])
        for name, launches in works.items()
        for w in launches
        if isinstance(w, LaunchSpec) and w.kernel in failures
    }
    (folder / _CODE).write_bytes(msgspec.json.encode(code))
    (folder / _FAILED).write_bytes(msgspec.json.encode(failed))
    return failed


class DeviceRunner:
    """A ``Runner`` of the cases that ``folder`` was compiled for, on a GPU."""

    def __init__(self, folder: Path, *, exact: bool = False, device: int = 0) -> None:
        self.device = Device(device)
        self._folder, self._exact = folder, exact
        self._code = msgspec.json.decode((folder / _CODE).read_bytes(), type=Code)
        self._works = {name: v.any for by_name in self._code.launches for name, v in by_name.items()}
        self._failed = msgspec.json.decode((folder / _FAILED).read_bytes(), type=dict[str, str])
        self._stream = Stream()

    def __call__(self, case: Case, call: CaseCall) -> CaseResult:
        if why := self._failed.get(str(case)):
            raise ConformanceError(f"{case}: {why}")
        self.device.make_current()
        margin = 0 if self._exact else MARGIN
        inputs = [None if t is None else _Place(t, margin, self._stream) for t in call.inputs]
        outputs = [_Place(t, margin, self._stream, empty=True) for t in call.outputs]
        workspace = Memory(COUNTER_BYTES + call.workspace)
        workspace.fill(NAN, self._stream)
        counters = np.zeros(COUNTER_BYTES, np.uint8)
        self._stream.copy_in(workspace.address, counters.ctypes.data, counters.nbytes)
        places = {i: p for i, p in enumerate([*inputs, *outputs]) if p is not None}
        launcher = self._launcher(case, call, {i: p.address for i, p in places.items()}, workspace)
        try:
            launcher.run(self._stream, call.dims, decodes=case.decode)
            self._stream.copy_out(counters.ctypes.data, workspace.address, counters.nbytes)
            self._stream.wait()
            return CaseResult(
                inputs=[None if p is None else p.read() for p in inputs],
                outputs=[p.read() for p in outputs],
                counters_zero=not counters.any(),
                within=all(p.intact() for p in places.values()),
            )
        finally:
            launcher.close()
            workspace.close()
            for place in places.values():
                place.close()

    def _launcher(self, case: Case, call: CaseCall, addresses: dict[int, int], workspace: Memory) -> Launcher:
        """An engine's launcher of a plan that is this call alone."""
        specs = [*call.spec.inputs, *call.spec.outputs]
        operands = tuple(
            Operand(name=str(i), buffer=0, shape=s.shape if s else (), strides=s.strides if s else ())
            for i, s in enumerate(specs)
        )
        count = len(call.spec.inputs)
        instruction = Instruction(
            op=case.op.name,
            name=str(case),
            inputs=tuple(i if s else -1 for i, s in enumerate(call.spec.inputs)),
            outputs=tuple(range(count, len(specs))),
            tactics=(TacticChoice(max_tokens=_ANY, tactic=case.tactic.name),),
        )
        plan = Plan(
            dims={"T": _ANY, "B": _ANY, "N": _ANY},
            buffers=(_OPERAND,),
            operands=operands,
            instructions=(instruction,),
            logits=0,
            arena_bytes=0,
            workspace_bytes=call.workspace,
        )
        code = self._code_of(case.tactic.name, self._works[str(case)])
        return Launcher(plan, code, self._folder, lambda o: addresses[int(o.name)], workspace.address)

    def _code_of(self, tactic: str, works: Sequence[Work]) -> Code:
        """Code with the kernels of ``works`` alone."""
        used = list(dict.fromkeys(w.kernel for w in works if isinstance(w, Launch)))
        own = tuple(
            msgspec.structs.replace(w, kernel=used.index(w.kernel)) if isinstance(w, Launch) else w
            for w in works
        )
        return msgspec.structs.replace(
            self._code,
            kernels=tuple(self._code.kernels[i] for i in used),
            launches=({tactic: Variants(any=own)},),
        )

    def close(self) -> None:
        self.device.make_current()
        self._stream.close()

    def __enter__(self) -> DeviceRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


class _Place:
    """Device memory for one tensor of the host."""

    def __init__(self, tensor: torch.Tensor, margin: int, stream: Stream, *, empty: bool = False) -> None:
        self._tensor, self._margin, self._stream = tensor, margin, stream
        self.nbytes = max(span(tensor), 1) * tensor.element_size()
        self._memory = Memory(self.nbytes + 2 * margin)
        self._memory.fill(SENTINEL, stream)
        self.address = self._memory.address + margin
        values = _bytes_of(flat_copy(tensor))
        if empty:
            values = np.full_like(values, NAN)
        stream.copy_in(self.address, values.ctypes.data, values.nbytes)
        stream.wait()

    def _bytes(self) -> Bytes:
        held = np.empty(self.nbytes + 2 * self._margin, np.uint8)
        self._stream.copy_out(held.ctypes.data, self._memory.address, held.nbytes)
        self._stream.wait()
        return held

    def read(self) -> torch.Tensor:
        """What is there now, with the tensor's shape and strides."""
        held = self._bytes()[self._margin : self._margin + self.nbytes].copy()
        flat = torch.from_numpy(held).view(self._tensor.dtype)
        return flat.as_strided(self._tensor.shape, self._tensor.stride())

    def intact(self) -> bool:
        """Whether the margins are as they were."""
        held = self._bytes()
        edges = np.concatenate([held[: self._margin], held[self._margin + self.nbytes :]])
        return bool((edges == SENTINEL).all())

    def close(self) -> None:
        self._memory.close()


def _bytes_of(flat: torch.Tensor) -> Bytes:
    values: Bytes = flat.view(torch.uint8).numpy()
    return values
