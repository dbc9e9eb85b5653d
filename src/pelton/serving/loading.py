"""How a front end's settings become an ``ExecutorSpec``."""

from __future__ import annotations

from pelton.engine.artifact import Engine
from pelton.engine.config import BuildConfig, EngineConfig
from pelton.engine.config_check import check_settings
from pelton.engine.kv_cache import choose_num_blocks
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor_spec import ExecutorSpec


def executor_spec(
    engine: Engine,
    config: EngineConfig,
    given: BuildConfig,
    max_waiting: int,
    session: str | None = None,
    trust: bool = False,
) -> ExecutorSpec:
    """The executor of ``engine`` within the limits of ``config`` (see ``overrides``), with the threads
    and the share of a GPU that are ``given``.

    Raises ``ConfigError`` for what is no setting, and when the KV cache of lowered limits does not fit into
    memory either."""
    check_settings(given)
    spec = ExecutorSpec(
        engine=str(engine.path.absolute()),
        threads=given.threads,
        gpu_memory_fraction=given.gpu_memory_fraction,
        trust=trust,
        # The session knows the engine's own limits only; lower ones need a smaller cache.
        kv_blocks=None if config == engine.config or engine.on_gpu else choose_num_blocks(config),
        executor=ExecutorConfig(
            max_num_seqs=config.build.max_batch_size,
            max_num_batched_tokens=config.build.max_num_tokens,
            # The front end limits what waits; the executor's own limit only must not be lower.
            max_waiting=max_waiting + (config.build.max_batch_size or 0),
        ),
    )
    if session is None:
        return spec
    import msgspec

    return msgspec.structs.replace(spec, session=session)
