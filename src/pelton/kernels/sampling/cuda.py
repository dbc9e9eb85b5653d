"""The kernels of ``sample.cu`` and ``triton_edit.py``: every engine for a GPU carries them."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.kernels.launch import CudaSource, KernelSource, power_of_two

_THREADS, _PIECE = 256, 1024
#: By type of the logits, what the kernels call it.
LOGITS_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
#: Blocks of a step's rows that fill a GPU.
_BLOCKS = 1024


@dataclass(frozen=True)
class SamplerBytes:
    """Device memory of ``sample.cu``, bytes for each row; ``rows`` and ``bins`` must begin as zeros."""

    rows: int
    pieces: int
    bins: int
    lists: int

    @classmethod
    def of(cls, vocab: int) -> SamplerBytes:
        """For rows of ``vocab`` logits."""
        return cls(rows=64, pieces=24 * -(-vocab // _PIECE), bins=4 * 2048, lists=8 * 4096)

    @property
    def whole(self) -> int:
        return self.rows + self.pieces + self.bins + self.lists


def sampler_blocks(vocab: int, rows: int) -> int:
    """Blocks that share a row of ``vocab`` logits where there are ``rows``."""
    return max(1, min(-(-vocab // (_PIECE * _THREADS // 32)), _BLOCKS // rows))


def sampler_sources(vocab: int) -> dict[str, CudaSource]:
    """For rows of ``vocab`` logits (``LOGITS_KINDS``): kernels of a grid (``sampler_blocks``, rows)."""
    return {
        name: CudaSource(
            file="sampling/sample.cu",
            function=name,
            constants=(("V", vocab),),
            threads=_THREADS,
            shared=0,
            dependent=name == "scan",
        )
        for name in ("scan", "histogram", "choose")
    }


#: Of a token's count: the prompt has it.
IN_PROMPT = 0x8000
#: Entries of a sequence's list of biased and excluded tokens; more are left to the host.
LIST_ROOM = 1024
#: Alternatives of a token, at most.
MOST_LOGPROBS = 20
EDIT_MODULE = "pelton.kernels.sampling.triton_edit"


def edit_piece(vocab: int) -> int:
    """Logits of a row that a program edits."""
    return min(8192, max(16, power_of_two(vocab)))


def mask_words(vocab: int) -> int:
    """int32 words of a bit for each token."""
    return -(-vocab // 32)


def edit_sources(vocab: int) -> dict[str, KernelSource]:
    """The kernels of ``triton_edit.py``, parameters in the kernels' order.

    ``mark``: one program; ``keep``, ``edit``: a program for each ``edit_piece`` of each row; ``bias``,
    ``count``, ``logprobs``: one a row.
    """
    piece = edit_piece(vocab)
    logits, seat, counts = ("logits", "*fp32"), ("seat", "*i32"), ("counts", "*i16")
    tokens, wanted, kept = ("tokens", "*i32"), ("wanted", "*i32"), ("kept", "*fp32")
    row, block = ("V", vocab), ("BLOCK", 512)

    def source(
        name: str, types: tuple[tuple[str, str], ...], *constants: tuple[str, int], warps: int = 4
    ) -> KernelSource:
        return KernelSource(
            module=EDIT_MODULE, function=name, types=types, constants=constants, num_warps=warps
        )

    penalties = tuple((name, "*fp32") for name in ("repetition", "frequency", "presence"))
    entries = (("ids", "*i32"), ("values", "*fp32"), ("lengths", "*i32"))
    found = (("values", "*fp32"), ("ranks", "*i32"), ("ids", "*i32"))
    places = (("pairs", "*i32"), ("n", "i32"), ("sampled", "*i32"), ("unknown", "i32"))
    edited = (logits, seat, ("masked", "*i32"), *penalties, counts, ("allowed", "*i32"))
    words = ("WORDS", mask_words(vocab))
    return {
        "mark": source("mark", (counts, *places), block),
        "keep": source("keep", (logits, seat, wanted, kept), row, ("PIECE", piece), warps=8),
        "bias": source("bias", (logits, seat, ("short", "*i32"), *entries), row, ("ROOM", LIST_ROOM), block),
        "edit": source("edit", edited, row, words, ("PIECE", piece), warps=8),
        "count": source("count", (seat, tokens, counts), row, warps=1),
        "logprobs": source(
            "logprobs",
            (logits, kept, seat, wanted, tokens, *found),
            row,
            ("MOST", MOST_LOGPROBS),
            ("BLOCK", min(4096, piece)),
            warps=8,
        ),
    }
