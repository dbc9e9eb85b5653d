"""Joined deltas are the text of all tokens, for every kind of tokenizer, however tokens are cut."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.detokenizer import IncrementalDetokenizer
from pelton.runtime.tokenizer import Tokenizer
from tests.runtime.conftest import SMALL_TOKENIZERS

TEXTS = [
    "Hello world",
    "  leading and   inner spaces \n\n\tand lines\r\n",
    "naïve café, übergroß, 你好,世界! 日本語テキスト",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 🎉🎉🎉 and ﷽ and 𝕳𝖊𝖑𝖑𝖔",
    "def f(x):\n    return {'a': [1, 2, 3]}[x]  # <|im_end|> <eos> </s>",
    "हिन्दी, العربية, עברית, ไทย, ܐܪܡܝܐ, ᏣᎳᎩ, 𐍈𐌴𐌾",
    "\ufffd real replacement \ufffd\ufffd characters, zero\u200bwidth, e\u0301",
]
CACHE = {name: make() for name, make in SMALL_TOKENIZERS.items()}


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True
) -> tuple[str, list[str]]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    deltas = [detokenizer.push((token,)) for token in ids]
    deltas.append(detokenizer.finish())
    return "".join(deltas), deltas


def expected(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int], skip: bool) -> str:
    before = tokenizer.decode(prompt, skip)
    return tokenizer.decode([*prompt, *ids], skip)[len(before) :]


@pytest.mark.parametrize("name", SMALL_TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_full_text_for_any_ids(name: str, data: st.DataObject) -> None:
    tokenizer = CACHE[name]
    anchor = tokenizer.backend.token_to_id("a")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    prompt = data.draw(st.sampled_from([(), (anchor,)]))
    skip = data.draw(st.booleans())
    assert stream(tokenizer, ids, prompt, skip)[0] == expected(tokenizer, ids, prompt, skip)


@pytest.mark.parametrize("fixture", ["smollm2_tokenizer", "gemma3_tokenizer"])
def test_real_tokenizers(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(fixture)
    anchor = tokenizer.encode("a", add_special_tokens=False)
    rng = random.Random(0)
    cases = [tokenizer.encode(text) for text in TEXTS]
    cases += [tokenizer.encode("".join(rng.sample(text, len(text)))) for text in TEXTS]
    cases += [[rng.randrange(tokenizer.vocab_size) for _ in range(60)] for _ in range(150)]
    # Mostly tokens that are parts of characters; both vocabularies have theirs among the first.
    pieces = [i for i in range(10_000) if "\ufffd" in tokenizer.decode([i], False)]
    assert len(pieces) > 100
    cases += [
        [rng.choice(pieces) if rng.random() < 0.8 else rng.randrange(tokenizer.vocab_size) for _ in range(60)]
        for _ in range(150)
    ]
    for ids in cases:
        for prompt in ((), anchor):
            for skip in (True, False):
                assert stream(tokenizer, ids, prompt, skip)[0] == expected(tokenizer, ids, prompt, skip)


@pytest.mark.parametrize("fixture", ["smollm2_tokenizer", "gemma3_tokenizer"])
def test_text_comes_back_and_no_delta_shows_half_a_character(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(fixture)
    for text in TEXTS[:-1]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined, deltas = stream(tokenizer, ids, skip=False)
        assert joined == text
        assert not any("\ufffd" in delta for delta in deltas)


def test_a_finished_character_is_not_held_back() -> None:
    tokenizer = CACHE["byte level"]
    ids = tokenizer.encode("hello w🎉!")
    _, deltas = stream(tokenizer, ids)
    assert deltas == ["hello", " w", "", "", "🎉", "!", ""]


def test_a_valid_byte_run_is_one_piece_and_an_invalid_one_is_all_replaced() -> None:
    tokenizer = CACHE["byte fallback"]
    first = 3
    assert stream(tokenizer, [first + byte for byte in "🎉".encode()])[0] == "🎉"
    broken = [first + byte for byte in [*"é".encode(), 0xFF]]
    assert stream(tokenizer, broken)[0] == "\ufffd" * 3 == tokenizer.decode(broken)


def test_the_first_space_is_kept_where_an_answer_continues_text() -> None:
    tokenizer = CACHE["byte fallback, strip"]
    answer = [tokenizer.backend.token_to_id("▁hi")]
    bos, word = tokenizer.backend.token_to_id("<s>"), tokenizer.backend.token_to_id("a")
    assert stream(tokenizer, answer, (bos, word))[0] == " hi"
    assert stream(tokenizer, answer, (bos,))[0] == "hi"


def test_time_is_linear(smollm2_tokenizer: Tokenizer) -> None:
    piece = smollm2_tokenizer.encode("🎉", add_special_tokens=False)[0]

    def seconds(n: int) -> float:
        started = time.process_time()
        stream(smollm2_tokenizer, [piece] * n)
        return time.process_time() - started

    seconds(1000)
    assert seconds(40_000) < 40 * min(seconds(4_000) for _ in range(3))
