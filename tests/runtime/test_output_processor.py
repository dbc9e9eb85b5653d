"""Stop strings, text assembly and grouping of answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.runtime.output_processor import OutputProcessor, StopStringMatcher
from pelton.runtime.request import RequestOutput, RequestUpdate, SamplingParams, TokenLogprobs
from pelton.runtime.validation import resolve_requests
from tests.runtime.conftest import byte_fallback_tokenizer, byte_level_tokenizer
from tests.runtime.fakes import fake_config

TOKENIZER = byte_level_tokenizer()
EOS = TOKENIZER.eos_token_ids[0]


def cut_at_stop(text: str, stops: list[str], include: bool, exempt: int = 0) -> tuple[str, str | None]:
    """The definition: the first match to complete, of those the longest; ends within the first
    ``exempt`` characters do not count."""
    for end in range(exempt + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    exempt_pieces=st.integers(0, 4),
    data=st.data(),
)
def test_the_result_does_not_depend_on_how_text_is_cut(
    text: str, stops: list[str], include: bool, exempt_pieces: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    exempt = sum(map(len, pieces[:exempt_pieces]))
    want, stop = cut_at_stop(text, stops, include, exempt)
    matcher, got = StopStringMatcher(stops, include), ""
    for i, piece in enumerate(pieces):
        got += matcher.push(piece, may_stop=i >= exempt_pieces)
        assert want.startswith(got), "text beyond the answer leaked"
        if matcher.matched:
            break
    else:
        got += matcher.flush()
    assert (got, matcher.matched) == (want, stop)


def test_no_more_is_held_back_than_could_begin_a_stop_string() -> None:
    matcher = StopStringMatcher(["<end>", "stop"])
    assert [matcher.push(t) for t in ("abc<", "en", "x st", "o", "ne")] == ["abc", "", "<enx ", "", "stone"]


def run(
    answer: list[int], *, finish: str | None = "length", prompt: tuple[int, ...] = (5,), **sampling: Any
) -> tuple[list[RequestOutput], list[str]]:
    """Feed ``answer`` token by token, as an executor would; outputs and aborts."""
    processor = OutputProcessor(TOKENIZER)
    config = fake_config(vocab_size=400)
    params = SamplingParams(**sampling)
    requests = resolve_requests(prompt, params, config, TOKENIZER, "r")
    processor.add("r", requests, prompt="p")
    outputs, aborts = [], []
    for i, token in enumerate(answer):
        reason = finish if i == len(answer) - 1 else None
        update = RequestUpdate(
            request_id="r",
            new_token_ids=(token,),
            finish_reason=reason,  # type: ignore[arg-type]
            logprobs=(TokenLogprobs((token,), (-0.5,), 1),) if params.logprobs is not None else (),
        )
        new, abort = processor.process([update])
        outputs += new
        aborts += abort
    if outputs[-1].finished:
        assert len(processor) == 0
    return outputs, aborts


def check_consistent(outputs: list[RequestOutput]) -> RequestOutput:
    """Deltas and new tokens join to the whole."""
    last = outputs[-1]
    assert "".join(o.outputs[0].delta for o in outputs) == last.outputs[0].text
    assert [t for o in outputs for t in o.outputs[0].new_token_ids] == last.outputs[0].token_ids
    return last


def test_a_stop_string_across_tokens_ends_the_answer_and_never_shows() -> None:
    ids = TOKENIZER.encode("hello world, hello again")
    outputs, aborts = run(ids, stop=("ld, h",), logprobs=0)
    last = check_consistent(outputs)
    answer = last.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hello wor", "stop", "ld, h")
    assert aborts == ["r"]
    assert last.finished
    assert len(answer.token_ids) == len(answer.logprobs or ()) < len(ids)
    assert answer.cumulative_logprob == -0.5 * len(answer.token_ids)


def test_the_stop_string_can_be_included() -> None:
    outputs, _ = run(TOKENIZER.encode("hello world"), stop=("o w",), include_stop_str_in_output=True)
    assert check_consistent(outputs).outputs[0].text == "hello w"


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    outputs, aborts = run(TOKENIZER.encode("hell"), stop=("ll",))
    answer = check_consistent(outputs).outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason, aborts) == ("he", "stop", "ll", [])


def test_text_held_for_a_stop_string_comes_out_at_the_end() -> None:
    outputs, _ = run(TOKENIZER.encode("ab<en"), stop=("<end>",))
    assert check_consistent(outputs).outputs[0].text == "ab<en"


def test_min_tokens_exempts_the_beginning_from_stop_strings() -> None:
    ids = TOKENIZER.encode("abab")
    assert len(ids) == 4
    outputs, _ = run(ids, stop=("b",), min_tokens=2, max_tokens=9)
    assert check_consistent(outputs).outputs[0].text == "aba"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_has_no_text(include: bool) -> None:
    ids = [*TOKENIZER.encode("hell"), *TOKENIZER.encode("x")]
    outputs, _ = run(ids, finish="stop", stop_token_ids=(ids[-1],), include_stop_str_in_output=include)
    answer = check_consistent(outputs).outputs[0]
    assert answer.text == ("hellx" if include else "hell")
    assert answer.token_ids == ids


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    ids = TOKENIZER.encode("🎉")[:-1]
    outputs, _ = run(ids)
    assert [o.outputs[0].delta for o in outputs] == [""] * (len(ids) - 1) + ["\ufffd"]


def test_special_tokens_can_be_shown() -> None:
    ids = [TOKENIZER.encode("a")[0], EOS, TOKENIZER.encode("b")[0]]
    assert run(ids)[0][-1].outputs[0].text == "ab"
    assert run(ids, skip_special_tokens=False)[0][-1].outputs[0].text == "a<eos>b"


def test_an_answer_continues_its_prompt() -> None:
    tokenizer = byte_fallback_tokenizer()
    word = tokenizer.backend.token_to_id("▁hi")
    processor = OutputProcessor(tokenizer)
    requests = resolve_requests((1, word), SamplingParams(), fake_config(vocab_size=400), tokenizer, "r")
    processor.add("r", requests)
    outputs, _ = processor.process([RequestUpdate(request_id="r", new_token_ids=(word,))])
    assert outputs[0].outputs[0].text == " hi"


def test_answers_of_one_prompt_come_together() -> None:
    processor = OutputProcessor(TOKENIZER)
    a, b = TOKENIZER.encode("ab")
    params = SamplingParams(n=2, stop=("b",))
    processor.add("r", resolve_requests((5,), params, fake_config(vocab_size=400), TOKENIZER, "r"))
    assert processor.request_ids("r") == ["r.0", "r.1"]
    updates = [
        RequestUpdate(request_id="r.0", new_token_ids=(a,), num_cached_tokens=3, queue_time=0.5),
        RequestUpdate(request_id="r.1", new_token_ids=(b,)),
        RequestUpdate(request_id="stranger", new_token_ids=(b,)),
    ]
    (output,), aborts = processor.process(updates)
    assert [(o.index, o.text, o.delta, o.finish_reason) for o in output.outputs] == [
        (0, "a", "a", None),
        (1, "", "", "stop"),
    ]
    assert (aborts, output.finished, processor.request_ids("r")) == (["r.1"], False, ["r.0"])
    assert (output.num_cached_tokens, output.queue_time) == (3, 0.5)
    late = RequestUpdate(request_id="r.1", finish_reason="abort")
    assert processor.process([late]) == ([], [])
    done = RequestUpdate(request_id="r.0", new_token_ids=(a,), finish_reason="length")
    (output,), _ = processor.process([done])
    assert output.finished
    assert [o.text for o in output.outputs] == ["aa", ""]
    assert [o.finish_reason for o in output.outputs] == ["length", "stop"]
    assert len(processor) == 0


def test_two_updates_of_one_answer_in_one_round_add_up() -> None:
    processor = OutputProcessor(TOKENIZER)
    a, b = TOKENIZER.encode("ab")
    processor.add("r", resolve_requests((5,), SamplingParams(), fake_config(vocab_size=400), TOKENIZER, "r"))
    updates = [RequestUpdate(request_id="r", new_token_ids=(t,)) for t in (a, b)]
    (output,), _ = processor.process(updates)
    assert (output.outputs[0].delta, output.outputs[0].new_token_ids) == ("ab", (a, b))


def test_a_forgotten_prompt_is_ignored() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", resolve_requests((5,), SamplingParams(), fake_config(), TOKENIZER, "r"))
    processor.forget("r")
    processor.forget("r")
    assert processor.process([RequestUpdate(request_id="r", new_token_ids=(1,))]) == ([], [])
    assert processor.request_ids("r") == []
