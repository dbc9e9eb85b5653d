"""Ops from outside Pelton: ``@pelton.op`` on a reference in plain PyTorch (docs/extending.md)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from pelton.errors import ConfigError
from pelton.ir.op import NAMESPACE, Op, Sample, find_op, register
from pelton.kernels.tactic import register_tactic
from pelton.kernels.user_tactic import is_importable, reference_tactic

_NAME = re.compile(r"^[A-Za-z_]\w*::[A-Za-z_]\w*$")
#: Error allowed of tactics where the op does not say.
DEFAULT_TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}

Samples = Callable[[torch.Generator], Iterable[Any]]


class OpFunction:
    """The op as a function: called in a model's ``forward`` it becomes a node of the graph.

    With ``out`` (a NumPy array, or a tuple of them) it computes the reference into that instead: how an
    op without a tactic runs in an engine.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.__wrapped__ = op.reference
        self.__doc__ = op.reference.__doc__
        self.__name__ = op.reference.__name__
        self.__qualname__ = op.reference.__qualname__
        self.__module__ = op.reference.__module__

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return self.op.torch_op(*args, **kwargs)
        with torch.inference_mode():
            given = tree_map(_from_numpy, (args, kwargs))
            results = _tuple(self.op.reference(*given[0], **given[1]))
            for array, result in zip(out if isinstance(out, tuple) else (out,), results, strict=True):
                _from_numpy(array).copy_(result)
        return out

    def __repr__(self) -> str:
        return f"<op {self.op.name}>"


def op(
    schema: str,
    *,
    tolerance: Mapping[str, float] | None = None,
    shape_rule: Callable[..., Any] | None = None,
    samples: Samples | None = None,
) -> Callable[[Callable[..., Any]], OpFunction]:
    """Decorator that makes an op of its reference, a function of plain PyTorch that writes no input.

    - ``schema``: as in ``torch.library``, with a namespace of your own:
      ``"my::swish_norm(Tensor x, float beta) -> Tensor"``;
    - ``tolerance``: largest normalised error of a tactic, by dtype of the result;
    - ``shape_rule``: gives results of the right shape and dtype for meta tensors; by default the
      reference itself runs on them;
    - ``samples``: called with a ``torch.Generator``, yields argument tuples on which tactics are held to
      the reference, besides those that the builder makes from a model's own shapes.

    Raises ``ConfigError`` for a schema that cannot be used.
    """

    def decorate(reference: Callable[..., Any]) -> OpFunction:
        name = schema.partition("(")[0].strip()
        if not _NAME.match(name):
            raise ConfigError(f"op {name!r} needs a namespace of your own, such as my::{name or 'op'}(...)")
        if name.startswith(f"{NAMESPACE}::"):
            raise ConfigError(f"op {name}: the namespace {NAMESPACE} is Pelton's own; use another")
        if (known := find_op(name)) is not None:
            raise ConfigError(
                f"op {name} is registered twice: by {_where(known.reference)} and {_where(reference)}"
            )
        _check_schema(name, schema, reference)
        made = Op(
            name=name,
            schema=schema,
            reference=reference,
            shape_rule=shape_rule or _derived_shape_rule(reference),
            samples=_as_samples(samples),
            tolerance={**DEFAULT_TOLERANCE, **(tolerance or {})},
        )
        register(made)
        function = OpFunction(made)
        if is_importable(reference):
            register_tactic(reference_tactic(name, function))
        return function

    return decorate


def _check_schema(name: str, schema: str, reference: Callable[..., Any]) -> None:
    try:
        parsed = torch._C.parse_schema(schema)
    except RuntimeError as error:
        reason = next(line for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"op {name}: the schema cannot be read: {reason}") from error
    for argument in parsed.arguments:
        if str(argument.type) not in ("Tensor", "Optional[Tensor]", "float", "int", "bool", "str"):
            raise ConfigError(
                f"op {name}: {argument.name} is a {argument.type}; an op takes Tensor, Tensor?, float, int, "
                "bool and str"
            )
        if argument.alias_info is not None and argument.alias_info.is_write:
            raise ConfigError(f"op {name}: {argument.name} is written in place; return a new tensor instead")
    if not parsed.returns or any(str(r.type) != "Tensor" for r in parsed.returns):
        raise ConfigError(f"op {name} must return Tensor or (Tensor, ...)")
    given = [a.name for a in parsed.arguments]
    takes = list(inspect.signature(reference).parameters)
    if given != takes:
        raise ConfigError(
            f"op {name}: the schema has the arguments {', '.join(given)}, "
            f"and {_where(reference)} takes {', '.join(takes)}"
        )


def _where(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


def _derived_shape_rule(reference: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_to_meta, (args, kwargs))
        result = reference(*args, **kwargs)
        # A tactic's result is contiguous memory of its own, whatever the reference returns.
        return tree_map(lambda t: t.new_empty(t.shape), result)

    return rule


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


def _as_samples(samples: Samples | None) -> Callable[[torch.Generator], Iterator[Sample]]:
    def generate(generator: torch.Generator) -> Iterator[Sample]:
        for number, sample in enumerate(samples(generator) if samples is not None else ()):
            yield (
                sample if isinstance(sample, Sample) else Sample(args=tuple(sample), name=f"sample {number}")
            )

    return generate


def _from_numpy(value: Any) -> Any:
    import numpy as np

    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.uint16:  # how NumPy holds bfloat16
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
