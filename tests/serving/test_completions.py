"""``/v1/completions`` through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

MODEL = "test-model"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("Hello", 1),
        (["Hello", "Good day"], 2),
        ([72, 101, 108, 108, 111], 1),
        ([[72, 101, 108, 108, 111], [71, 111]], 2),
    ],
)
def test_all_four_forms_of_prompt(client: openai.OpenAI, prompt: Any, count: int) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5)
    assert [c.index for c in answer.choices] == list(range(count))
    assert all(len(c.text) == 5 for c in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5 * count


def test_text_and_its_token_ids_give_the_same_answer(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model=MODEL, prompt=p, max_tokens=9).choices[0].text
        for p in ("Hello", [72, 101, 108, 108, 111])
    ]
    assert texts[0] == texts[1]


def test_the_default_is_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_choices_of_several_prompts_and_n_are_in_order(client: openai.OpenAI) -> None:
    kwargs: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "n": 2, "temperature": 1, "seed": 3}
    both = client.completions.create(prompt=["Hello", "Good day"], **kwargs)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(prompt=p, **kwargs).choices for p in ("Hello", "Good day")]
    assert [c.text for c in both.choices] == [c.text for choices in alone for c in choices]


def test_streams_of_several_prompts_join_to_the_same(client: openai.OpenAI) -> None:
    kwargs: dict[str, Any] = {"model": MODEL, "prompt": ["Hello", "Good day"], "max_tokens": 8, "n": 2}
    kwargs |= {"temperature": 1, "seed": 4}
    whole = client.completions.create(**kwargs)
    texts, usage = dict.fromkeys(range(4), ""), None
    for event in client.completions.create(**kwargs, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.text
        usage = event.usage
    assert [texts[i] for i in range(4)] == [c.text for c in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == 32


def test_logprobs_have_the_legacy_shape(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, logprobs=2).choices[0]
    record = choice.logprobs
    assert record is not None
    assert record.tokens is not None
    assert "".join(record.tokens) == choice.text
    assert record.text_offset == [0, 1, 2, 3]
    assert record.token_logprobs is not None
    assert record.top_logprobs is not None
    for token, value, top in zip(record.tokens, record.token_logprobs, record.top_logprobs, strict=True):
        assert top[token] == value == max(top.values())
        assert len(top) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    kwargs: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 3, "echo": True, "logprobs": 1}
    text, tokens, values, offsets = "", [], [], []
    for answer in (
        client.completions.create(**kwargs, stream=True) if stream else [client.completions.create(**kwargs)]
    ):
        text += answer.choices[0].text
        if (record := answer.choices[0].logprobs) is not None:
            tokens += record.tokens or []
            values += record.token_logprobs or []
            offsets += record.text_offset or []
    assert text.startswith("Hello")
    assert len(text) == 8
    assert "".join(tokens) == text
    assert values[0] is None
    assert all(v <= 0 for v in values[1:])
    assert offsets == list(range(8))


def test_echo_with_max_tokens_zero_only_scores(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == list("Hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_pelton_extras_take_effect(client: openai.OpenAI) -> None:
    def text(**extra: Any) -> str:
        made = client.completions.create(model=MODEL, prompt="Hello", max_tokens=12, extra_body=extra)
        return made.choices[0].text

    plain = text()
    assert set(text(allowed_token_ids=[97, 98])) <= set("ab")
    assert plain[0] not in text(bad_words=[plain[0]])
    assert text(stop_token_ids=[ord(plain[5])]) == plain[: plain.index(plain[5])]
    assert text(repetition_penalty=5.0) != plain
    assert text(top_k=1, temperature=1.0, seed=1) == plain
    assert text(min_p=1.0, temperature=1.0, seed=1) == plain
    assert text(logit_bias={"33": 100}) == "!" * 12
    assert len(text(logit_bias={"257": 100}, min_tokens=4, max_tokens=8)) == 4
    assert len(text(logit_bias={"257": 100}, ignore_eos=True, skip_special_tokens=False)) == 12 * len("</s>")
    assert text(stop=[plain[3:5]], include_stop_str_in_output=True).endswith(plain[3:5])


def test_prompt_logprobs_and_token_ids_are_reported_of_every_prompt(client: openai.OpenAI) -> None:
    prompts = ["Hello", "Hey"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=2, extra_body={"prompt_logprobs": 1, "return_token_ids": True}
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        extra = choice.model_extra or {}
        assert extra["prompt_token_ids"] == list(prompt.encode())
        assert extra["prompt_logprobs"][0] is None
        assert len(extra["prompt_logprobs"]) == len(prompt)
        assert len(extra["token_ids"]) == 2


def test_a_stop_sequence_leaves_its_reason(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt="Hello", max_tokens=12).choices[0].text
    choice = client.completions.create(model=MODEL, prompt="Hello", max_tokens=12, stop=plain[4:6]).choices[0]
    assert choice.finish_reason == "stop"
    assert (choice.model_extra or {})["stop_reason"] == plain[4:6]
