"""The native plan runner on a small plan: take_rows, norm, RoPE + KV write, attention, add, take_rows."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pelton.engine.batch import AttentionMetadata, InputBatch  # noqa: E402
from pelton.engine.native_plan import NativePlan  # noqa: E402
from pelton.engine.plan import Buffer, Instruction, Operand, Plan, TacticChoice  # noqa: E402
from pelton.errors import EngineError  # noqa: E402
from pelton.ir.ops import paged_attention, rms_norm, rope_cos_sin, rope_kv_write  # noqa: E402
from pelton.kernels import cpu_levels, native  # noqa: E402

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")

MAX_T, MAX_B, MAX_N = 40, 4, 8
VOCAB, HEADS, KV_HEADS, DIM = 50, 2, 1, 16
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
BLOCKS, BLOCK_SIZE, COLUMNS = 12, 4, 6
EPS, SCALE = 1e-5, DIM**-0.5


def make_plan(tactics: dict[str, tuple[TacticChoice, ...]] | None = None) -> Plan:
    buffers: list[Buffer] = []
    operands: list[Operand] = []
    instructions: list[Instruction] = []
    arena = 0

    def operand(buffer: int, shape: tuple, strides: tuple[int, ...], offset: int = 0, name: str = "") -> int:
        name = name or buffers[buffer].name
        operands.append(Operand(name=name, buffer=buffer, shape=shape, strides=strides, offset=offset))
        return len(operands) - 1

    def given(kind: str, name: str, shape: tuple, dtype: str = "float32", **fields: int) -> int:
        buffers.append(Buffer(name=name, kind=kind, dtype=dtype, shape=shape, **fields))
        strides = [1]
        for d in shape[:0:-1]:
            strides.insert(0, strides[0] * d)
        return operand(len(buffers) - 1, shape, tuple(strides))

    def temporary(name: str, shape: tuple) -> int:
        nonlocal arena
        most = {"T": MAX_T, "N": MAX_N}[shape[0]] * int(np.prod(shape[1:])) * 4
        o = given("arena", name, shape, offset=arena, nbytes=most)
        arena += -(-most // 64) * 64
        return o

    def run(op: str, inputs: tuple, outputs: tuple, **attrs: float) -> None:
        chosen = (tactics or {}).get(op, (TacticChoice(max_tokens=MAX_T, tactic=f"cpu.{op}"),))
        instructions.append(
            Instruction(
                op=op,
                name=f"{op}.{len(instructions)}",
                inputs=inputs,
                outputs=outputs,
                attrs=attrs,
                tactics=chosen,
            )
        )

    ids = given("input", "input_ids", ("T",), "int32")
    positions = given("input", "positions", ("T",), "int32")
    rows = given("input", "logits_indices", ("N",), "int32")
    slots = given("input", "slot_mapping.0", ("T",), "int32")
    table = given("input", "block_table.0", ("B", COLUMNS), "int32")
    cu = given("input", "cu_seqlens", ("B+1",), "int32")
    lens = given("input", "seq_lens", ("B",), "int32")
    embedding = given("weight", "embedding", (VOCAB, WIDTH), quant="float32", layout="rows")
    norm = given("weight", "norm", (WIDTH,), quant="float32", layout="rows")
    inv_freq = given("constant", "inv_freq", (DIM // 2,))
    k_cache = given("k_cache", "k.0", ("P0", KV_HEADS, BLOCK_SIZE, DIM), layer=0, group=0)
    v_cache = given("v_cache", "v.0", ("P0", KV_HEADS, BLOCK_SIZE, DIM), layer=0, group=0)

    h = temporary("h", ("T", WIDTH))
    run("take_rows", (embedding, ids), (h,))
    x = temporary("x", ("T", WIDTH))
    run("rms_norm", (h, norm), (x,), eps=EPS)
    cos_sin = temporary("cos_sin", ("T", DIM))
    run("rope_cos_sin", (positions, inv_freq), (cos_sin,), scale=1.0)
    buffer = operands[x].buffer
    strides = (WIDTH, DIM, 1)
    q = operand(buffer, ("T", HEADS, DIM), strides, name="q")
    k = operand(buffer, ("T", KV_HEADS, DIM), strides, HEADS * DIM, name="k")
    v = operand(buffer, ("T", KV_HEADS, DIM), strides, (HEADS + KV_HEADS) * DIM, name="v")
    rotated = temporary("rotated", ("T", HEADS, DIM))
    run("rope_kv_write", (q, k, v, cos_sin, k_cache, v_cache, slots, -1, -1), (rotated,), eps=0.0)
    attended = temporary("attended", ("T", HEADS, DIM))
    run(
        "paged_attention",
        (rotated, k_cache, v_cache, table, cu, lens),
        (attended,),
        scale=SCALE,
        window=0,
        softcap=0.0,
    )
    total = temporary("total", ("T", HEADS, DIM))
    run("add", (rotated, attended), (total,))
    flat = operand(operands[total].buffer, ("T", HEADS * DIM), (HEADS * DIM, 1), name="flat")
    logits = temporary("logits", ("N", HEADS * DIM))
    run("take_rows", (flat, rows), (logits,))
    return Plan(
        dims={"T": MAX_T, "B": MAX_B, "N": MAX_N},
        buffers=tuple(buffers),
        operands=tuple(operands),
        instructions=tuple(instructions),
        logits=logits,
        arena_bytes=arena,
        workspace_bytes=1 << 16,
    )


class Model:
    """The plan's weights and caches, and the same computation with the ops' references."""

    def __init__(self) -> None:
        g = np.random.default_rng(0)
        self.weights = {
            "embedding": g.standard_normal((VOCAB, WIDTH)).astype(np.float32),
            "norm": g.standard_normal(WIDTH).astype(np.float32),
            "inv_freq": (10000.0 ** -(np.arange(0, DIM, 2) / DIM)).astype(np.float32),
        }
        shape = (BLOCKS, KV_HEADS, BLOCK_SIZE, DIM)
        self.k, self.v = (np.full(shape, np.nan, np.float32) for _ in range(2))

    def reference(self, batch: InputBatch, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        t = torch.from_numpy
        h = t(self.weights["embedding"])[t(batch.input_ids_T).long()]
        x = rms_norm.reference(h, t(self.weights["norm"]), EPS).view(-1, HEADS + 2 * KV_HEADS, DIM)
        q, key, value = x.split([HEADS, KV_HEADS, KV_HEADS], 1)
        group = batch.groups[0]
        cos_sin = rope_cos_sin.reference(t(batch.positions_T), t(self.weights["inv_freq"]), 1.0)
        q = rope_kv_write.reference(q, key, value, cos_sin, t(k), t(v), t(group.slot_mapping_T))
        args = (t(group.block_table_BM), t(group.cu_seqlens), t(group.seq_lens_B))
        out = q + paged_attention.reference(q, t(k), t(v), *args, SCALE)
        return out.flatten(1)[t(batch.logits_indices_N).long()].numpy()


def make_batch(lens: list[tuple[int, int]], seed: int = 0) -> InputBatch:
    """Sequences of (queries, keys so far and now), blocks handed out in order."""
    g = np.random.default_rng(seed)
    i32 = np.int32
    table = np.zeros((len(lens), COLUMNS), i32)
    used, slots, positions = 0, [], []
    for b, (queries, keys) in enumerate(lens):
        blocks = -(-keys // BLOCK_SIZE)
        table[b, :blocks] = np.arange(used, used + blocks)
        used += blocks
        for p in range(keys - queries, keys):
            positions.append(p)
            slots.append(table[b, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
    cu = np.cumsum([0, *(q for q, _ in lens)]).astype(i32)
    group = AttentionMetadata(
        slot_mapping_T=np.array(slots, i32),
        block_table_BM=table,
        cu_seqlens=cu,
        seq_lens_B=np.array([keys for _, keys in lens], i32),
    )
    return InputBatch(
        input_ids_T=g.integers(0, VOCAB, len(slots)).astype(i32),
        positions_T=np.array(positions, i32),
        groups=(group,),
        logits_indices_N=(cu[1:] - 1).astype(i32),
    )


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture(params=[1, 2, 3])
def plan(model: Model, request: pytest.FixtureRequest) -> Iterator[NativePlan]:
    plan = NativePlan(make_plan(), model.weights, [model.k], [model.v], threads=request.param, poison=True)
    yield plan
    plan.close()


def test_steps_equal_the_references(model: Model, plan: NativePlan) -> None:
    k, v = model.k.copy(), model.v.copy()
    for seed, lens in enumerate(([(5, 5), (9, 9)], [(1, 6), (1, 10)], [(1, 7), (3, 13)], [(1, 8)])):
        batch = make_batch(lens, seed)
        logits, _ = plan.run(batch)
        np.testing.assert_allclose(logits, model.reference(batch, k, v), rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(model.k, k, rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(np.isnan(model.v), np.isnan(v))


def test_named_tensors_come_back_as_copies(plan: NativePlan) -> None:
    batch = make_batch([(5, 5), (2, 2)])
    logits, outputs = plan.run(batch, outputs=["h", "total", "x", "rotated"])
    assert outputs["x"].shape == (7, WIDTH)
    assert outputs["total"].shape == (7, HEADS, DIM)
    np.testing.assert_array_equal(outputs["total"].reshape(7, -1)[batch.logits_indices_N], logits)
    before = outputs["h"].copy()
    plan.run(make_batch([(3, 3)], seed=9))
    np.testing.assert_array_equal(outputs["h"], before)
    with pytest.raises(KeyError, match="no tensor called y"):
        plan.run(batch, outputs=["y"])


def test_profile_times_every_instruction(plan: NativePlan) -> None:
    plan.start_profile()
    for _ in range(3):
        plan.run(make_batch([(5, 5)]))
    times = plan.profile()
    assert [t.op for t in times] == [i.op for i in plan.plan.instructions]
    assert all(t.calls == 3 and t.seconds > 0 for t in times)


def test_tactics_are_chosen_by_the_number_of_tokens(model: Model) -> None:
    choices = (
        TacticChoice(max_tokens=2, tactic="cpu.add"),
        TacticChoice(max_tokens=4, tactic="cpu.mul"),
        TacticChoice(max_tokens=MAX_T, tactic="cpu.add"),
    )
    plan = NativePlan(make_plan({"add": choices}), model.weights, [model.k], [model.v], threads=1)
    for tokens, expected in ((1, np.add), (2, np.add), (3, np.multiply), (4, np.multiply), (5, np.add)):
        _, out = plan.run(make_batch([(tokens, tokens)]), outputs=["rotated", "attended", "total"])
        np.testing.assert_array_equal(out["total"], expected(out["rotated"], out["attended"]))


@pytest.mark.parametrize("lens", [[(10, 10), (10, 10), (10, 10), (11, 11)], [(1, 1)] * 5])
def test_a_step_larger_than_the_plan_is_refused_and_writes_nothing(
    lens: list[tuple[int, int]], model: Model, plan: NativePlan
) -> None:
    with pytest.raises(ValueError, match=r"T = 41|B = 5"):
        plan.run(make_batch(lens))
    assert np.isnan(model.k).all()
    assert np.isnan(model.v).all()
    plan.run(make_batch([(5, 5), (2, 2)]))  # a good step works after


def test_what_cannot_run_is_refused_at_creation(model: Model) -> None:
    def create(plan: Plan, **changes: object) -> None:
        args = {"weights": model.weights, "k_caches": [model.k], "v_caches": [model.v], "threads": 1}
        NativePlan(plan, **(args | changes))

    with pytest.raises(EngineError, match=r"no kernel cpu\.nothing"):
        create(make_plan({"add": (TacticChoice(max_tokens=MAX_T, tactic="cpu.nothing"),)}))
    with pytest.raises(EngineError, match=r"add\.5 .* no native tactic"):
        create(make_plan({"add": ()}))
    with pytest.raises(EngineError, match="no weight norm"):
        create(make_plan(), weights={k: v for k, v in model.weights.items() if k != "norm"})
    with pytest.raises(EngineError, match=r"k\.0"):
        create(make_plan(), k_caches=[model.k.astype(np.float16)])


def test_a_forked_child_is_told_to_load_the_engine_itself(plan: NativePlan) -> None:
    plan.run(make_batch([(5, 5)]))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            plan.run(make_batch([(5, 5)]))
            os.write(write, b"ran")
        except ValueError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"forked" in os.read(read, 1000)


def test_several_plans_and_closing_twice(model: Model) -> None:
    plans = [
        NativePlan(make_plan(), Model().weights, [m.k], [m.v], threads=2) for m in (Model(), Model(), Model())
    ]
    batch = make_batch([(5, 5), (9, 9)])
    results = [p.run(batch)[0].copy() for p in plans]
    for p in plans:
        p.close()
        p.close()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_steps_with_random_thread_counts(model: Model) -> None:
    """No lost wake-up, no stale claim: thousands of small steps give the same bits."""
    batch = make_batch([(5, 5), (1, 9), (3, 3)])
    expected = None
    for threads in (1, 2, 3, 5, 8, 2, 16):
        plan = NativePlan(make_plan(), model.weights, [model.k], [model.v], threads=threads)
        for _ in range(300 if threads < 5 else 30):
            logits, _ = plan.run(batch)
            expected = logits.copy() if expected is None else expected
            np.testing.assert_array_equal(logits, expected)
        plan.close()


def test_the_compiler_knows_the_levels_of_the_library() -> None:
    assert set(cpu_levels.INCLUDES) == set(native.level_names())
    assert all(level in included for level, included in cpu_levels.INCLUDES.items())
