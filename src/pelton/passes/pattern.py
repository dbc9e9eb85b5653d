"""Patterns of calls to find in a graph, and what to put in their place.

A pattern is a tree: ``call(op, *arguments)`` over captured values. What it captures is named; a call
inside it must be read by the pattern alone unless it is ``shared``. A place that has the form but
cannot be rewritten is refused with a reason, which the pass reports:

    SWISH = call("aten.mul.Tensor", value("x"), call("unary", value("x"), "sigmoid"), commutes=True)
    PATTERNS = ((SWISH, lambda m: m.fuse("activation", (m["x"], "silu"))),)

    def run(graph, context):
        return rewrite(graph, context, NAME, PATTERNS)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.ir.verifier import VIEWS
from pelton.passes.base import PassContext, PassReport

Fits = Callable[[Graph, Any], bool]


@dataclass(frozen=True)
class Value:
    """Anything that ``fits``, kept as ``name``; a name that occurs twice must be the same thing."""

    name: str
    fits: Fits


@dataclass(frozen=True)
class Call:
    """A call of one of ``ops``. ``arguments``: patterns or values to be equal to, of the first arguments
    in the schema's order; further arguments may be anything."""

    ops: tuple[str, ...]
    arguments: tuple[Any, ...]
    name: str = ""
    shared: bool = False
    """May be read outside the pattern."""
    commutes: bool = False
    """The first two arguments may come in either order."""
    through_views: bool = False
    """Views of the call's result are looked through."""


def call(
    ops: str | tuple[str, ...],
    *arguments: Any,
    name: str = "",
    shared: bool = False,
    commutes: bool = False,
    through_views: bool = False,
) -> Call:
    """A ``Call``; ``ops``: one name or several."""
    return Call(
        (ops,) if isinstance(ops, str) else ops,
        arguments,
        name=name,
        shared=shared,
        commutes=commutes,
        through_views=through_views,
    )


def item(pattern: Call, index: int, *, name: str = "", shared: bool = False) -> Call:
    """Result ``index`` of a call that has several."""
    return call("getitem", pattern, index, name=name, shared=shared)


def value(name: str) -> Value:
    """A node, a number or None."""
    return Value(name, lambda graph, found: True)


def tensor(name: str) -> Value:
    """A node that is one tensor."""
    return Value(name, lambda graph, found: isinstance(found, fx.Node))


def number(name: str) -> Value:
    """A Python number."""
    return Value(name, lambda graph, found: isinstance(found, int | float))


def weight(name: str) -> Value:
    """A weight of the model."""
    return Value(name, lambda graph, found: is_weight(graph, found))


def show(pattern: Any) -> str:
    """The pattern as text: calls by their ops (``*``: may be read elsewhere), captures by their names."""
    if isinstance(pattern, Value):
        return pattern.name
    if not isinstance(pattern, Call):
        return repr(pattern)
    ops = " or ".join(op.removeprefix("aten.").partition(".")[0] for op in pattern.ops)
    inner = ", ".join(map(show, pattern.arguments)) or "..."
    return f"{ops}{'*' * pattern.shared}({inner})"


def is_weight(graph: Graph, node: Any) -> bool:
    """Whether ``node`` is the placeholder of a weight."""
    return (
        isinstance(node, fx.Node) and node.name in graph.inputs and graph.inputs[node.name].kind == "weight"
    )


