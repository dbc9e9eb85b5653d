"""Paged attention by tensor copies and warp-group products, for sm_90 alone (``hopper_attention.cu``)."""

from __future__ import annotations

from pelton.kernels.launch import CallSpec, CudaBuilder, LaunchSpec, TensorMap, Term, Work, result_code
from pelton.kernels.paged_attention.cuda import decode_launches
from pelton.kernels.tactic import NodeSpec, Tactic, gpu_caches, no_codes

FILE = "paged_attention/hopper_attention.cu"
#: Rows of scores and keys of a tile, bytes of a swizzled row.
ROWS, KEYS, ROW_BYTES = 128, 128, 128
#: Persistent blocks: one on each multiprocessor of an H100 or H200.
BLOCKS = 132
#: Rows of a cache in its map: as many as coordinates reach. The block table is trusted, as everywhere.
_CACHE_ROWS = (1 << 31) - 1


def _supports(node: NodeSpec) -> bool:
    q, k_cache = node.inputs[0], node.inputs[1]
    assert q is not None
    assert k_cache is not None
    page, dim = int(k_cache.shape[2]), int(k_cache.shape[3])
    return (
        gpu_caches(node, 1, 2)
        and q.dtype == k_cache.dtype
        and q.dtype in ("bfloat16", "float16")
        and dim in (64, 128)
        and page in (8, 16, 32, 64, 128)
        and int(q.shape[1]) // int(k_cache.shape[1]) <= ROWS
        and float(node.attrs["scale"]) > 0
        and (q.dtype == "bfloat16" or no_codes(node))
        and all(t is None or t.dtype == "float32" for t in node.inputs[8:])  # sinks
    )


#: Tiles of keys that have a sum of their own in batch-invariant steps, and sums that blocks share at most.
PART, ITEMS = 16, 2048


def _part_bytes(node: NodeSpec, max_tokens: int) -> int:
    """Of the sums that blocks keep, 8 warps' each, and of those that they share, a warp's each."""
    q = node.inputs[0]
    assert q is not None
    return (int(q.shape[2]) // 2 + 4) * 128 * (8 * BLOCKS + ITEMS)


def attention(call: CallSpec, tokens: int, *, stages: int = 3, part: int = 0) -> LaunchSpec:
    """The launch for a step of at most ``tokens`` tokens; ``stages``: tiles of K and V in shared memory;
    ``part``: tiles of keys with a sum of their own, 0: without."""
    q, k_cache, table = call.input(0), call.input(1), call.input(3)
    heads, dim = int(q.shape[1]), int(q.shape[2])
    kv_heads, page = int(k_cache.shape[1]), int(k_cache.shape[2])
    group = heads // kv_heads
    softcap = float(call.attrs["softcap"])
    q_map = TensorMap(
        dtype=q.dtype,
        shape=(dim, heads, tokens),
        strides=(2 * q.strides[1], 2 * q.strides[0]),
        box=(64, group, ROWS // group),
    )
    k_map = TensorMap(dtype=q.dtype, shape=(dim, _CACHE_ROWS), strides=(2 * dim,), box=(64, min(page, KEYS)))
    v_map = TensorMap(
        dtype=q.dtype,
        shape=(64, _CACHE_ROWS, dim // 64),
        strides=(2 * dim, 128),
        box=(64, min(page, KEYS), dim // 64),
    )
    b = CudaBuilder(call, FILE, "attention")
    b.tensor_map(0, q_map).tensor_map(1, k_map).tensor_map(2, v_map)
    b.input(3).input(4).input(5).output().counters()
    b = b.workspace() if part else b.nothing()
    b.dim(table.shape[0]).number(float(call.attrs["scale"])).number(softcap)
    b.number(float(call.attrs.get("y_scale") or 0.0))
    sinks = call.inputs[8] is not None
    if sinks:
        b.input(8)
    return b.launch(
        (Term(times=BLOCKS),),
        constants={
            "HEADS": heads,
            "GROUP": group,
            "D": dim,
            "PAGE": page,
            "COLUMNS": int(table.shape[1]),
            "WINDOW": int(call.attrs["window"]),
            "SOFTCAP": int(softcap > 0),
            "SINKS": int(sinks),
            "HALF": int(q.dtype == "float16"),
            "STAGES": stages,
            "PART": part,
            "ITEMS": ITEMS if part else 0,
            "RESULT_CODE": result_code(call),
        },
        threads=384,
        # Q, then K and V; barriers and the tile of work; up to the first multiple of 1024 bytes.
        shared=(1 + 2 * stages) * dim // 64 * KEYS * ROW_BYTES + 320 + 1024,
        suffix="a",
    )


def _launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    return (attention(call, max_tokens),)


def _invariant(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    return (attention(call, max_tokens, part=PART),)


TACTICS = [
    Tactic(
        name="cuda.paged_attention.hopper",
        op="paged_attention",
        device="cuda",
        supports=_supports,
        priority=15,
        precision="bfloat16",
        sm=90,
        launches=_launches,
        decode=decode_launches(1),
    ),
    Tactic(
        # A row's keys are added in the same tiles and order whatever its tile of queries is. With windows
        # equal bits have not been seen on a GPU yet.
        name="cuda.paged_attention.hopper.invariant",
        op="paged_attention",
        device="cuda",
        supports=lambda node: _supports(node) and not node.attrs["window"],
        priority=1,
        precision="bfloat16",
        batch_invariant=True,
        sm=90,
        workspace=_part_bytes,
        launches=_invariant,
    ),
]
