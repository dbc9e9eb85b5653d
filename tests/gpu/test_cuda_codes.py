"""Codes of a static scale as edges, on a GPU: they are what a launch between two kernels would have made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.ir.blocks import dequantize
from pelton.ir.op import Sample, get_op
from pelton.ir.ops import paged_attention, rope_paged_attention
from pelton.ir.static_codes import LARGEST, to_codes
from pelton.ir.tensors import HostTensor
from pelton.kernels.conformance import compare, host_tensor, node_spec, split_arguments
from pelton.kernels.conformance_cuda import Case, call_of
from pelton.kernels.gpu.driver import Device
from pelton.kernels.tactic import all_tactics

pytestmark = pytest.mark.gpu

#: Tokens of steps; results and columns: of narrow matrices blocks share columns.
STEPS, N, K = (1, 13, 40, 130, 700), 2304, 1024
#: Up to so many a product takes an input that is no codes as it is.
FEW = 16
#: Two kernels of one source may round a sum apart.
RARE = 1e-3
#: Powers of two, so that codes times the scale are bfloat16; of what is left, some is out of reach.
SCALES = {"fp8": (2.0**-7, 2.0**-8), "int8": (2.0**-5, 2.0**-6)}
MAKERS = ("norm_linear_gated",)
ATTENTION = ("paged_attention", "rope_paged_attention")
#: (Queries, keys) of sequences: prefills, decodes of few and of many.
BATCHES = ([(70, 200), (1, 300), (40, 40)], [(1, 9), (1, 300)], [(1, 8 + n) for n in range(40)])


@dataclass(frozen=True)
class Pair:
    """The same call without and with codes."""

    plain: Case
    coded: Case
    codes: str
    tokens: int


def pairs(sm: int) -> Iterator[Pair]:
    for codes, invariant, tokens in itertools.product(SCALES, (False, True), STEPS):
        if codes == "int8" and (invariant or tokens not in STEPS[1:3]):
            continue
        g = torch.Generator().manual_seed(tokens)
        x_scale, y_scale = SCALES[codes]
        x = torch.randn(tokens, K, generator=g).bfloat16()
        q = to_codes(x, x_scale, codes)
        residual, norm = torch.randn(tokens, N, generator=g).bfloat16(), torch.rand(K, generator=g) + 0.5
        for op in ("linear_add", *MAKERS):
            packed = host_tensor(
                torch.randn(N * (1 + (op in MAKERS)), K, generator=g) * K**-0.5, f"{codes}_row"
            )
            before = (torch.from_numpy(dequantize(packed)), None)
            if op in MAKERS:
                rest: tuple[object, ...] = ("silu", *((norm, 1e-5) if "norm" in op else ()), x_scale, codes)
                both = (x, *before, *rest), (x, *before, *rest, y_scale, codes)
            else:
                rest = (residual, x_scale, codes)
                values = (q.float() * x_scale).bfloat16()
                both = (values, *before, *rest), (q, *before, *rest)
            yield pair(op, both, f"{codes} {invariant} {tokens}", sm, codes, invariant, {1: packed})


def pair(
    op: str,
    both: tuple[tuple[object, ...], tuple[object, ...]],
    name: str,
    sm: int,
    codes: str,
    invariant: bool,
    packed: dict[int, HostTensor],
    decode: bool = False,
) -> Pair:
    found = []
    for args, form in zip(both, ("plain", "coded"), strict=True):
        sample = Sample(
            args=args, name=f"{name} {form}", quant={i: weight.quant for i, weight in packed.items()}
        )
        spec = node_spec(get_op(op), sample, codes)
        tokens = spec.inputs[0].shape[0] if spec.inputs[0] else 0
        known = (t for t in all_tactics().values() if t.op == op and t.device == "cuda" and t.sm in (0, sm))
        fitting = [t for t in known if t.takes(int(tokens)) and t.supports(spec)]
        tactic = min((t for t in fitting if t.batch_invariant or not invariant), key=lambda t: t.order)
        found.append(
            Case(get_op(op), sample, tactic, "bfloat16", packed, decode and tactic.decode is not None)
        )
    assert found[0].tactic is found[1].tactic
    return Pair(*found, codes, int(tokens))


def attention_pairs(sm: int) -> Iterator[Pair]:
    """Of bfloat16, in steps of each kind; caches of 8 bits, too, where every sequence has one token."""
    for codes, invariant, lens in itertools.product(SCALES, (False, True), BATCHES):
        if codes == "int8" and (invariant or lens is BATCHES[0]):
            continue
        decode = all(queries == 1 for queries, _ in lens)
        caches = [torch.bfloat16, *([torch.float8_e4m3fn] if decode and not invariant else [])]
        for op, cache in itertools.product(ATTENTION, caches):
            make = (rope_paged_attention if "rope" in op else paged_attention).make_sample
            g = torch.Generator().manual_seed(0)
            plain = make(g, lens=lens, heads=(8, 2), dim=128, block_size=16, dtype=cache).args
            kept = [i for i, a in enumerate(get_op(op).torch_op._schema.arguments) if a.name in FLOAT32]
            floats = {
                i: a for i, a in enumerate(plain) if isinstance(a, torch.Tensor) and a.dtype == torch.float32
            }
            args = tuple(bfloat16(a) if i in floats and i not in kept else a for i, a in enumerate(plain))
            given = {"y_scale": 2.0**-8 if codes == "fp8" else 2.0**-6, "y_codes": codes}
            names = [a.name for a in get_op(op).torch_op._schema.arguments]
            both = args, (*args, *(given.get(name) for name in names[len(args) :]))
            yield pair(op, both, f"{codes} {invariant} {len(lens)} {cache}", sm, codes, invariant, {}, decode)


#: Arguments that stay so.
FLOAT32 = ("cos_sin", "k_scale", "v_scale")


def bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    """With its strides."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.zeros(span, dtype=torch.bfloat16).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeviceRunner, list[Pair]]]:
    sm = Device().sm
    if sm != 90:
        pytest.skip("kernels of codes are for sm_90")
    found = [*pairs(sm), *attention_pairs(sm)]
    folder: Path = tmp_path_factory.mktemp("codes") / "all"
    assert not compile_cases([case for pair in found for case in (pair.plain, pair.coded)], sm, folder)
    with DeviceRunner(folder) as runner:
        yield runner, found


