"""Masks, bias, penalties and log-probabilities on the GPU: what each sequence needs stays there, by its seat.

Tables are made when a request first needs them; the memory plan has room for them (``edit_bytes``).
"""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pelton.engine.batch_sampling import LogitsEdits, SamplingInputs, SequenceEdits, StepLogprobs
from pelton.engine.cuda.code import Code
from pelton.engine.cuda.kernel import EngineKernel
from pelton.engine.shards import align
from pelton.kernels.gpu.driver import Memory, PinnedMemory, Stream
from pelton.kernels.sampling.cuda import LIST_ROOM, MOST_LOGPROBS, edit_piece, mask_words

_INTS = ("seat_N", "masked_N", "short_N")
_FLOATS = ("repetition_N", "frequency_N", "presence_N")
_KERNELS = ("mark", "keep", "bias", "edit", "count", "logprobs")


def edit_bytes(seats: int, rows: int, vocab: int) -> int:
    """Device memory of all tables: counts, bits of allowed tokens, lists, and logits before edits."""
    return seats * (2 * vocab + 4 * mask_words(vocab) + 8 * LIST_ROOM + 8) + 4 * rows * vocab


class _Staging:
    """Page-locked memory of one step in flight."""

    def __init__(self, rows: int) -> None:
        self.stride = align(4 * rows)
        self.parameters = PinnedMemory((len(_INTS) + len(_FLOATS) + 1) * self.stride)
        self.values = PinnedMemory(4 * rows * (1 + MOST_LOGPROBS))
        self.ranks = PinnedMemory(4 * rows)
        self.ids = PinnedMemory(4 * rows * MOST_LOGPROBS)
        self.begins = PinnedMemory(1 << 16)
        self._held: list[npt.NDArray[np.generic] | None] = [None] * (len(_INTS) + len(_FLOATS) + 1)

    def put(self, field: int, values: npt.NDArray[np.generic]) -> int:
        """Store a parameter of each row -> its address."""
        start = field * self.stride
        if self._held[field] is not values:  # what comes again holds what it held
            self._held[field] = values
            self.parameters.array(np.uint8)[start : start + values.nbytes] = values.view(np.uint8)
        return self.parameters.address + start

    def room(self, nbytes: int) -> npt.NDArray[np.int32]:
        """At least ``nbytes`` for what sequences begin with; the step that used it last is over."""
        if self.begins.nbytes < nbytes:
            self.begins.close()
            self.begins = PinnedMemory(2 * nbytes)
        array: npt.NDArray[np.int32] = self.begins.array(np.int32)
        return array

    def close(self) -> None:
        for memory in (self.parameters, self.values, self.ranks, self.ids, self.begins):
            memory.close()


