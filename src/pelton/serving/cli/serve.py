"""``pelton serve``: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path

import click

from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError, MissingDependencyError
from pelton.serving.cli.options import Command, build_options, model_argument, trust_option
from pelton.serving.cli.progress import resolve
from pelton.serving.overrides import of_the_session


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton serve model.engine
  pelton serve model.gguf --port 8000 --served-model-name smollm2 --api-key "$KEY"
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}]}'

\b
  from openai import OpenAI
  client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")

Paths: /v1/chat/completions /v1/completions /v1/models /tokenize /detokenize /health /ready /version
/metrics /docs. SIGTERM and Ctrl-C stop accepting, finish what runs (up to --drain-seconds), then
exit.""",
)
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; 0.0.0.0: all networks.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port; 0: any free one."
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="PELTON_API_KEY",
    help="Require this key (repeatable; also $PELTON_API_KEY).",
)
@click.option("--served-model-name", multiple=True, help="Model id in the API (repeatable).")
@click.option(
    "--max-waiting",
    default=256,
    show_default=True,
    type=click.IntRange(min=1),
    help="Requests that may wait; more get 429.",
)
@click.option(
    "--max-n", default=16, show_default=True, type=click.IntRange(min=1), help="Most answers per prompt."
)
@click.option(
    "--max-body-mb", default=16, show_default=True, type=click.IntRange(min=1), help="Largest request body."
)
@click.option(
    "--enable-refit",
    is_flag=True,
    help="Take new weights over POST /engine/refit: paths on this machine.",
)
@click.option("--allow-origin", multiple=True, help="Origin that browsers may call from (repeatable).")
@click.option(
    "--drain-seconds",
    default=20,
    show_default=True,
    type=click.IntRange(min=0),
    help="Time that requests get to end on shutdown; then they get an error.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="What goes to standard error.",
)
@trust_option
@build_options
def serve(
    model: str,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    served_model_name: tuple[str, ...],
    max_waiting: int,
    max_n: int,
    max_body_mb: int,
    enable_refit: bool,
    allow_origin: tuple[str, ...],
    drain_seconds: int,
    log_level: str,
    trust: bool,
    config: BuildConfig,
) -> None:
    """Serve MODEL to OpenAI clients over HTTP, on this machine unless --host says otherwise."""
    if any(not key.strip() for key in api_keys):
        raise ConfigError("--api-key is empty; leave it out to serve without a key.")
    if enable_refit and host not in ("127.0.0.1", "localhost", "::1") and not api_keys:
        raise ConfigError(
            f"--enable-refit with --host {host} would let anybody who reaches this machine change the model; "
            "set --api-key too."
        )
    try:
        from pelton.serving.server.launch import Launch, bind, run_server
    except ImportError as error:
        raise MissingDependencyError(
            f"pelton serve needs {error.name}: pip install 'pelton[serve]'."
        ) from error
    socket = bind(host, port)  # before the model loads: a port in use is known at once
    resolved = resolve(model, config)
    launch = Launch(
        engine=Path(resolved.engine),
        overrides=config if resolved.given_as_engine else of_the_session(config),
        host=host,
        api_keys=api_keys,
        model_ids=served_model_name,
        max_waiting=max_waiting,
        max_n=max_n,
        max_body_bytes=max_body_mb << 20,
        enable_refit=enable_refit,
        trust=trust,
        allow_origins=allow_origin,
        drain_seconds=drain_seconds,
        log_level=log_level,
    )
    code = run_server(launch, socket)
    if code:
        raise click.exceptions.Exit(code)
