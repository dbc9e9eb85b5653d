"""Code in an engine runs only where the user built the engine, or says that it is trusted.

Code is whatever Pelton did not ship: files under ``compiled/`` (libraries, cubins, region packages),
tactics that are Python functions, and the modules of ops from outside. What else a plan holds is data. A
build on this machine leaves the engine's id in the user's cache folder; the id changes with any byte of
the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pelton.engine.plan import Plan
from pelton.engine.user_cache import cache_dir
from pelton.errors import EngineError

if TYPE_CHECKING:
    from pelton.engine.artifact import Engine

FOLDER = "compiled/"


def code_in(files: Iterable[str], plan: Plan) -> list[str]:
    """What code an engine of these ``files`` (relative paths) would run."""
    compiled = [path for path in files if path.startswith(FOLDER)]
    # A library that the manifest does not list is code all the same.
    outside = {t.function if t.kind == "python" else t.file for t in plan.external.values()}
    return list(dict.fromkeys((*compiled, *sorted(outside | set(plan.op_modules.values())))))


def remember(engine: Engine) -> None:
    """Trust ``engine`` from now on: it was built here. Without a cache folder to write to, it has to be
    trusted at each load."""
    if engine.code:
        with contextlib.suppress(OSError):
            folder = cache_dir() / "trusted"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / engine.engine_id).touch()


def is_trusted(engine: Engine) -> bool:
    """Whether ``engine`` has no code, or was built by this user on this machine."""
    return not engine.code or (cache_dir() / "trusted" / engine.engine_id).is_file()


def check_trust(engine: Engine, trust: bool) -> None:
    """Raise ``EngineError`` for code that nobody vouches for."""
    if trust or is_trusted(engine):
        return
    more = f" and {len(engine.code) - 1} more" if len(engine.code) > 1 else ""
    raise EngineError(
        f"{engine.path} carries code ({engine.code[0]}{more}) and was not built here; "
        "if you trust where it comes from, run it with --trust (Python: trust=True)"
    )