class DeviceEdits:
    """Edits of ``rows`` rows of ``logits`` (an address), for sequences in ``seats`` seats.

    ``tokens``: address of the tokens that steps sample.
    """

    def __init__(
        self, code: Code, root: Path, *, seats: int, rows: int, vocab: int, logits: int, tokens: int
    ) -> None:
        self._seats, self._rows, self._vocab, self._tokens = seats, rows, vocab, tokens
        self._pieces = -(-vocab // edit_piece(vocab))
        self._kernels = {name: EngineKernel(code, root, name) for name in _KERNELS}
        self._logits = C.c_uint64(logits)
        self._fields = {name: C.c_uint64() for name in (*_INTS, *_FLOATS, "wanted")}
        self._tables: dict[str, Memory] = {}
        self._kept: Memory | None = None
        self._staging: dict[int, _Staging] = {}
        self._unedited: npt.NDArray[np.int32] = np.full(rows, -1, np.int32)
        f, self._kept_at = self._fields, C.c_uint64()
        self._outs = [C.c_uint64() for _ in range(3)]
        self._kernels["keep"].bind([self._logits, f["seat_N"], f["wanted"], self._kept_at])
        given = self._logits, self._kept_at, f["seat_N"], f["wanted"], C.c_uint64(tokens)
        self._kernels["logprobs"].bind([*given, *self._outs])

    def _make_tables(self, stream: Stream) -> None:
        words = mask_words(self._vocab)
        sizes = {"counts": 2 * self._vocab, "allowed": 4 * words, "lengths": 8}
        sizes |= {"ids": 4 * LIST_ROOM, "values": 4 * LIST_ROOM}
        self._tables = {name: Memory(self._seats * size) for name, size in sizes.items()}
        for memory in self._tables.values():
            memory.fill(0, stream)
        at = {name: C.c_uint64(memory.address) for name, memory in self._tables.items()}
        f = self._fields
        lists = at["ids"], at["values"], at["lengths"]
        self._kernels["bias"].bind([self._logits, f["seat_N"], f["short_N"], *lists])
        penalties = f["repetition_N"], f["frequency_N"], f["presence_N"]
        tables = at["counts"], at["allowed"]
        self._kernels["edit"].bind([self._logits, f["seat_N"], f["masked_N"], *penalties, *tables])
        self._kernels["count"].bind([f["seat_N"], C.c_uint64(self._tokens), at["counts"]])

    def before(self, stream: Stream, inputs: SamplingInputs, rows: int, slot: int) -> None:
        """Edit the logits. ``slot``: which of the steps in flight this is."""
        edits = inputs.edits
        if edits is None:
            return
        assert edits.seat_N.max() < self._seats, "a seat beyond max_batch_size"
        staging = self._staged(slot)
        if not self._tables:
            self._make_tables(stream)
        self._begin(stream, edits, staging)
        for i, name in enumerate((*_INTS, *_FLOATS)):
            self._fields[name].value = staging.put(i, getattr(edits, name))
        if inputs.logprobs_N is not None:
            self._keep(stream, inputs.logprobs_N, rows, staging)
        self._kernels["bias"].run(stream, rows)
        self._kernels["edit"].run(stream, rows, self._pieces)

    def _keep(self, stream: Stream, wanted_N: npt.NDArray[np.int32], rows: int, staging: _Staging) -> None:
        """Copies of the logits that log-probabilities are of."""
        if self._kept is None:
            self._kept = Memory(4 * self._rows * self._vocab)
            self._kept_at.value = self._kept.address
        self._fields["wanted"].value = staging.put(len(_INTS) + len(_FLOATS), wanted_N)
        self._kernels["keep"].run(stream, rows, self._pieces)

    def _begin(self, stream: Stream, edits: LogitsEdits, staging: _Staging) -> None:
        words, at = mask_words(self._vocab), 0
        sizes = [2 * len(b.token_ids) + words + 2 * LIST_ROOM + 2 for b in edits.begins]
        whole = staging.room(4 * sum(sizes))
        for begin, size in zip(edits.begins, sizes, strict=True):
            self._one(stream, begin, whole[at : at + size], staging.begins.address + 4 * at, words)
            at += size

    def _one(
        self, stream: Stream, b: SequenceEdits, host: npt.NDArray[np.int32], address: int, words: int
    ) -> None:
        """Bring one sequence's state to its seat through ``host``, which is at ``address``."""
        n, tables = len(b.token_ids), self._tables
        counts = tables["counts"].address + 2 * self._vocab * b.seat
        if n or b.unknown:
            stream.fill(counts, 0, 2 * self._vocab)
            host[0 : 2 * n : 2], host[1 : 2 * n : 2] = b.token_ids, b.counts
            numbers = C.c_int32(n), C.c_uint64(self._tokens), C.c_int32(b.unknown)
            self._kernels["mark"].bind([C.c_uint64(counts), C.c_uint64(address), *numbers])
            self._kernels["mark"].run(stream, 1)
        at = 2 * n
        if b.allowed_ids is not None:
            bits = np.zeros(32 * words, bool)
            bits[b.allowed_ids] = True
            host[at : at + words] = np.packbits(bits, bitorder="little").view(np.int32)
            stream.copy_in(tables["allowed"].address + 4 * words * b.seat, address + 4 * at, 4 * words)
        at += words
        always, ends = len(b.bias_ids), len(b.end_ids)
        host[at : at + always], host[at + always : at + always + ends] = b.bias_ids, b.end_ids
        if always + ends:
            ids = tables["ids"].address + 4 * LIST_ROOM * b.seat
            stream.copy_in(ids, address + 4 * at, 4 * (always + ends))
        at += LIST_ROOM
        if always:
            host[at : at + always] = b.bias.view(np.int32)
            stream.copy_in(tables["values"].address + 4 * LIST_ROOM * b.seat, address + 4 * at, 4 * always)
        at += LIST_ROOM
        host[at : at + 2] = always, ends
        stream.copy_in(tables["lengths"].address + 8 * b.seat, address + 4 * at, 8)

    def after(self, stream: Stream, inputs: SamplingInputs, rows: int, slot: int) -> None:
        """Count the tokens, and make the log-probabilities that are wanted."""
        if inputs.edits is not None:
            self._kernels["count"].run(stream, rows)
        if inputs.logprobs_N is None:
            return
        staging, f = self._staged(slot), self._fields
        f["wanted"].value = staging.put(len(_INTS) + len(_FLOATS), inputs.logprobs_N)
        if inputs.edits is None:
            f["seat_N"].value = staging.put(0, self._unedited)
        for out, memory in zip(self._outs, (staging.values, staging.ranks, staging.ids), strict=True):
            out.value = memory.address
        self._kernels["logprobs"].run(stream, rows)

    def logprobs(self, slot: int, rows: int) -> StepLogprobs:
        """What ``after`` made; the step is over."""
        staging = self._staging[slot]
        values = staging.values.array(np.float32).reshape(-1, 1 + MOST_LOGPROBS)[:rows].copy()
        return StepLogprobs(
            chosen_N=values[:, 0],
            ranks_N=staging.ranks.array(np.int32)[:rows].copy(),
            token_ids_Nk=staging.ids.array(np.int32).reshape(-1, MOST_LOGPROBS)[:rows].copy(),
            logprobs_Nk=values[:, 1:],
        )

    def _staged(self, slot: int) -> _Staging:
        if slot not in self._staging:
            self._staging[slot] = _Staging(self._rows)
        return self._staging[slot]

    def close(self) -> None:
        for kernel in self._kernels.values():
            kernel.close()
        for memory in self._tables.values():
            memory.close()
        if self._kept is not None:
            self._kept.close()
        for staging in self._staging.values():
            staging.close()