class Match(Mapping[str, Any]):
    """A place that has a pattern's form: what was captured, by name."""

    def __init__(self, graph: Graph, context: PassContext, root: fx.Node) -> None:
        self.graph = graph
        self.context = context
        self.root = root
        """The pattern's outermost call."""
        self._found: dict[str, Any] = {}
        self._inner: dict[fx.Node, None] = {}

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Any:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def fuse(
        self,
        op: str,
        args: tuple[Any, ...],
        *,
        results: Mapping[fx.Node, int] | None = None,
        at: fx.Node | None = None,
    ) -> str | None:
        """Put one call of the Pelton op ``op`` in the pattern's place; or say why not.

        ``results``: which node becomes which result of an op that has several (default: the root is
        the only result). ``at``: where to stand (default: the root's place); made in the module that
        made the root. Refused where the target has no kernel for it.
        """
        graph = self.graph
        if not self.context.supports(graph, op, args):
            return f"the target has no kernel for {op} of these types"
        fused = graph.insert_call(op, args, like=self.root, before=at or self.root)
        if results is None:
            self.root.replace_all_uses_with(fused)
        else:
            items = {index: graph.insert_getitem(fused, index) for index in sorted(results.values())}
            for node, index in results.items():
                node.replace_all_uses_with(items[index])
        self.erase(*(results or ()))
        return None

    def erase(self, *besides: fx.Node) -> None:
        """Remove the root, ``besides`` and the pattern's calls, those that nobody reads any more."""
        dead = {self.root, *besides, *self._inner}
        for node in reversed(self.graph.calls):
            if node in dead and not node.users:
                self.graph.erase(node)

    # ---- Matching ----

    def fits(self, pattern: Any, found: Any, root: bool = False) -> bool:
        """Whether ``found`` has the form of ``pattern``; captures on the way."""
        if isinstance(pattern, Value):
            return pattern.fits(self.graph, found) and self._capture(pattern.name, found)
        if not isinstance(pattern, Call):
            return type(found) is type(pattern) and found == pattern
        views = []
        while pattern.through_views and isinstance(found, fx.Node) and found.target in VIEWS:
            views.append(found)
            found = found.args[0]
        if not isinstance(found, fx.Node) or op_name(found) not in pattern.ops:
            return False
        if not self._arguments_fit(pattern, found):
            return False
        if not root and not pattern.shared:
            self._inner.update(dict.fromkeys([found, *views]))
        return not pattern.name or self._capture(pattern.name, found)

    def _arguments_fit(self, pattern: Call, node: fx.Node) -> bool:
        given = arguments(node)
        if len(pattern.arguments) > len(given):
            return False
        orders = [pattern.arguments]
        if pattern.commutes:
            first, second, *rest = pattern.arguments
            orders.append((second, first, *rest))
        for order in orders:
            saved = dict(self._found), dict(self._inner)
            if all(self.fits(p, a) for p, a in zip(order, given, strict=False)):
                return True
            self._found, self._inner = saved
        return False

    def _capture(self, name: str, found: Any) -> bool:
        if name in self._found:
            return self._found[name] is found or (
                not isinstance(found, fx.Node) and bool(self._found[name] == found)
            )
        self._found[name] = found
        return True

    def why_shared(self) -> str | None:
        """A call of the pattern that something outside reads, in a sentence."""
        own = {self.root, *self._inner}
        for node in self._inner:
            if any(user not in own for user in node.users):
                return f"{node.name} is read elsewhere too"
        return None


def arguments(node: fx.Node) -> list[Any]:
    """Arguments of a call in its schema's order, defaults filled in."""
    given = list(node.args)
    schema = getattr(node.target, "_schema", None)
    for parameter in schema.arguments[len(given) :] if schema else ():
        given.append(node.kwargs.get(parameter.name, parameter.default_value))
    return given


def with_arguments(node: fx.Node, **changed: Any) -> tuple[Any, ...]:
    """The same with some of them changed, by name; names that the op does not have are of others."""
    names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
    return tuple(changed.get(name, given) for name, given in zip(names, arguments(node), strict=True))


def match(graph: Graph, context: PassContext, pattern: Call, node: fx.Node) -> Match | None:
    """The place at ``node``, if it has the form of ``pattern``."""
    found = Match(graph, context, node)
    return found if found.fits(pattern, node, root=True) else None


Build = Callable[[Match], str | None]
"""Rewrites a place; returns None, or why it was left alone."""


def rewrite(
    graph: Graph, context: PassContext, name: str, patterns: Sequence[tuple[Call, Build]]
) -> PassReport:
    """Rewrite every place of the graph that has the form of a pattern, each with its own function; at a
    node the first pattern that fits is taken."""
    matched, changed, skipped = 0, 0, []
    for node in graph.calls:
        if node._erased:
            continue
        for pattern, build in patterns:
            found = match(graph, context, pattern, node)
            if found is None:
                continue
            where = node.name
            why = found.why_shared() or build(found)
            matched += 1
            if why is None:
                changed += 1
            else:
                skipped.append((where, why))
            break
    return PassReport(name=name, matched=matched, changed=changed, skipped=tuple(skipped))
