"""The ``pelton`` command, and ``python -m pelton``: quiet about signals from its first line on."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def main() -> NoReturn:
    """Entry point. While the command line is imported, Ctrl-C and SIGTERM end it without a word."""
    replaced = {
        number: signal.signal(number, _leave)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) in _DEFAULTS  # not where the caller has them ignored
    }
    from pelton.serving.cli.main import main as command

    for number, handler in replaced.items():
        signal.signal(number, handler)
    command()


if __name__ == "__main__":
    main()
