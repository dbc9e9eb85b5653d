"""Products of a few tokens with packed weights, for sm_90 (``packed.cu``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from pelton.dtypes import GPU_BLOCK_TYPES
from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.gpu_layouts import PANEL, code_bytes
from pelton.kernels.gpu_types import GPU_TYPES
from pelton.kernels.launch import CallSpec, CudaBuilder, LaunchSpec, Term, Work
from pelton.kernels.linear.packed import LAYOUT, code_constants
from pelton.kernels.linear.products import Form, Product
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, Tactic, no_codes

FILE = "linear/packed.cu"
#: Columns that a warp takes at a time.
UNIT = 128
#: Values of the constant GATED.
_ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
#: Largest numbers of tokens that have a kernel.
FEW_STEPS = (1, 4, 8, 16)
#: Bytes of shared memory of a block: no two fit into a multiprocessor, as ``hopper.py`` says.
_SHARED = 224 << 10
#: The same of a product of one token that attention may stand behind, whose blocks then begin beside it
#: (``rope_paged_attention/hopper.py``): with as few warps as leave registers too. For more tokens: slower.
_BESIDE, _BESIDE_WARPS, _BESIDE_ELEMENTS = 114 << 10, 8, 1 << 25
_MOST_STAGES = 16
#: Clusters of so many blocks that fit into a GPU of 132 multiprocessors, however its parts are cut.
_CLUSTERS = {1: PROCESSORS, 2: PROCESSORS // 2, 4: 29, 8: 12}
#: Bytes of x that blocks of up to four in a cluster may have; that any may.
_MUCH_X, _MOST_X = 66 << 10, 120 << 10
#: That multiply, at most.
_WARPS = 16


@dataclass(frozen=True)
class FewTiles:
    """How a product's blocks are laid out; ``packed.cu`` says what each number is."""

    tokens: int
    splits: int
    parts: int
    batch: int
    cluster: int
    groups: int = 1
    shared: int = _SHARED
    """Bytes of shared memory of a block: what the rest leaves is the ring's."""


#: Splits, parts, batch, cluster, groups of products with 4-bit integers, by tokens and kind of matrix: of
#: some hundred the fastest on an H200, alone and then in a whole step. The more blocks share the columns,
#: the less of x is read.
_MEASURED = {
    (8, "normed"): (4, 4, 2, 4, 2),
    (8, "short"): (8, 2, 2, 2, 4),
    (16, "normed"): (4, 2, 3, 4, 4),
    (16, "short"): (8, 1, 3, 4, 4),
    (16, "long"): (4, 2, 3, 8, 2),
    (16, "gated"): (4, 2, 1, 2, 1),
}


def _nibbles(quant: str) -> bool:
    """Whether codes are integers of up to 4 bits."""
    return GPU_TYPES[quant].code == "u4"


def _kind(form: Form, units: int) -> str:
    """As ``_MEASURED`` says it; columns are many from 64 units on."""
    return (
        "gated" if form.gated else "normed" if form.norm is not None else "short" if units <= 64 else "long"
    )


