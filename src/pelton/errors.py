"""What Pelton says when something cannot be done.

Every error a user can cause is a ``PeltonError``: one sentence that names what is wrong, where,
and what to do. The command line prints it without a traceback and exits with ``exit_code``; the
server turns it into OpenAI's error shape with ``http_status``. Our own invariants use ``assert``.
"""

from __future__ import annotations


class PeltonError(Exception):
    """Base of everything Pelton raises on purpose."""

    exit_code = 1
    http_status = 500


class UserError(PeltonError, ValueError):
    """The caller's input cannot be used as it is."""

    exit_code = 2
    http_status = 400


class ConfigError(UserError):
    """A build, serve or model setting is invalid, unknown or contradicts another."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, incomplete or of an unsupported kind."""


class EngineError(UserError):
    """An engine directory is missing, damaged, too new or built for another target."""


class DeviceError(PeltonError):
    """The GPU failed. What is on it cannot be trusted any more: the process must start anew."""

    http_status = 503


class BuildError(PeltonError):
    """A build failed although its input was valid (for example, the accuracy check)."""


class RequestError(UserError):
    """A request is invalid; ``param`` names the offending field, as in OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    http_status = 404


class QueueFullError(PeltonError):
    """The server's waiting queue is at its limit; the client should retry later."""

    http_status = 429


class NotReadyError(PeltonError):
    """The executor has stopped or is not ready to take requests."""

    http_status = 503


class TacticError(PeltonError):
    """Code from outside Pelton (a Python tactic) failed while it computed a step."""


class MissingDependencyError(UserError):
    """An optional dependency is needed for what was asked; the message says which extra to install."""
