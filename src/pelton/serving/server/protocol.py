"""Request bodies of the HTTP API: OpenAI's fields, and Pelton's extras beside them.

Types are strict ("5" is not a number). A field we do not know is kept in ``model_extra``: it is warned
of, not rejected, because clients of newer API versions send more than they need answered. Ranges of
sampling values are checked where every front end's are, in ``runtime.validation``.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from pelton.errors import RequestError


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    """``stream_options``."""

    include_usage: bool = False


class _GenerationBody(_Body):
    """Fields that completions and chat completions share."""

    model: str | None = None
    """None: whatever is served."""
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Known and unused, as ``metadata`` and ``store``: nothing is kept about users."""
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    # Pelton's extras, named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    priority: int = 0
    cache_salt: str = ""
    return_token_ids: bool = False
    """Add ``token_ids`` to each choice."""

    def sampling_fields(self) -> dict[str, Any]:
        """The ``SamplingParams`` fields that were given, under their own names."""
        given: dict[str, Any] = {}
        for name in _PLAIN:
            if (value := getattr(self, name)) is not None:
                given[name] = value
        for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
            if (value := getattr(self, name)) is not None:
                given[name] = tuple(value)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            given["logit_bias"] = _bias(self.logit_bias)
        return given

    def unknown_fields(self) -> list[str]:
        """Names of fields in the body that mean nothing to us."""
        return sorted(self.model_extra or {})


_PLAIN = (
    *("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tokens", "seed"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)


class CompletionBody(_GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class Message(_Body):
    """One chat message; ``content`` may be a list of text parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class ChatBody(_GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(_Body):
    """``POST /tokenize``: a ``prompt``, or ``messages`` to put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class RefitBody(_Body):
    """``POST /engine/refit``."""

    path: str
    """A checkpoint or an engine on the server's machine."""
    names: list[str] | None = None
    """Patterns: only weights with such a name."""


class DetokenizeBody(_Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        try:
            bias[int(token)] = value
        except ValueError:
            raise RequestError(
                f"logit_bias maps token ids to numbers; {token!r} is not a token id.", param="logit_bias"
            ) from None
    return bias


ROLES = ("system", "developer", "user", "assistant")


def chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: text contents, known roles (``developer`` is system).

    Raises ``RequestError`` for what is not supported, naming the message."""
    if not messages:
        raise RequestError("messages is empty; send at least one message.", param="messages")
    rendered: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in ROLES:
            unsupported = " (tool messages are not supported yet)" if message.role in _TOOL_ROLES else ""
            raise RequestError(
                f"{where}.role {message.role!r} is not one of {', '.join(ROLES)}{unsupported}.",
                param=f"{where}.role",
            )
        extra = message.model_extra or {}
        if extra.get("tool_calls") or extra.get("function_call"):
            raise RequestError(
                f"{where}: tool calls are not supported yet; send text content.", param=f"{where}.tool_calls"
            )
        if message.content is None:
            raise RequestError(f"{where}.content is missing; it must be text.", param=f"{where}.content")
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": _text(message.content, f"{where}.content")}
        if message.name is not None:
            entry["name"] = message.name
        rendered.append(entry)
    return rendered


_TOOL_ROLES = ("tool", "function")


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type")
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image_url", "input_image", "input_audio", "video_url", "file"):
            raise RequestError(
                f"{where}[{i}]: this model reads text only, not {kind} parts.", param=f"{where}[{i}]"
            )
        else:
            raise RequestError(
                f'{where}[{i}] must be {{"type": "text", "text": ...}}, not type {kind!r}.',
                param=f"{where}[{i}]",
            )
    return "\n".join(texts)


def refuse_unsupported(body: CompletionBody | ChatBody) -> None:
    """Raise ``RequestError`` for fields that are understood and cannot be honoured."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true.", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed; leave out stream.", param="prompt_logprobs")
    if isinstance(body, CompletionBody):
        if body.suffix:
            raise RequestError(
                "suffix is not supported: this model completes text at its end, it does not fill in.",
                param="suffix",
            )
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise RequestError(
                f"best_of {body.best_of} is not supported; ask for n answers and choose among them.",
                param="best_of",
            )
        return
    if body.tools or body.functions:
        raise RequestError("tools are not supported yet; leave the field out.", param="tools")
    for field in ("tool_choice", "function_call"):
        if getattr(body, field) not in (None, "none", "auto"):
            raise RequestError(f"{field} is not supported yet; leave it out.", param=field)
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise RequestError(
            f"response_format {body.response_format.get('type')!r} is not supported yet; only text is.",
            param="response_format",
        )
    if body.audio is not None or body.modalities not in (None, ["text"]):
        raise RequestError(
            'only text comes out of this model; modalities must be ["text"].', param="modalities"
        )
    for name in ("messages", "add_generation_prompt"):
        if name in (body.chat_template_kwargs or {}):
            raise RequestError(
                f"chat_template_kwargs holds {name}, which is a field of its own; send it there.",
                param="chat_template_kwargs",
            )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.continue_final_message and body.messages and body.messages[-1].role != "assistant":
        raise RequestError(
            "continue_final_message needs the last message to be the assistant's.",
            param="continue_final_message",
        )
