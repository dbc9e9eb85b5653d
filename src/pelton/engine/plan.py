"""The plan: what runs. A flat list of instructions over preplanned buffers, stored as JSON.

A plan is data: it is read by the native runner and by the Python debugging runner alike, and
nothing in it refers to torch. Dynamic dimensions are named (``"T"`` tokens, ``"B"`` sequences,
``"B+1"``, ``"N"`` logits rows, ``"P0"``, ``"P1"``, ... blocks of each KV group); a dynamic
dimension is always the first one of a buffer, so strides are constants.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Dim = int | str
BufferKind = Literal["arena", "input", "weight", "constant", "k_cache", "v_cache"]


class Buffer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of memory. Which piece, ``kind`` says:

    - ``arena``: ``offset`` bytes into the arena (64-byte aligned), planned for the largest bucket;
    - ``input``: one of the step's inputs, by ``name`` (``input_ids``, ``positions``,
      ``logits_indices``, ``slot_mapping.G``, ``block_table.G``, ``cu_seqlens``, ``seq_lens``
      with G the KV group's index);
    - ``weight``: a tensor of the engine's weight shards, by ``name``, in ``layout``;
    - ``constant``: a small tensor the compiler made (RoPE frequencies), stored with the weights;
    - ``k_cache``, ``v_cache``: layer ``layer``'s cache of KV group ``group``.
    """

    name: str
    kind: BufferKind
    dtype: str
    """Element type as the kernel sees it; ``uint8`` for packed weights."""
    shape: tuple[Dim, ...]
    """Logical shape; for packed weights (rows, cols) of the values."""
    offset: int = 0
    nbytes: int = 0
    """Bytes at the largest bucket."""
    quant: str = ""
    """Weights: the value type (dense dtype or block type). Empty otherwise."""
    layout: str = ""
    """Weights: arrangement of the bytes, such as ``rows`` or ``x16``. Empty otherwise."""
    layer: int = -1
    group: int = -1


class Operand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A view of a buffer that an instruction reads or writes."""

    name: str
    """The traced tensor's name: what ``Session.run(outputs=[...])`` takes."""
    buffer: int
    """Index into ``Plan.buffers``."""
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]
    """In elements; meaningless for packed weights."""
    offset: int = 0
    """In elements from the buffer's start."""


class TacticChoice(msgspec.Struct, frozen=True, kw_only=True):
    """``tactic`` runs when the step has at most ``max_tokens`` tokens (first match wins)."""

    max_tokens: int
    tactic: str


class Instruction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One op: operands by index into ``Plan.operands`` (-1: an optional input that is absent)."""

    op: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: dict[str, bool | int | float | str] = {}
    """Every non-tensor argument of the op's schema, in its order, defaults included (native kernels
    take them by position)."""
    tactics: tuple[TacticChoice, ...] = ()
    """Sorted by ``max_tokens``; empty: only the reference can run it."""
    detail: str = ""
    """Operands with shapes and types, for people; in engines built with profiling detailed."""


class ExternalTactic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tactic from outside Pelton: code that runs only from an engine one trusts."""

    kind: Literal["python", "library"]
    """A Python function over NumPy arrays, or a C function of a library in the engine."""
    function: str
    """``package.module:function``, or the C function's name."""
    tensors: tuple[str, ...] = ()
    """Python: the names by which the function takes the instruction's inputs."""
    file: str = ""
    """C: the library, relative to the engine."""
    package: str = ""
    """Python: the installed package that has the module; empty: the module belongs to none."""
    version: str = ""
    """Python: the package's version at build."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the runner needs besides weights."""

    dims: dict[str, int]
    """Largest value of each dynamic dimension that sizes the arena: T, B, N."""
    buffers: tuple[Buffer, ...]
    operands: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]
    logits: int
    """Index of the operand that holds the logits, (N, vocab) float32."""
    arena_bytes: int
    workspace_bytes: int
    """Scratch shared by all instructions, on top of the arena."""
    external: dict[str, ExternalTactic] = {}
    """Tactics in the instructions that are not kernels of Pelton's library, by name."""
    op_modules: dict[str, str] = {}
    """Python module of each op from outside Pelton: the reference runner needs it."""


def row_dim(plan: Plan, instruction: Instruction) -> str:
    """The dimension that a GPU's buckets of an instruction are about: its result's first, or tokens."""
    for index in instruction.outputs:
        dim = plan.operands[index].shape[0]
        if isinstance(dim, str):
            return dim
    return "T"


def producers(plan: Plan) -> dict[int, int]:
    """The instruction that makes what is in each arena buffer, both by index."""
    return {
        plan.operands[o].buffer: index
        for index, instruction in enumerate(plan.instructions)
        for o in instruction.outputs
    }
