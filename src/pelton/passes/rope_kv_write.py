"""rope_kv_write: rotate q and k, and write k and v to the cache, in one op.

With per-head norms of q and k (Qwen3, Gemma 3) before the rotation, those are folded in too. The
fused op stands where the KV write stood, so that writes keep their order.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "rope_kv_write"


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``kv_write(rope(k), v, ...); paged_attention(rope(q), ...)``."""
    matched, changed, skipped = 0, 0, []
    for write in graph.calls:
        if op_name(write) != "kv_write":
            continue
        matched += 1
        why = _fuse(graph, context, write)
        if why is None:
            changed += 1
        else:
            skipped.append((write.name, why))
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


def _fuse(graph: Graph, context: PassContext, write: fx.Node) -> str | None:
    """Fuse around ``write``; or say why not."""
    k_rope, v, k_cache, v_cache, slots, *scales = write.args
    readers = [n for n in k_cache.users if op_name(n) == "paged_attention"]  # type: ignore[union-attr]
    if len(readers) != 1:
        return f"{len(readers)} attention ops read this cache, not one"
    q_rope = readers[0].args[0]
    for label, node in (("k", k_rope), ("q", q_rope)):
        if not isinstance(node, fx.Node) or op_name(node) != "rope":
            return f"{label} is not rotated"
        if len(node.users) != 1:
            return f"the rotated {label} is read elsewhere too"
    assert isinstance(k_rope, fx.Node)
    assert isinstance(q_rope, fx.Node)
    (k, k_table), (q, q_table) = k_rope.args, q_rope.args
    if k_table is not q_table:
        return "q and k are rotated by different tables"
    order = {node: i for i, node in enumerate(graph.nodes)}
    if order[q_rope] > order[write]:
        return "q is rotated after the write"
    arguments: list[Any] = [q, k, v, k_table, k_cache, v_cache, slots]
    norms = _head_norms(q, k)
    if norms:
        q_norm, k_norm = norms
        arguments[:2] = [q_norm.args[0], k_norm.args[0]]
        arguments += [q_norm.args[1], k_norm.args[1], q_norm.args[2]]
    elif scales:
        arguments += [None, None, 0.0]
    arguments += scales
    if not context.supports(graph, NAME, tuple(arguments)):
        return f"the target has no kernel for {NAME} of these types"
    fused = graph.insert_call(NAME, tuple(arguments), like=write, before=write)
    q_rope.replace_all_uses_with(fused)
    for node in (write, k_rope, q_rope, *norms):
        graph.erase(node)
    return None


def _head_norms(q: Any, k: Any) -> tuple[fx.Node, ...]:
    """The norms of q's and k's heads when both can be folded in: of one eps, read by rope alone."""
    both = (q, k)
    if all(op_name(n) == "rms_norm" and len(n.users) == 1 for n in both) and q.args[2] == k.args[2]:
        return both
    return ()


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="kv_write(rope(k), v), rope(q) -> rope_kv_write(q, k, v), with the norms of q's and k's heads",
    bound="bit for bit",
    needs=("attention_bias",),
)
