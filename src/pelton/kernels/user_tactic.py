"""Tactics from outside Pelton: ``@pelton.tactic`` on a Python function, or on C or Triton source.

docs/extending.md shows each. They are registered for the process that builds; an engine that uses one
names the Python function, or carries the compiled C code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pelton.errors import ConfigError
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec, register_tactic

F = TypeVar("F", bound=Callable[..., Any])

#: Types that a tactic sees unless its ``supports`` says otherwise.
_PLAIN = ("float32", "int32")
_PLAIN_GPU = ("bfloat16", "float16", *_PLAIN)
#: What the name of an op's reference as a tactic ends with.
REFERENCE = ".reference"


def tactic(
    op: str,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    source: str | None = None,
    supports: Callable[..., bool] | None = None,
    workspace: Callable[..., int] | None = None,
    name: str | None = None,
    priority: int = 10,
) -> Callable[[F], F]:
    """Decorator that makes a tactic of the op ``op`` ("my::swish_norm", or one of Pelton's: "rms_norm").

    - A Python function (``device="cpu"``) takes the op's arguments by the schema's names as NumPy arrays
      and numbers, and ``out``: the array, or tuple of arrays, to write. It must be importable.
    - With C ``source``, the decorated function stands for the C function of its name (``pelton_kernel.h``);
      its body does nothing.
    - ``device="cuda"``: the decorated function is a Triton kernel's launcher (``kernels/triton_source.py``).

    ``supports`` gets the op's arguments, tensors as ``TensorSpec`` (dtype, shape with dynamic dimensions by
    name, quant), and says whether the tactic takes such a call; by default dense float32 ones.
    ``workspace``: scratch bytes, from the same arguments and ``max_tokens`` by keyword. A tactic is called
    "package.module:NAME", NAME being ``name`` or the function's: so ``--plugin OP=...`` asks for it. Raises
    ``ConfigError``.
    """

    def decorate(function: F) -> F:
        # The colon tells such tactics from Pelton's own, in plans too.
        label = name or function.__qualname__
        label = label if ":" in label else f"{function.__module__}:{label}"
        kind: Literal["python", "library", "triton"]
        if device == "cuda":
            kind = "triton"
        else:
            kind = "python" if source is None else "library"
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"tactic {label}: there is no device {device!r} (known: cpu, cuda)")
        if source is not None and not re.search(rf"\b{function.__name__}\s*\(", source):
            raise ConfigError(f"tactic {label}: its C source defines no function {function.__name__}")
        arguments = _arguments(op, label)
        names = [argument for argument, _ in arguments]
        if kind != "library":
            _check_importable(function, label)
            takes = list(inspect.signature(function).parameters)
            if takes != [*names, "out"]:
                wanted = ", ".join([*names, "out"])
                raise ConfigError(f"tactic {label} takes {', '.join(takes)}; for {op} it must take {wanted}")
        made = Tactic(
            name=label,
            op=op,
            supports=_by_arguments(names, supports)
            if supports
            else _plain_gpu
            if kind == "triton"
            else _plain,
            device=device,
            priority=priority,
            workspace=_workspace(names, workspace) if workspace else lambda node, max_tokens: 0,
            kind=kind,
            function=function.__name__
            if kind == "library"
            else f"{function.__module__}:{function.__qualname__}",
            source=source or "",
            implementation=function,
            launches=_triton_launches(label, function, arguments) if kind == "triton" else None,
            precision="bfloat16" if kind == "triton" else "float32",
        )
        register_tactic(made)
        return function

    return decorate


def reference_tactic(op: str, function: Any) -> Tactic:
    """The op's own reference as a tactic: what runs where no other supports a call."""
    return Tactic(
        name=f"{op}{REFERENCE}",
        op=op,
        supports=_plain,
        priority=-100,
        kind="python",
        function=f"{function.__module__}:{function.__qualname__}",
        implementation=function,
    )


def _triton_launches(
    label: str, launcher: Callable[..., Any], arguments: list[tuple[str, bool]]
) -> Callable[[Any, int], Any]:
    def launches(call: Any, max_tokens: int) -> Any:
        from pelton.kernels.triton_source import launches_of

        return launches_of(label, launcher, arguments)(call, max_tokens)

    return launches


def _arguments(op: str, label: str) -> list[tuple[str, bool]]:
    """(name, is a tensor) of the op's arguments in the schema's order."""
    from pelton.ir.op import find_op

    found = find_op(op)
    if found is None:
        raise ConfigError(f"tactic {label}: there is no op {op}; define it first, with @pelton.op")
    return [(a.name, "Tensor" in str(a.type)) for a in found.torch_op._schema.arguments]


def is_importable(function: Callable[..., Any]) -> bool:
    """Whether another process can import the function by its module's name."""
    return "<" not in function.__qualname__ and function.__module__ != "__main__"


def _check_importable(function: Callable[..., Any], label: str) -> None:
    if not is_importable(function):
        raise ConfigError(
            f"tactic {label}: an engine names its Python tactics by module, so the function must stand at "
            "the top level of a module that can be imported"
        )


def _plain(node: NodeSpec) -> bool:
    return all(t is None or (t.dtype in _PLAIN and t.quant in ("", "float32")) for t in node.inputs)


def _plain_gpu(node: NodeSpec) -> bool:
    return all(t is None or (t.dtype in _PLAIN_GPU and t.quant in ("", *_PLAIN_GPU)) for t in node.inputs)


def _by_arguments(names: list[str], supports: Callable[..., bool]) -> Callable[[NodeSpec], bool]:
    return lambda node: bool(supports(**_values(names, node)))


def _workspace(names: list[str], workspace: Callable[..., int]) -> Callable[[NodeSpec, int], int]:
    return lambda node, max_tokens: int(workspace(**_values(names, node), max_tokens=max_tokens))


def _values(names: list[str], node: NodeSpec) -> dict[str, TensorSpec | Any | None]:
    tensors = iter(node.inputs)
    return {name: node.attrs[name] if name in node.attrs else next(tensors) for name in names}
