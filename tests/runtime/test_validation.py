"""Every field of a request is checked, by a sentence that names it, its value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from pelton.errors import RequestError
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.validation import derive_seed, resolve_requests
from tests.runtime.conftest import byte_fallback_tokenizer
from tests.runtime.fakes import fake_config

CONFIG = fake_config(vocab_size=300, max_seq_len=64, max_input_len=40)
TOKENIZER = byte_fallback_tokenizer()


def resolve(prompt: Any = (1, 2, 3), tokenizer: Any = TOKENIZER, **fields: Any) -> list[Request]:
    arguments = {k: fields.pop(k) for k in ("priority", "cache_salt", "max_request_tokens") if k in fields}
    return resolve_requests(prompt, SamplingParams(**fields), CONFIG, tokenizer, "r", **arguments)


REFUSED = [
    ({"n": 0}, "n is 0; it must be a whole number from 1 to 128"),
    ({"n": 129}, "n is 129"),
    ({"n": True}, "n is True"),
    ({"n": "2"}, "n is '2'"),
    ({"temperature": -0.1}, "temperature is -0.1; it must be a number from 0 to 100"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": None}, "temperature is None"),
    ({"top_k": -2}, r"top_k is -2; it must be 0 or -1 \(all\), or a number of tokens"),
    ({"top_k": 1.5}, "top_k is 1.5"),
    ({"top_p": 0}, "top_p is 0; it must be a number above 0 up to 1"),
    ({"top_p": 1.01}, "top_p is 1.01"),
    ({"min_p": -0.1}, "min_p is -0.1; it must be a number from 0 to 1"),
    ({"min_p": 2}, "min_p is 2"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a number above 0 up to 10"),
    ({"presence_penalty": 2.5}, "presence_penalty is 2.5; it must be a number from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3"),
    ({"seed": 2**64}, "seed is 18446744073709551616; it must be a whole number that fits 64 bits"),
    ({"seed": 1.0}, "seed is 1.0"),
    ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
    ({"max_tokens": -5}, "max_tokens is -5"),
    ({"max_tokens": 62}, "max_tokens is 62, but after a prompt of 3 tokens 61 fit into this engine's 64"),
    (
        {"max_tokens": 4, "min_tokens": 5},
        "min_tokens is 5; it must be a whole number from 0 to max_tokens, 4",
    ),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"stop": "word"}, "stop is 'word'; it must be a list of strings"),
    ({"stop": ("a",) * 17}, "stop has 17 strings; at most 16 are allowed"),
    ({"stop": ("",)}, "stop contains a string of 0 characters"),
    ({"stop": ("a" * 257,)}, "stop contains a string of 257 characters"),
    ({"stop": (3,)}, "stop contains 3"),
    ({"stop_token_ids": (300,)}, "stop_token_ids contains 300; token ids are 0 to 299"),
    ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
    ({"logit_bias": {300: 1.0}}, "logit_bias contains 300"),
    ({"logit_bias": {"1": 1.0}}, "logit_bias contains '1'"),
    ({"logit_bias": {1: 101}}, "logit_bias of token 1 is 101; it must be a number from -100 to 100"),
    ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 is nan"),
    ({"logit_bias": [1]}, "logit_bias is .1.; it must be a mapping"),
    ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias has 1025 entries"),
    ({"bad_words": "word"}, "bad_words is 'word'"),
    ({"bad_words": (" ",)}, "bad_words contains ' '"),
    ({"bad_words": (4,)}, "bad_words contains 4"),
    ({"bad_words": ("a",) * 1025}, "bad_words has 1025 strings"),
    ({"bad_words": ("a",), "tokenizer": None}, "bad_words needs a tokenizer"),
    ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": (-1,)}, "allowed_token_ids contains -1"),
    ({"logprobs": 21}, "logprobs is 21; it must be a whole number from 0 to 20"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"logprobs": True}, "logprobs is True"),
    ({"prompt_logprobs": 100}, "prompt_logprobs is 100"),
    ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
    ({"skip_special_tokens": None}, "skip_special_tokens is None"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output is 'yes'"),
    ({"priority": 2**31}, "priority is 2147483648"),
    ({"priority": 0.5}, "priority is 0.5"),
    ({"prompt": ()}, "the prompt is empty"),
    ({"prompt": (1,) * 41}, "the prompt has 41 tokens; this engine takes prompts of at most 40"),
    ({"prompt": (1,) * 20, "max_request_tokens": 20}, "takes prompts of at most 19"),
    ({"prompt": (300,)}, "prompt token id 300 is outside the vocabulary, 0 to 299"),
    ({"prompt": (-1,)}, "prompt token id -1"),
    ({"prompt": ("a",)}, "prompt token id 'a'"),
    ({"prompt": (True,)}, "prompt token id True"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        resolve(**fields)
    assert caught.value.param in SamplingParams.__struct_fields__ + ("prompt", "priority")
    assert len(str(caught.value)) < 250
    assert resolve()  # a good request still works


def test_every_field_of_sampling_params_has_a_refusal() -> None:
    tried = {name for fields, _ in REFUSED for name in fields}
    assert set(SamplingParams.__struct_fields__) <= tried


def test_defaults_are_resolved() -> None:
    (request,) = resolve(top_k=-1)
    assert request.request_id == "r"
    assert request.prompt_token_ids == (1, 2, 3)
    assert (request.sampling.max_tokens, request.sampling.top_k) == (61, 0)
    assert resolve(max_request_tokens=20)[0].sampling.max_tokens == 17
    assert request.arrival_time > 0
    assert resolve()[0].seed != resolve()[0].seed


def test_n_answers_have_distinct_reproducible_seeds() -> None:
    requests = resolve(n=4, seed=7)
    assert [r.request_id for r in requests] == ["r.0", "r.1", "r.2", "r.3"]
    assert [r.seed for r in requests] == [derive_seed(7, i) for i in range(4)]
    assert len({r.seed for r in requests}) == 4
    assert {r.sampling.n for r in requests} == {1}
    assert resolve(n=1, seed=7)[0].seed == requests[0].seed
    assert all(0 <= derive_seed(s, 0) < 2**63 for s in (-(2**63), -1, 0, 2**64 - 1))
    assert derive_seed(7, 0) == 4212276270495803956  # part of the interface: never changes


def test_bad_words_are_tokenised_with_and_without_a_space_before() -> None:
    (request,) = resolve(bad_words=("hi",), tokenizer=byte_fallback_tokenizer(strip=False))
    token = TOKENIZER.backend.token_to_id
    assert set(request.bad_word_ids) == {(token("hi"),), (token("▁hi"),)}


def test_requests_travel_as_messages() -> None:
    (request,) = resolve(logit_bias={5: -1}, stop=["a"], bad_words=("hi",), seed=2**64 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