def results(
    compiled: tuple[DeviceRunner, list[Pair]], ops: tuple[str, ...]
) -> Iterator[tuple[Pair, list[torch.Tensor]]]:
    runner, found = compiled
    for pair in found:
        if pair.plain.op.name in ops:
            done = [runner(case, call_of(case)) for case in (pair.plain, pair.coded)]
            assert all(result.within and result.counters_zero for result in done), str(pair.coded)
            yield pair, [result.outputs[0] for result in done]


def test_codes_that_are_left_are_of_what_would_be_left_without(
    compiled: tuple[DeviceRunner, list[Pair]],
) -> None:
    for pair, (elements, codes) in results(compiled, (*MAKERS, *ATTENTION)):
        scale = split_arguments(pair.coded.op, pair.coded.sample.args)[1]["y_scale"]
        want = to_codes(elements, float(scale or 0), pair.codes)
        if "split" in pair.coded.tactic.name:  # whose parts are joined to codes at once
            compare(codes, want, 4e-2, str(pair.coded))
        else:
            assert differing(codes, want) < RARE, str(pair.coded)
        if pair.plain.op.name in MAKERS and pair.tokens > 1:
            assert (codes.float().abs() == LARGEST[pair.codes]).sum() > 1, str(pair.coded)


def test_codes_that_are_read_are_of_what_they_stand_for(compiled: tuple[DeviceRunner, list[Pair]]) -> None:
    for pair, (rounded, read) in results(compiled, ("linear_add",)):
        if pair.tokens > FEW or pair.coded.tactic.batch_invariant:
            assert differing(rounded, read) < RARE, str(pair.coded)
        compare(read, pair.coded.op.reference(*pair.coded.sample.args), 6e-3, str(pair.coded))


def differing(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of different elements."""
    return float((a.float() != b.float()).float().mean())
