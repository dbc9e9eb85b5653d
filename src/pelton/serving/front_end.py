"""The text side of a model: prompts and messages into requests, updates into chunks of text.

What ``LLM``, ``AsyncLLM`` and through it the server share. It knows no executor and never blocks on
one; tokenising takes CPU time, so asynchronous callers run ``prepare`` in a thread.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pelton.engine.config import EngineConfig
from pelton.errors import PeltonError, RequestError
from pelton.runtime.output_processor import OutputProcessor
from pelton.runtime.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
)
from pelton.runtime.tokenizer import Tokenizer
from pelton.runtime.validation import resolve_requests

#: Text, or token ids.
Prompt = str | Sequence[int]

#: A chat message: ``role``, ``content``.
ChatMessage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added to one answer."""

    prompt_index: int
    """Which prompt of the call."""
    index: int
    """Which of its ``n`` answers."""
    delta: str
    """New text; the deltas of an answer join to its text."""
    token_ids: tuple[int, ...]
    """New tokens; their text may come in a later chunk, when it is certain."""
    logprobs: tuple[TokenLogprobs, ...]
    """Of the new tokens, when asked for."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    output: RequestOutput
    """All answers to the prompt so far."""


class Generation:
    """Some prompts on their way through an executor: their requests, and their outputs so far.

    Made by ``FrontEnd.prepare``; used by one reader."""

    def __init__(
        self,
        request_id: str,
        tokenizer: Tokenizer,
        prompts: Sequence[str | None],
        requests: Sequence[Sequence[Request]],
    ) -> None:
        self.request_id = request_id
        self._processor = OutputProcessor(tokenizer)
        self._places: dict[str, tuple[int, int]] = {}
        self._prompt_ids: list[str] = []
        self.outputs: list[RequestOutput] = []
        """One per prompt, newest state."""
        for p, (prompt, answers) in enumerate(zip(prompts, requests, strict=True)):
            name = f"{request_id}-{p}"
            self._processor.add(name, answers, prompt)
            self._prompt_ids.append(name)
            self._places.update({request.request_id: (p, i) for i, request in enumerate(answers)})
        self.requests = [request for answers in requests for request in answers]
        self.answers_per_prompt = [len(answers) for answers in requests]
        self.outputs = [
            RequestOutput(
                request_id=name, prompt=prompt, prompt_token_ids=answers[0].prompt_token_ids, outputs=[]
            )
            for name, prompt, answers in zip(self._prompt_ids, prompts, requests, strict=True)
        ]

    def take(self, update: RequestUpdate) -> tuple[Chunk | None, list[str]]:
        """Take an update in. The chunk it makes (None: its answer had ended here already), and the ids
        of requests to abort because a stop string ended them.

        Raises ``PeltonError`` when the executor ended the request with an error."""
        changed, aborts = self._processor.process([update])
        if not changed:
            return None, aborts
        (output,) = changed
        p, i = self._places[update.request_id]
        self.outputs[p] = output
        answer = output.outputs[i]
        if answer.finish_reason == "error":
            raise PeltonError(answer.error or "the request failed")
        chunk = Chunk(
            prompt_index=p,
            index=i,
            delta=answer.delta,
            token_ids=answer.new_token_ids,
            logprobs=answer.new_logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            output=output,
        )
        return chunk, aborts

    @property
    def finished(self) -> bool:
        """True when every answer has ended."""
        return len(self._processor) == 0

    def unfinished(self) -> list[str]:
        """Executor ids of answers that have not ended: what to abort when the reader leaves."""
        return list(itertools.chain.from_iterable(map(self._processor.request_ids, self._prompt_ids)))


class FrontEnd:
    """Tokenizer, limits and defaults of one engine."""

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig, max_request_tokens: int) -> None:
        assert config.build.max_seq_len is not None
        self.tokenizer = tokenizer
        self.config = config
        self.max_request_tokens = min(max_request_tokens, config.build.max_seq_len)
        """Most tokens, prompt and answer, of one request."""
        known = SamplingParams.__struct_fields__
        self._defaults = {k: v for k, v in config.model.generation.items() if k in known}

    def sampling_params(self, **given: Any) -> SamplingParams:
        """``SamplingParams`` with the model's own recommendations where nothing is given."""
        for name in given:
            if name not in SamplingParams.__struct_fields__:
                raise RequestError(f"there is no sampling parameter {name!r}.", param=name)
        return SamplingParams(**{**self._defaults, **given})

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it without special tokens.

        With ``continue_final_message`` it ends within the last message, so that the answer goes on
        from it. Raises ``RequestError``."""
        messages = _checked(messages)
        text = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            variables=template_variables,
        )
        if not continue_final_message:
            return text
        last = str(messages[-1]["content"]).strip()
        at = text.rfind(last)
        if not last or at < 0:
            raise RequestError(
                "continue_final_message: the chat template changes the last message, so it cannot go on.",
                param="continue_final_message",
            )
        return text[: at + len(last)]

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        add_special_tokens: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Generation:
        """Tokenise and check ``prompts``, each with its ``params``. Raises ``RequestError``."""
        arrival = time.monotonic()
        name = request_id or new_id()
        requests = []
        for p, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            ids = self.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
            requests.append(
                resolve_requests(
                    ids,
                    sampling,
                    self.config,
                    self.tokenizer,
                    name if len(prompts) == 1 else f"{name}-{p}",
                    priority,
                    arrival_time=arrival,
                    cache_salt=cache_salt,
                    max_request_tokens=self.max_request_tokens,
                )
            )
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return Generation(name, self.tokenizer, texts, requests)

    def encode(self, prompt: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``prompt``. Raises ``RequestError`` when it is far longer than a request may be."""
        # A token of this vocabulary is rarely longer than a hundred characters, so that a text far
        # beyond the limit need not be tokenised (minutes for megabytes) to be refused.
        if len(prompt) > 100 * self.max_request_tokens + 1000:
            raise RequestError(
                f"the prompt has {len(prompt)} characters, far more than fit into the "
                f"{self.max_request_tokens} tokens that prompt and answer may have together.",
                param="prompt",
                code="context_length_exceeded",
            )
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)


def new_id() -> str:
    """A request id that no other request has."""
    return secrets.token_hex(12)


def _checked(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    if not messages:
        raise RequestError("messages is empty; give at least one message.", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f'messages[{i}] must be a mapping such as {{"role": "user", "content": "..."}}, '
                f"not {message!r:.60}.",
                param=f"messages[{i}]",
            )
    return list(messages)
