"""What is wrong with a request is said in one sentence, in OpenAI's shape, and nothing breaks."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serving.running_server import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> tuple[str, str, Any]:
    return "POST", CHAT, {"messages": USER, "max_tokens": 4, **fields}


def text(**fields: Any) -> tuple[str, str, Any]:
    return "POST", TEXT, {"prompt": "Hello", "max_tokens": 4, **fields}


def messages(*content: Any) -> tuple[str, str, Any]:
    return "POST", CHAT, {"messages": list(content), "max_tokens": 4}


#: (request, status, part of the message, param)
BAD: list[tuple[tuple[str, str, Any], int, str, str | None]] = [
    # Not a request at all.
    (("POST", CHAT, b""), 400, "The body is empty", None),
    (("POST", CHAT, b"{"), 400, "not valid JSON", None),
    (("POST", CHAT, b"[1, 2]"), 400, "must be a JSON object", None),
    (("POST", CHAT, b'"hello"'), 400, "must be a JSON object", None),
    (("POST", CHAT, b"\xff\xfe{}"), 400, "not valid JSON", None),
    (
        ("POST", TEXT, b'{"prompt": "x", "temperature": NaN}'),
        400,
        "temperature must be a finite number",
        "temperature",
    ),
    (("GET", "/v1/nothing", None), 404, "There is no GET /v1/nothing here.", None),
    (("GET", CHAT, None), 405, "does not take GET; use POST", None),
    (("DELETE", "/v1/models", None), 405, "does not take DELETE; use GET", None),
    (("GET", "/v1/models/other", None), 404, "'other' is not served here; served: test-model", "model"),
    # The model.
    (chat(model="gpt-4o"), 404, "'gpt-4o' is not served here", "model"),
    (text(model=7), 400, "model must be a string, not 7", "model"),
    # Messages.
    (("POST", CHAT, {"max_tokens": 4}), 400, "messages is missing", "messages"),
    (messages(), 400, "messages is empty", "messages"),
    (("POST", CHAT, {"messages": "Hello"}), 400, "messages must be a list, not 'Hello'", "messages"),
    (messages({"role": "user"}), 400, "messages[0].content is missing", "messages[0].content"),
    (messages({"content": "x"}), 400, "messages[0].role is missing", "messages[0].role"),
    (messages({"role": "wizard", "content": "x"}), 400, "'wizard' is not one of", "messages[0].role"),
    (messages({"role": "tool", "content": "x"}), 400, "tool messages are not supported", "messages[0].role"),
    (messages("hello"), 400, "messages[0] must be an object", "messages[0]"),
    (
        messages({"role": "user", "content": 7}),
        400,
        "messages[0].content must be a string or a list of text parts",
        "messages[0].content",
    ),
    (
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}),
        400,
        "this model reads text only, not image_url parts",
        "messages[0].content[0]",
    ),
    (
        messages({"role": "user", "content": [{"type": "text"}]}),
        400,
        'must be {"type": "text", "text": ...}',
        "messages[0].content[0]",
    ),
    (
        messages({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}),
        400,
        "tool calls are not supported yet",
        "messages[0].tool_calls",
    ),
    # Understood and not supported.
    (chat(tools=[{"type": "function"}]), 400, "tools are not supported yet", "tools"),
    (chat(tool_choice="required"), 400, "tool_choice is not supported yet", "tool_choice"),
    (chat(response_format={"type": "json_object"}), 400, "'json_object' is not supported", "response_format"),
    (chat(modalities=["text", "audio"]), 400, "only text comes out", "modalities"),
    (text(suffix="end"), 400, "suffix is not supported", "suffix"),
    (text(best_of=3), 400, "best_of 3 is not supported", "best_of"),
    (chat(continue_final_message=True), 400, "needs the last message to be the assistant's", None),
    # Fields that need another.
    (chat(stream_options={"include_usage": True}), 400, "needs stream: true", "stream_options"),
    (chat(top_logprobs=2), 400, "top_logprobs needs logprobs: true", "top_logprobs"),
    (chat(max_completion_tokens=9), 400, "max_tokens and max_completion_tokens differ", None),
    # Prompts.
    (("POST", TEXT, {"max_tokens": 4}), 400, "prompt is missing", "prompt"),
    (text(prompt=""), 400, "the prompt is empty", "prompt"),
    (text(prompt=[]), 400, "prompt is an empty list", "prompt"),
    (text(prompt=[[]]), 400, "the prompt is empty", "prompt"),
    (text(prompt=["a", 1]), 400, "prompt must be a string, a list of strings", "prompt"),
    (text(prompt={"a": 1}), 400, "prompt must be a string, a list of strings", "prompt"),
    (text(prompt=[1, 2, 99999]), 400, "99999 is outside the vocabulary, 0 to 259", "prompt"),
    (text(prompt=[-1]), 400, "-1 is outside the vocabulary", "prompt"),
    (text(prompt="x" * 300), 400, "the prompt has 300 tokens", "prompt"),
    (text(prompt="x" * 100_000), 400, "the prompt has 100000 characters", "prompt"),
    (text(prompt=["x"] * 257), 400, "takes up to 256 in one request", "prompt"),
    (text(prompt=["x"] * 256, n=16), 400, "asks for 4096 answers at once", "n"),
    # Numbers and their types.
    (chat(temperature="hot"), 400, "temperature must be a number, not 'hot'", "temperature"),
    (chat(temperature=-1), 400, "temperature is -1", "temperature"),
    (chat(temperature="1"), 400, "temperature must be a number", "temperature"),
    (chat(top_p=0), 400, "top_p is 0", "top_p"),
    (chat(top_p=1.5), 400, "top_p is 1.5", "top_p"),
    (chat(top_k=-5), 400, "top_k is -5", "top_k"),
    (chat(top_k=1.5), 400, "top_k must be an integer", "top_k"),
    (chat(min_p=2), 400, "min_p is 2", "min_p"),
    (chat(n=0), 400, "n is 0", "n"),
    (chat(n=17), 400, "n 17 is above this server's limit of 16", "n"),
    (chat(n=True), 400, "n must be an integer, not True", "n"),
    (chat(max_tokens=0), 400, "max_tokens is 0", "max_tokens"),
    (chat(max_tokens=-3), 400, "max_tokens is -3", "max_tokens"),
    (chat(max_tokens=10_000), 400, "max_tokens is 10000, but after a prompt", "max_tokens"),
    (chat(max_tokens=4.5), 400, "max_tokens must be an integer", "max_tokens"),
    (chat(min_tokens=9), 400, "min_tokens is 9", "min_tokens"),
    (chat(presence_penalty=3), 400, "presence_penalty is 3", "presence_penalty"),
    (chat(frequency_penalty=-3), 400, "frequency_penalty is -3", "frequency_penalty"),
    (chat(repetition_penalty=0), 400, "repetition_penalty is 0", "repetition_penalty"),
    (chat(seed=2**70), 400, "seed is", "seed"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs 21 is above", "top_logprobs"),
    (chat(logprobs=True, top_logprobs=-1), 400, "logprobs is -1", None),
    (text(logprobs=21), 400, "logprobs 21 is above", "logprobs"),
    (text(logprobs=True), 400, "logprobs must be an integer", "logprobs"),
    (text(prompt_logprobs=99), 400, "prompt_logprobs 99 is above", "prompt_logprobs"),
    (text(prompt_logprobs=1, stream=True), 400, "prompt_logprobs cannot be streamed", "prompt_logprobs"),
    (chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs holds messages", None),
    (chat(chat_template_kwargs={"add_generation_prompt": True}), 400, "a field of its own", None),
    (chat(stream="yes"), 400, "stream must be true or false", "stream"),
    (chat(priority=2**40), 400, "priority is", "priority"),
    # Lists and maps.
    (chat(stop=[""]), 400, "stop contains", "stop"),
    (chat(stop=["x"] * 17), 400, "stop has 17 strings", "stop"),
    (chat(stop=7), 400, "stop must be a string or a list of strings", "stop"),
    (chat(stop_token_ids=[260]), 400, "stop_token_ids contains 260", "stop_token_ids"),
    (chat(logit_bias={"ten": 1}), 400, "'ten' is not a token id", "logit_bias"),
    (chat(logit_bias={"999999": 1}), 400, "logit_bias contains 999999", "logit_bias"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias of token 5 is 101", "logit_bias"),
    (chat(logit_bias=[1]), 400, "logit_bias must be an object", "logit_bias"),
    (chat(allowed_token_ids=[]), 400, "allowed_token_ids is empty", "allowed_token_ids"),
    (chat(bad_words=[""]), 400, "bad_words contains ''", "bad_words"),
    (chat(bad_words="x"), 400, "bad_words must be a list", "bad_words"),
    # Tokenising.
    (("POST", "/tokenize", {}), 400, "give either prompt or messages", "prompt"),
    (("POST", "/tokenize", {"prompt": "x", "messages": USER}), 400, "give either", "prompt"),
    (("POST", "/tokenize", {"prompt": "x" * 100_000}), 400, "the prompt has 100000 characters", "prompt"),
    (("POST", "/detokenize", {"tokens": [1] * 9999}), 400, "tokens has 9999 ids", "tokens"),
    (("POST", "/tokenize", {"prompt": 5}), 400, "prompt must be a string, not 5", "prompt"),
    (("POST", "/detokenize", {"tokens": [1, 9999]}), 400, "tokens[1] is 9999", "tokens[1]"),
    (("POST", "/detokenize", {"tokens": "abc"}), 400, "tokens must be a list", "tokens"),
    (("POST", "/detokenize", {}), 400, "tokens is missing", "tokens"),
]


def _send(server: RunningServer, request: tuple[str, str, Any]) -> httpx.Response:
    method, path, body = request
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    return httpx.request(method, server.url + path, content=content, timeout=20)


@pytest.mark.parametrize(("request_", "status", "message", "param"), BAD, ids=[b[2][:50] for b in BAD])
def test_a_bad_request_is_explained_and_a_good_one_works_after_it(
    server: RunningServer, request_: tuple[str, str, Any], status: int, message: str, param: str | None
) -> None:
    response = _send(server, request_)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["type"].endswith("_error")
    if param is not None:
        assert error["param"] == param
    assert "Traceback" not in response.text
    good = _send(server, text(max_tokens=2))
    assert good.status_code == 200
    assert len(good.json()["choices"][0]["text"]) == 2


def test_the_table_is_long_enough() -> None:
    assert len(BAD) >= 60


def test_a_body_over_the_limit_is_refused_by_length_and_while_reading(fake_engine: Any) -> None:
    from tests.serving.fake_engine import SESSION

    with RunningServer(fake_engine, session=SESSION, max_body_bytes=1000) as small:
        body = json.dumps({"prompt": "x" * 2000}).encode()
        by_length = httpx.post(small.url + TEXT, content=body)
        in_pieces = httpx.post(small.url + TEXT, content=iter([body[:900], body[900:]]))
        for response in (by_length, in_pieces):
            assert response.status_code == 413
            assert "larger than this server's limit of 1000 bytes" in response.json()["error"]["message"]
        assert _send(small, text(max_tokens=2)).status_code == 200
