"""What the check feeds to an engine and to its model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import InputBatch
from pelton.engine.config import EngineConfig
from pelton.engine.pieces import Piece as Piece
from pelton.engine.pieces import make_batch as make_batch
from pelton.engine.pieces import most_rows

#: Prompt lengths of the check: more than a block, and not a multiple of one.
_PREFILLS = (48, 17)

#: What the check reads, in an order that depends on the seed.
_TEXT = (
    "The harbour lay quiet at noon, and only the gulls moved over the grey water.",
    "To boil an egg, bring the water to a simmer, lower the egg in and wait six minutes.",
    "In 1905 a clerk in Bern showed that mass and energy are two names of one thing.",
    "def area(radius): return 3.14159 * radius ** 2",
    "She closed the door, counted to ten and asked again who had taken the letter.",
    "Most of the city's buses will be electric by the end of the decade, the council said.",
)

Tokens = npt.NDArray[np.int32]


def sample_tokens(tokenizer: Path, vocab_size: int, count: int, rng: np.random.Generator) -> Tokens:
    """``count`` tokens of a plain text, starting at a random sentence; random ones without a usable
    ``tokenizer.json`` in the folder ``tokenizer``.

    Precision is worth stating for text: random tokens flatten the predictions, and small errors
    reorder those.
    """
    try:
        from tokenizers import Tokenizer

        encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
        start = int(rng.integers(len(_TEXT)))
        ids = np.array(encode(" ".join((*_TEXT[start:], *_TEXT[:start]))).ids, np.int32)
    except Exception:  # whatever the library raises: the tokenizer is not what is checked here
        ids = np.zeros(0, np.int32)
    if ids.size < 2 or ids.max() >= vocab_size:
        return rng.integers(0, vocab_size, count, dtype=np.int32)
    return np.resize(ids, count)


def probe_steps(config: EngineConfig, tokenizer: Path, seed: int) -> tuple[list[InputBatch], int]:
    """The check's steps, and the number of KV blocks they use: a prefill, then a decode batched with
    another prefill, over a shuffled block pool."""
    build, rng = config.build, np.random.default_rng(seed)
    assert build.block_size and build.max_seq_len and build.max_num_tokens and build.max_batch_size
    most = min(build.max_num_tokens, most_rows(config))
    longest = min(build.max_seq_len - 1, most)
    first, second = (min(n, longest) for n in _PREFILLS)
    second = min(second, most - 1) if build.max_batch_size > 1 else 0
    need = [-(-n // build.block_size) for n in (first + 1, second)]
    pool = rng.permutation(sum(need) + 2).astype(np.int32)
    blocks = (pool[: need[0]], pool[need[0] : need[0] + need[1]])
    tokens = sample_tokens(tokenizer, config.model.vocab_size, first + 1 + second, rng)
    prefill = Piece(tokens=tokens[:first], start=0, blocks=blocks[0])
    decode = Piece(tokens=tokens[first : first + 1], start=first, blocks=blocks[0])
    pieces = [decode]
    if second:
        pieces.append(Piece(tokens=tokens[first + 1 :], start=0, blocks=blocks[1]))
    return [make_batch([prefill], config), make_batch(pieces, config)], pool.size
