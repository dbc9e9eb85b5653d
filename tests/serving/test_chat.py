"""``/v1/chat/completions`` through the official client."""

from __future__ import annotations

import openai
import pytest

from tests.serving.running_server import RunningServer

MESSAGES = [{"role": "user", "content": "Hello"}]


def test_an_answer_has_openai_shape_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="test-model", messages=MESSAGES, max_tokens=12)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "test-model"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert len(choice.message.content or "") == 12
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_joins_to_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="test-model", messages=MESSAGES, max_tokens=30)
    chunks = list(
        client.chat.completions.create(
            model="test-model",
            messages=MESSAGES,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert sum(c.choices[0].finish_reason is not None for c in chunks if c.choices) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30
    assert len({c.id for c in chunks}) == 1


def test_a_second_request_finds_its_prompt_cached(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "The same long prompt, sent twice over. " * 3}]
    for expect_hit in (False, True):
        usage = client.chat.completions.create(model="test-model", messages=messages, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert bool(usage.prompt_tokens_details.cached_tokens) == expect_hit


def test_n_answers_differ_and_the_seed_repeats_them(client: openai.OpenAI) -> None:
    def answers(seed: int) -> list[str | None]:
        made = client.chat.completions.create(
            model="test-model", messages=MESSAGES, max_tokens=16, n=3, temperature=1.0, seed=seed
        )
        assert [c.index for c in made.choices] == [0, 1, 2]
        return [c.message.content for c in made.choices]

    assert len(set(answers(1))) == 3
    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_n_streams_are_interleaved_by_index(client: openai.OpenAI) -> None:
    kwargs = {
        "model": "test-model",
        "messages": MESSAGES,
        "max_tokens": 9,
        "n": 3,
        "temperature": 1,
        "seed": 5,
    }
    whole = client.chat.completions.create(**kwargs)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**kwargs, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [texts[i] for i in range(3)] == [c.message.content for c in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer_and_are_not_in_it(client: openai.OpenAI, stream: bool) -> None:
    whole = client.chat.completions.create(model="test-model", messages=MESSAGES, max_tokens=40)
    text = whole.choices[0].message.content or ""
    stop = text[20:24]
    if stream:
        chunks = client.chat.completions.create(
            model="test-model", messages=MESSAGES, max_tokens=40, stop=[stop], stream=True
        )
        choices = [c.choices[0] for c in chunks]
        got, reason = "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason
    else:
        choice = client.chat.completions.create(
            model="test-model", messages=MESSAGES, max_tokens=40, stop=stop
        ).choices[0]
        got, reason = choice.message.content or "", choice.finish_reason
    assert got == text[: text.index(stop)]
    assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_list_every_token_and_its_alternatives(client: openai.OpenAI, stream: bool) -> None:
    kwargs = {
        "model": "test-model",
        "messages": MESSAGES,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
    }
    if stream:
        entries = []
        text = ""
        for chunk in client.chat.completions.create(**kwargs, stream=True):
            text += chunk.choices[0].delta.content or ""
            if chunk.choices[0].logprobs:
                entries += chunk.choices[0].logprobs.content or []
    else:
        choice = client.chat.completions.create(**kwargs).choices[0]
        assert choice.logprobs is not None
        entries, text = choice.logprobs.content or [], choice.message.content or ""
    assert "".join(e.token for e in entries) == text
    for entry in entries:
        assert entry.logprob <= 0
        assert bytes(entry.bytes or ()).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        # Greedy takes the likeliest.
        assert entry.top_logprobs[0].token == entry.token
        values = [t.logprob for t in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_content_may_be_text_parts_and_developer_is_system(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="test-model",
        messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}],
        max_tokens=8,
    )
    parts = client.chat.completions.create(
        model="test-model",
        messages=[
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
        max_tokens=8,
    )
    assert plain.choices[0].message.content == parts.choices[0].message.content


def test_max_completion_tokens_is_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="test-model", messages=MESSAGES, max_completion_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_without_max_tokens_an_answer_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="test-model", messages=MESSAGES)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256


def test_unknown_fields_are_warned_of_not_refused(server: RunningServer, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="test-model", messages=MESSAGES, max_tokens=1, extra_body={"tempurature": 1, "zzz": None}
    )
    assert raw.headers["warning"] == '299 pelton "ignored unknown fields: tempurature, zzz"'
    assert raw.parse().choices[0].message.content


def test_continue_final_message_goes_on_within_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="test-model",
        messages=[*MESSAGES, {"role": "assistant", "content": "Well"}],
        max_tokens=6,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )
    prompt = bytes(t for t in answer.model_extra["prompt_token_ids"] if t < 256).decode()
    assert prompt.endswith("assistant\nWell")