def _measured(form: Form, n: int, k: int, held: int, quant: str) -> FewTiles | None:
    """Those of ``_MEASURED``, where nearly all warps have work in every batch and the ring turns."""
    units, panels = k // UNIT, n // PANEL
    found = _MEASURED.get((held, _kind(form, units)))
    if found is None or not _nibbles(quant):
        return None
    splits, parts, batch, cluster, groups = found
    own, each = units // cluster, -(-panels // _CLUSTERS[cluster])
    turns, batches = -(-own // splits), -(-each // (parts * batch))
    even = 8 * own >= 7 * turns * splits and 4 * each >= 3 * batches * parts * batch
    tiles = FewTiles(held, splits, parts, batch, cluster, groups)
    if units % cluster or not even:
        return None
    return tiles if clusters_and_stages(form, n, k, quant, tiles)[1] >= 2 else None


@functools.cache
def few_tiles(form: Form, n: int, k: int, tokens: int, quant: str) -> FewTiles | None:
    """For ``n`` results of up to ``tokens`` tokens; from an H200 (``h200_chain.py``). None: none fit."""
    units, panels = k // UNIT, n // PANEL
    held = tokens if tokens <= 8 else 16
    if measured := _measured(form, n, k, held, quant):
        return measured
    sizes = [c for c in _CLUSTERS if units % c == 0]

    def cluster_of(enough: Callable[[int], bool], most: int = 8) -> int:
        """The smallest that is enough, or the largest that divides the columns."""
        fitting = [c for c in sizes if c <= most]
        return next((c for c in fitting if enough(c)), fitting[-1])

    # Every block reads its share of x, which takes as long as as many bytes of the weight; 16 tokens are as
    # many as a block's part of a narrow matrix.
    narrow = held > 8 and not form.gated and panels <= 4 * PROCESSORS
    cluster = max(
        cluster_of(lambda c: c >= (4 if narrow else 2 if tokens > 1 else 1)),
        cluster_of(lambda c: 2 * held * k // c <= _MUCH_X, 4),
        cluster_of(lambda c: 2 * held * k // c <= _MOST_X),
        cluster_of(lambda c: panels * 2 * c > PROCESSORS),
    )
    own, each = units // cluster, -(-panels // _CLUSTERS[cluster])
    # Panels that share a load of x; of 16 tokens x is large, and so are the sums.
    batch = (
        1
        if form.gated or (held > 8 and cluster > 2 and own >= _WARPS)
        else 3
        if each % 3 == 0 and held <= 8
        else min(each, 2)
    )
    parts = 2 if own <= _WARPS and each >= 2 * batch else 1
    beside = held == 1 and _kind(form, units) == "normed" and n * k <= _BESIDE_ELEMENTS and _nibbles(quant)
    warps, shared = (_BESIDE_WARPS, _BESIDE) if beside else (_WARPS, _SHARED)
    # As few turns of a panel as the warps allow, which are then as few as they can be; more where rings would
    # be short.
    found = None
    for turns in range(-(-own // (warps // parts)), own + 1):
        splits = -(-own // turns)
        groups = 4 if splits == _WARPS and cluster == 1 else 2 if splits > 1 else 1
        groups = 1 if narrow and own < _WARPS else groups
        tiles = FewTiles(held, -(-splits // groups) * groups, parts, batch, cluster, groups, shared)
        stages = clusters_and_stages(form, n, k, quant, tiles)[1]
        if stages and found is None:
            found = tiles
        if stages >= min(3 if narrow else 4, turns * groups * -(-each // (parts * batch)) // groups * groups):
            return tiles
    return found


def clusters_and_stages(form: Form, n: int, k: int, quant: str, tiles: FewTiles) -> tuple[int, int]:
    """Clusters of blocks, of which all but the last have as many panels; stages of their rings: as many as
    fit, or as there is work for, none where not one fits."""
    halves, kind = 2 if form.gated else 1, GPU_TYPES[quant]
    panels, own = n // PANEL, k // UNIT // tiles.cluster
    each = -(-panels // _CLUSTERS[tiles.cluster])
    sets = UNIT // kind.group if kind.group else 1
    areas = UNIT // kind.area_columns * kind.area_bytes if kind.group else 0
    codes = code_bytes(quant, UNIT)
    rows16 = tiles.parts * tiles.batch * halves
    places = tiles.splits // tiles.groups
    stage = rows16 * places * (codes + areas)
    token_tiles = -(-tiles.tokens // 8)
    # x, its sums by group and of squares; sums of splits, of the cluster.
    besides = tiles.tokens * (own * UNIT * 2 + 16)
    besides += 32 * token_tiles * (own * (sets + int(form.norm is not None)) + tiles.cluster)
    batches = -(-each // (tiles.parts * tiles.batch))
    besides += min(2, batches) * 512 * token_tiles * tiles.splits * rows16
    if tiles.cluster > 1:
        besides += 512 * token_tiles * tiles.cluster * -(-each // tiles.cluster) * halves
    turns = batches * -(-own // places)
    stages = min(_MOST_STAGES, turns, (tiles.shared - besides - 16 * (_MOST_STAGES + 3)) // stage)
    return -(-panels // each), max(0, stages // tiles.groups * tiles.groups)


def few(form: Form, call: CallSpec, tiles: FewTiles) -> LaunchSpec:
    """A norm before, an activation, bias and residual after are the kernel's."""
    p = Product(form, call, tiles.tokens)
    b = CudaBuilder(call, FILE, "packed").input(1).input(0)
    bias = call.inputs[2] is not None
    for index in (2 if bias else None, form.residual, form.norm):
        b = b.nothing() if index is None else b.input(index)
    b.output().dim(p.x.shape[0]).number(float(call.attrs.get("eps", 0.0))).ahead()
    assert p.x.strides[0] % 8 == 0 or p.x.shape[0] == 1, "rows begin at multiples of 16 bytes"
    clusters, stages = clusters_and_stages(form, p.n, p.k, p.weight.quant, tiles)
    assert stages, f"{tiles} does not fit"
    finishers = 1 if tiles.tokens == 1 else 2
    copiers = 2 if GPU_TYPES[p.weight.quant].group else 1
    return b.launch(
        (Term(times=clusters * tiles.cluster),),
        constants={
            "RESULTS": p.n,
            "INNER": p.k,
            "TOKENS": tiles.tokens,
            "SPLITS": tiles.splits,
            "PARTS": tiles.parts,
            "BATCH": tiles.batch,
            "GROUPS": tiles.groups,
            "FINISHERS": finishers,
            "STAGES": stages,
            "CLUSTER": tiles.cluster,
            "WORKERS": clusters,
            "NORM": int(form.norm is not None),
            "BIAS": int(bias),
            "RESIDUAL": int(form.residual is not None),
            "X_ROW": p.x.strides[0],
            "R_ROW": 0 if form.residual is None else call.input(form.residual).strides[0],
            "GATED": _ACTIVATIONS[p.kind],
            **code_constants(p.weight.quant),
        },
        threads=32 * (tiles.splits * tiles.parts + copiers + finishers),
        shared=tiles.shared,
        suffix="a",
        dependent=True,
    )


def supports_few(form: Form, node: NodeSpec) -> bool:
    """bfloat16, whole units of the weight, vectors in float32 as engines have them."""
    x, weight, *_ = node.inputs
    assert x is not None
    assert weight is not None
    if weight.quant not in GPU_BLOCK_TYPES or not no_codes(node):
        return False
    vectors = [node.inputs[i] for i in (2, form.norm) if i is not None]
    plain = all(t is None or (t.quant or t.dtype) == "float32" for t in vectors)
    rows = [x] + ([] if form.residual is None else [node.inputs[form.residual]])
    halves = 2 if form.gated else 1
    return (
        plain
        and all(t is not None and t.dtype == "bfloat16" for t in rows)
        and int(weight.shape[0]) % (PANEL * halves) == 0
        and int(weight.shape[1]) % UNIT == 0
        and (not form.gated or node.attrs["kind"] in KINDS)
    )


def few_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""

    def tactic(tokens: int) -> Tactic:
        def supports(node: NodeSpec) -> bool:
            if not supports_few(form, node):
                return False
            weight = node.inputs[1]
            assert weight is not None
            if weight.quant == "nvfp4" and tokens > 8:  # many scales: Triton's kernel takes a twelfth less
                return False
            n, k = int(weight.shape[0]) // (2 if form.gated else 1), int(weight.shape[1])
            return few_tiles(form, n, k, tokens, weight.quant) is not None

        def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
            p = Product(form, call, max_tokens)
            tiles = few_tiles(form, p.n, p.k, max_tokens, p.weight.quant)
            assert tiles is not None, "the tactic supports the call"
            return (few(form, call, tiles),)

        return Tactic(
            name=f"cuda.{op}.packed_few{tokens}",
            op=op,
            device="cuda",
            supports=supports,
            priority=45,
            precision="bfloat16",
            sm=90,
            largest_tokens=tokens,
            weight_layouts={1: LAYOUT},
            launches=launches,
        )

    return [tactic(tokens) for tokens in FEW_STEPS]
