"""The ``pelton`` command: lazy subcommands, and one place where errors become sentences.

Start-up time is a feature (``pelton run ENGINE`` answers in well under a second), so this file and
``options.py`` may import click, msgspec and the standard library only; each subcommand's module is
imported when it is called, not when ``--help`` lists it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import io
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

import pelton
from pelton.errors import PeltonError

#: Exit code after SIGTERM: what shells say of a process that it killed.
_ENDED = 128 + signal.SIGTERM
#: Seconds in which a second SIGTERM counts as the first.
_TWICE = 2.0
#: name -> (module, one line for ``pelton --help``), in the order of the help page.
COMMANDS = {
    "run": ("pelton.serving.cli.run", "Answer one prompt and exit."),
    "chat": ("pelton.serving.cli.chat", "Talk with a model in the terminal."),
    "serve": ("pelton.serving.cli.serve", "Serve a model to OpenAI clients over HTTP."),
    "build": ("pelton.serving.cli.build", "Compile a checkpoint into an engine."),
    "quantize": ("pelton.serving.cli.quantize", "Write a smaller checkpoint: GPTQ, AWQ, fp8, int8, ..."),
    "inspect": ("pelton.serving.cli.inspect", "Show what is in an engine."),
    "timing-cache": ("pelton.serving.cli.timing_cache", "Show or merge files of measured tactic times."),
    "refit": ("pelton.serving.cli.refit", "Put new weights into an engine, without a rebuild."),
    "strip": ("pelton.serving.cli.refit", "Write an engine without its weights."),
    "diff": ("pelton.serving.cli.diff", "Show what tells two engines apart."),
    "eval": ("pelton.serving.cli.eval", "Measure perplexity, distance from another model, benchmarks."),
    "profile": ("pelton.serving.cli.profile", "Time an engine by op and layer, beside the machine's limits."),
    "debug": ("pelton.serving.cli.debug", "Look at tensors; find the op that departs from a reference."),
    "bench": ("pelton.serving.cli.bench", "Measure decode, prefill and start-up of a model."),
    "doctor": ("pelton.serving.cli.doctor", "Check this installation and this machine."),
    "version": ("pelton.serving.cli.doctor", "Print the version."),
}

EPILOG = """\b
The first minute:
  pelton run model.gguf "Why is the sky blue?"    builds what is missing, keeps it, streams
  pelton chat ./SmolLM2-135M-Instruct             the same model, as a conversation
  pelton serve model.gguf --port 8000             then: curl localhost:8000/v1/models
  pelton build model.gguf -o model.engine         an engine to keep, copy and deploy

MODEL is an engine directory, a Hugging Face folder, a GGUF file or a hub id (org/name). Anything but
an engine is built once and kept in the cache ($PELTON_CACHE, by default the user's cache folder).

Exit codes: 0 done, 1 failed, 2 the command or its input is wrong, 130 interrupted (Ctrl-C),
143 ended by SIGTERM (a server: 0, once it has drained)."""


class _Ended(SystemExit):
    """SIGTERM came: what is half-made is removed on the way out, as after Ctrl-C."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        for line in EPILOG.removeprefix("\b\n").splitlines():
            formatter.write(f"{line}\n")


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Pelton builds a language model into an engine once, and serves it at once.",
)
@click.version_option(pelton.__version__, "-V", "--version", message="pelton %(version)s")
def cli() -> None:
    pass


def _say(message: str) -> None:
    """One sentence on stderr; continuation lines are indented under the first."""
    text = message.strip().replace("\n", "\n        ")
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: the exit code still tells
        print(f"pelton: {text}", file=sys.stderr, flush=True)


def _broken_pipe() -> int:
    """The reader of our output went away (``pelton run ... | head -1``): leave as ``cat`` would."""
    # Python flushes stdout once more at exit, which would fail again, so give it somewhere to go.
    devnull = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(devnull, sys.stdout.fileno())
    return 128 + 13


def _show_warning(message: Warning | str, *where: object, **rest: object) -> None:
    """A warning is a sentence too, without the source line it came from."""
    _say(f"warning: {message}")


def _mend_streams() -> None:
    """Stand in for standard streams that are closed, and let no character stop an answer.

    A closed stream (``pelton serve ... <&-``) would be None here, and its file number would go to the
    next file that is opened, such as the weights."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number, and these are opened in their order: the stream's own.
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not UTF-8 gets "?" for what it cannot show.
        sys.stdout.reconfigure(errors="replace")


def run_command(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; never raises for a user's mistake."""
    warnings.showwarning = _show_warning
    try:
        try:
            # Not ``cli.main``: it turns a closed pipe and Ctrl-C into its own messages and codes.
            with cli.make_context("pelton", list(args)) as context:
                cli.invoke(context)
            sys.stdout.flush()
            return 0
        except click.exceptions.Exit as leave:
            sys.stdout.flush()
            return leave.exit_code
        except click.exceptions.NoArgsIsHelpError as error:
            print(error.format_message(), flush=True)
            return 0
        except click.ClickException as error:
            where = getattr(error, "ctx", None)
            hint = f"\nTry: {where.command_path} --help" if where else ""
            _say(error.format_message() + hint)
            return 2
        except (click.Abort, KeyboardInterrupt):
            if sys.stderr.isatty():
                print(file=sys.stderr)  # the shell's prompt gets a line of its own
            return 130
        except _Ended:
            _say("ended by SIGTERM before it was done.")
            return _ENDED
        except BrokenPipeError:
            return _broken_pipe()
        except PeltonError as error:
            _say(str(error))
            return error.exit_code
        except MemoryError:
            _say("out of memory; a smaller --max-seq-len or --max-batch-size needs less.")
            return 1
        except OSError as error:
            if os.environ.get("PELTON_DEBUG"):
                raise
            name = f"{error.filename}: " if error.filename else ""
            _say(f"{name}{error.strerror or error}")
            return 2 if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EISDIR) else 1
        except Exception as error:
            if os.environ.get("PELTON_DEBUG"):
                raise
            _say(
                f"this is a bug in Pelton: {type(error).__name__}: {error}\n"
                "Run again with PELTON_DEBUG=1 for the traceback, and please report it."
            )
            return 1
    except BrokenPipeError:
        return _broken_pipe()
    except KeyboardInterrupt:
        return 130
    except _Ended:
        return _ENDED


def _heed_sigterm() -> None:
    """Let SIGTERM raise ``_Ended``; servers take it over."""
    last = -math.inf

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        # timeout(1) sends it twice at once, and the second would interrupt the cleaning up.
        if last - before > _TWICE:
            raise _Ended(_ENDED)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)


def main() -> NoReturn:
    """Run the process's own command line and exit (``pelton.__main__`` has the entry point)."""
    _mend_streams()
    _heed_sigterm()
    code = run_command(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    atexit._run_exitfuncs()
    # All is closed. Taking a tokenizer apart piece by piece would be a share of ``pelton run`` that shows.
    os._exit(code)
