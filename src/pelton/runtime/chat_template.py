"""Chat templates: Jinja as model publishers write it for ``transformers``, in a sandbox.

The environment matches ``transformers.utils.chat_template_utils``: trimmed blocks, loop controls,
``raise_exception``, ``strftime_now``, and a ``tojson`` that leaves HTML characters alone. The sandbox is
immutable: a template cannot reach Python's internals or change what it is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.sandbox

from pelton.errors import RequestError


class ChatTemplate:
    """A compiled template. Raises ``RequestError`` where the template is broken or refuses its input."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(_without_generation_tags(source))
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the model's chat template is broken at line {error.lineno}: {error.message}; "
                "use the completions interface with a plain prompt",
                param="messages",
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text."""
        try:
            return self._template.render({**variables, "messages": list(messages)})
        except _RefusedError as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except Exception as error:  # a template is a program: it may fail in any way
            raise RequestError(
                f"the model's chat template fails on these messages: {error or type(error).__name__}",
                param="messages",
            ) from None


class _RefusedError(Exception):
    """Raised by a template through ``raise_exception``."""


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _without_generation_tags(source: str) -> str:
    """Drop ``{% generation %}`` marks, which only say what to train on."""
    return re.sub(r"{%(-?)\s*(end)?generation\s*(-?)%}", r"{#\1 \3#}", source)
