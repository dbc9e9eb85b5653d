"""CUDA graphs of steps, padded to sizes that come again: decode steps, and small steps with prompts in them.

A decode step's graph has all of the step, from its inputs to its tokens, so that its kernels overlap from
the first to the last: one for each place that inputs are staged in, with the sampler's first kernel and
without. Of others it has the network alone, beside which the ends are nothing.

A graph is captured where a step asks for it: of decode steps the first of its sizes; of others the second,
since there are many sizes and a capture takes as long as the launches that it saves. Of those the latest
used are kept. What a step is padded with: sequences of one token (decode) or of none (others), which have no
keys, and tokens of no sequence, which write no KV; nobody reads their results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pelton.kernels.gpu.driver import Graph, Stream, capture

#: Decode steps of at most so many sequences run as graphs.
_LARGEST_DECODE = 512
#: Other steps of at most so many tokens: larger ones take the GPU longer than the host.
_LARGEST_MIXED = 256
#: Graphs of other steps that are kept.
_MOST_MIXED = 64


def decode_sizes(largest: int) -> tuple[int, ...]:
    """Buckets of sequences: 1, 2, 4, 8, then quarters between powers of two, but steps of at least 8.

    Powers of two are among them: tiles of products are full there.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < min(largest, _LARGEST_DECODE):
        power = 1 << sizes[-1].bit_length() - 1
        sizes.append(sizes[-1] + max(8, power // 4))
    last = min(largest, _LARGEST_DECODE)
    return (*(s for s in sizes if s < last), last)


@dataclass(frozen=True)
class Padded:
    """Sizes that a step is padded to, and its kind."""

    tokens: int
    sequences: int
    rows: int
    """Of logits."""
    decode: bool

    @property
    def dims(self) -> dict[str, int]:
        return {"T": self.tokens, "B": self.sequences, "B+1": self.sequences + 1, "N": self.rows}


class StepGraphs:
    """Graphs of steps whose dimensions are at most ``most``, of what functions put into ``stream``."""

    def __init__(self, most: Mapping[str, int], stream: Stream) -> None:
        self._most, self._stream = most, stream
        self._decode_sizes = decode_sizes(min(most["B"], most["N"]))
        self._decodes: dict[tuple[Padded, int, bool], Graph] = {}
        """By size, slot, and whether tokens are taken."""
        self._mixed: OrderedDict[Padded, Graph | None] = OrderedDict()
        """None: seen once."""

    def padded(self, dims: Mapping[str, int], *, decode: bool) -> Padded | None:
        """What a step of sizes ``dims`` is padded to; None: it has no graph."""
        sequences, rows = dims["B"], dims["N"]
        if decode and rows == sequences:
            size = next((size for size in self._decode_sizes if size >= sequences), 0)
            return Padded(size, size, size, decode=True) if size else None
        if decode or rows > sequences:
            return None
        tokens = _rounded(dims["T"])
        sequences = 1 << (sequences - 1).bit_length()
        found = Padded(tokens, sequences, sequences if rows else 0, decode=False)
        fits = tokens <= _LARGEST_MIXED and all(found.dims[d] <= self._most[d] for d in ("T", "B", "N"))
        return found if fits else None

    def decode(self, padded: Padded, slot: int, scans: bool, run: Callable[[], None]) -> None:
        """A decode step of these sizes, all of it: ``run`` puts it into the stream."""
        graph = self._decodes.get((padded, slot, scans))
        if graph is None:
            graph = self._decodes[padded, slot, scans] = self._captured(run)
        graph.launch(self._stream)

    def mixed(self, padded: Padded, run: Callable[[], None]) -> None:
        """The network of another step of these sizes, whose inputs are in place."""
        if padded not in self._mixed:
            self._mixed[padded] = None
            run()
        else:
            graph = self._mixed[padded]
            if graph is None:
                graph = self._mixed[padded] = self._captured(run)
            graph.launch(self._stream)
        self._mixed.move_to_end(padded)
        if len(self._mixed) > _MOST_MIXED:
            _, graph = self._mixed.popitem(last=False)
            if graph is not None:
                self._stream.wait()  # it may be running
                graph.close()

    def _captured(self, run: Callable[[], None]) -> Graph:
        with capture(self._stream) as captured:
            run()
        assert captured.graph is not None
        return captured.graph

    def close(self) -> None:
        for graph in (*self._decodes.values(), *self._mixed.values()):
            if graph is not None:
                graph.close()
        self._decodes.clear()
        self._mixed.clear()


def _rounded(tokens: int) -> int:
    """Up to a multiple of 8, beyond 64 of 16, beyond 128 of 32."""
    step = 8 if tokens <= 64 else 16 if tokens <= 128 else 32
    return -(-tokens // step) * step
