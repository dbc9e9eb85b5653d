"""``pelton chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import click

from pelton.engine.config import BuildConfig
from pelton.errors import PeltonError, RequestError
from pelton.serving.cli.options import (
    Command,
    build_options,
    model_argument,
    sampling_options,
    sampling_params,
    trust_option,
)
from pelton.serving.cli.progress import open_llm

HELP = """/help           this list
/reset          forget the conversation
/system TEXT    set the system message and start anew; without TEXT: show it
/exit           leave (also Ctrl-D)
Ctrl-C          stop the answer; at the prompt: leave
Anything else is sent to the model. A line that ends with \\ goes on."""


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton chat model.gguf
  pelton chat model.engine --system "Answer in French." --temperature 0.3

Inside: /help /reset /system /exit. The conversation is kept in memory only.""",
)
@model_argument
@click.option("--system", help="System message.")
@trust_option
@sampling_options("n", "logprobs", "prompt_logprobs")
@build_options
def chat(model: str, system: str | None, trust: bool, sampling: dict[str, Any], config: BuildConfig) -> None:
    """Talk with MODEL; answers stream, Ctrl-C stops one."""
    with open_llm(model, config, trust) as llm:
        if llm.tokenizer.chat_template is None:
            raise RequestError(
                f"{model} has no chat template, so it cannot hold a conversation; "
                f"use pelton run {model} --raw."
            )
        params = sampling_params(llm, sampling)
        conversation = Conversation(system)
        interactive = sys.stdin.isatty()
        if interactive:
            _enable_editing()
            print(f"{llm.model_id}. /help for commands, Ctrl-D to leave.", file=sys.stderr)
        while True:
            try:
                line = _read(interactive)
            except EOFError:
                if interactive:
                    print(file=sys.stderr)
                return
            if line.startswith("/"):
                if not _command(line, conversation):
                    return
            elif line.strip():
                _answer(llm, conversation, line, params)


class Conversation:
    """Messages so far."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    def messages(self) -> list[dict[str, str]]:
        """What the chat template takes."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return start + self.turns


def _enable_editing() -> None:
    """Line editing and history, in memory."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import is what input() needs)


def _read(interactive: bool) -> str:
    lines: list[str] = []
    prompt = "> " if interactive else ""
    while True:
        line = input(prompt)
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])
        prompt = "  " if interactive else ""


def _command(line: str, conversation: Conversation) -> bool:
    """Obey a slash command; False: leave."""
    name, _, rest = line.strip().partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.turns.clear()
        print("The conversation is forgotten.", file=sys.stderr)
    elif name == "/system":
        if rest.strip():
            conversation.system = rest.strip()
            conversation.turns.clear()
            print("The system message is set; the conversation starts anew.", file=sys.stderr)
        else:
            print(conversation.system or "There is no system message.", file=sys.stderr)
    elif name == "/help":
        print(HELP, file=sys.stderr)
    else:
        print(f"There is no {name}; /help lists the commands.", file=sys.stderr)
    return True


def _answer(llm: Any, conversation: Conversation, text: str, params: Any) -> None:
    """Send one message and stream the answer; what Ctrl-C leaves of it stays in the conversation."""
    conversation.turns.append({"role": "user", "content": text})
    answer = ""
    try:
        stream = llm.stream_chat(conversation.messages(), params)
        try:
            for chunk in stream:
                answer += chunk.delta
                sys.stdout.write(chunk.delta)
                sys.stdout.flush()
        except KeyboardInterrupt:
            print(" (stopped)", file=sys.stderr, end="")
        finally:
            stream.close()  # aborts what is still running
    except PeltonError as error:
        conversation.turns.pop()
        print(f"pelton: {error}", file=sys.stderr)
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    conversation.turns.append({"role": "assistant", "content": answer})
