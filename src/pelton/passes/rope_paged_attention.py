"""rope_paged_attention: rotate, write to the cache and attend in one op, where the target has it.

The fused op stands where the KV write stood, so that writes keep their order, and so that a cache is
not read before it is written.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from pelton.ir.graph import Graph, argument, op_name
from pelton.ir.op import get_op
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "rope_paged_attention"


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``paged_attention(rope_kv_write(q, k, v, ...), ...)``."""
    matched, changed, skipped = 0, 0, []
    for write in graph.calls:
        if op_name(write) != "rope_kv_write":
            continue
        matched += 1
        why = _fuse(graph, context, write)
        if why is None:
            changed += 1
        else:
            skipped.append((write.name, why))
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


def _fuse(graph: Graph, context: PassContext, write: fx.Node) -> str | None:
    """Fuse ``write`` and the attention that reads its q; or say why not."""
    if len(write.users) != 1:
        return f"the rotated q has {len(write.users)} readers, not one"
    (attention,) = write.users
    if op_name(attention) != "paged_attention" or argument(attention, "q") is not write:
        return "the rotated q is not read by an attention op"
    for name, what in _SHARED:
        if argument(attention, name) is not argument(write, name):
            return f"the attention op has {what}"
    order = {node: i for i, node in enumerate(graph.nodes)}
    between = range(order[write] + 1, order[attention])
    cache = argument(write, "k_cache")
    if any(graph.is_effect(user) and order[user] in between for user in cache.users):
        return "the cache is written again before it is read"
    if any(order[n] > order[write] for n in attention.all_input_nodes if n is not write):
        return "the attention op reads what is made after the write"
    given = {"write": write, "attention": attention}
    arguments = tuple(_argument(given, p.name) for p in get_op(NAME).torch_op._schema.arguments)
    if not context.supports(graph, NAME, arguments):
        return f"the target has no kernel for {NAME} of these types"
    fused = graph.insert_call(NAME, arguments, like=write, before=write)
    attention.replace_all_uses_with(fused)
    graph.erase(attention)
    graph.erase(write)
    return None


#: Parameters that both have, and what it means that they differ.
_SHARED = (
    ("k_cache", "another cache"),
    ("v_cache", "another cache"),
    ("k_scale", "other scales"),
    ("v_scale", "other scales"),
)
#: Parameters that the attention op alone has; all others are the write's.
_ATTENTION = (
    "block_table",
    "cu_seqlens",
    "seq_lens",
    "scale",
    "window",
    "softcap",
    "y_scale",
    "y_codes",
    "sinks",
)


def _argument(given: dict[str, fx.Node], name: str) -> Any:
    return argument(given["attention" if name in _ATTENTION else "write"], name)


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="paged_attention(rope_kv_write(q, k, v)) -> rope_paged_attention(q, k, v)",
    bound="bit for bit",
    needs=("rope_kv_write",),
)
