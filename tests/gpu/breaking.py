"""A session whose GPU fails when a prompt says so: what the executor's process of a test opens."""

from __future__ import annotations

import ctypes as C
from typing import Any

import numpy as np

from pelton.engine.batch import InputBatch
from pelton.engine.session import Session

SESSION = "tests.gpu.breaking:open_breaking"
#: Tokens of a prompt that break the GPU.
BREAK = (3, 3, 3)


def open_breaking(engine: Any, **options: Any) -> Session:
    """The real session; the kernels of a step with ``BREAK`` in it are given addresses of nothing."""
    session = Session(engine, **options)
    runner: Any = session._runner
    launch = runner._launch

    def broken(batch: InputBatch, *rest: Any, **settings: Any) -> Any:
        if np.int32(BREAK).tobytes() in batch.input_ids_T.tobytes():
            for value in runner._launcher._keep:
                if isinstance(value, C.c_uint64) and value.value:
                    value.value = 4096
        return launch(batch, *rest, **settings)

    runner._launch = broken
    return session
