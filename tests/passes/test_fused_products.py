"""A product with the residual it is added to or the norm before it as one op; where that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pelton import nn
from pelton.builder.tactics import supporting
from pelton.builder.trace import trace
from pelton.kernels.tactic import NodeSpec, TensorSpec, all_tactics
from pelton.nn import functional as F
from pelton.passes import PASSES, gemm_residual, norm_gemm, run_graph_passes, run_model_passes
from tests.ir.graph_forward import graph_forward
from tests.models import zoo
from tests.models.oracle import load_ours, read_from, relative_error, texts
from tests.models.paged import PagedRunner, run_packed
from tests.passes.support import ANY_KERNEL, FLOAT32, GPU_OPS, Net, by_name, check_same, create, ops, traced


def added(swap: bool = False, bias: bool = False, shared: bool = False) -> Net:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x = self.embed(ids)
        y = self.out(F.softcap(x, 3.0))
        total = y + x if swap else x + y
        return total + F.softcap(y, 1.0) if shared else total

    return Net(body, out=nn.Linear(32, 32, bias=bias))


def normed(readers: int = 1, heads: int = 0) -> Net:
    def body(self: Any, ids: Any, positions: Any) -> Any:
        x = self.embed(ids)
        y = self.norm(x.view(-1, heads, 32 // heads)).view(-1, 32) if heads else self.norm(x)
        z = self.out(y)
        return z + y if readers > 1 else z

    return Net(body, norm=nn.RMSNorm(32 // (heads or 1), eps=1e-5), out=nn.Linear(32, 32))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_and_its_residual_are_one_call(swap: bool, bias: bool) -> None:
    net = added(swap, bias)
    graph = traced(net)
    report = gemm_residual.run(graph, ANY_KERNEL)
    assert (report.matched, report.changed) == (1, 1)
    assert ops(graph) == ["embedding", "softcap", "linear_add", "take_rows"]
    check_same(net, graph, tolerance=1e-6)


def test_a_product_that_something_else_reads_stays() -> None:
    graph = traced(added(shared=True))
    report = gemm_residual.run(graph, ANY_KERNEL)
    assert report.changed == 0
    assert ("add", "linear is read elsewhere too") in report.skipped


def test_a_norm_is_part_of_the_product_that_reads_it() -> None:
    net = normed()
    graph = traced(net)
    report = norm_gemm.run(graph, ANY_KERNEL)
    assert (report.matched, report.changed) == (1, 1)
    assert ops(graph) == ["embedding", "norm_linear", "take_rows"]
    check_same(net, graph, tolerance=1e-6)


def test_a_norm_with_several_readers_stays() -> None:
    graph = traced(normed(readers=2))
    assert norm_gemm.run(graph, ANY_KERNEL).skipped == (("linear", "rms_norm is read elsewhere too"),)


def test_a_norm_of_heads_stays() -> None:
    graph = traced(normed(heads=2))
    assert norm_gemm.run(graph, ANY_KERNEL).changed == 0


@pytest.mark.parametrize("make", [zoo.llama, zoo.qwen2, zoo.gemma2])
def test_a_layer_of_a_model_is_as_few_calls_as_can_be(make: Any) -> None:
    hf = make()
    model = create(hf)
    run_model_passes(PASSES, model, ANY_KERNEL)
    graph = trace(model, max_seq_len=64, block_size=4)
    reports = by_name(run_graph_passes(PASSES, graph, ANY_KERNEL))
    if make is zoo.gemma2:  # its norms stand behind products too: what is added is no product
        assert reports["gemm_residual"].changed == 0
    else:
        assert reports["gemm_residual"].changed == 2 * model.num_layers
        # The first norm, two a layer, the last: each is read by one product.
        assert reports["norm_gemm"].changed == 2 * model.num_layers + 1
        assert not {"rms_norm", "add_rms_norm", "aten.add.Tensor"} & set(ops(graph))


def test_targets_without_such_kernels_keep_the_parts() -> None:
    model = create(zoo.llama())
    run_model_passes(PASSES, model, FLOAT32)
    graph = trace(model, max_seq_len=64, block_size=4)
    run_graph_passes(PASSES, graph, FLOAT32)
    assert not set(GPU_OPS) & set(ops(graph))
    assert "add_rms_norm" in ops(graph)


def test_cpus_have_no_such_kernels() -> None:
    assert not [t.name for t in all_tactics().values() if t.op in GPU_OPS and t.device == "cpu"]


def test_deterministic_engines_have_a_kernel_for_each() -> None:
    invariant = {n: t for n, t in all_tactics().items() if t.device == "cuda" and t.batch_invariant}
    x, w, g = (TensorSpec(dtype="bfloat16", shape=s) for s in (("T", 64), (128, 64), (64,)))
    r = TensorSpec(dtype="bfloat16", shape=("T", 128))
    for op, inputs, attrs in (
        ("linear_add", (x, w, None, r), {}),
        ("norm_linear", (x, w, None, g), {"eps": 1e-5}),
        ("norm_linear_gated", (x, w, None, g), {"eps": 1e-5, "kind": "silu"}),
    ):
        for sm in (80, 90):
            known = {n: t for n, t in invariant.items() if t.sm in (0, sm)}
            found = supporting(NodeSpec(op=op, inputs=inputs, attrs=attrs), known)
            assert found[-1].name == f"cuda.{op}.invariant"
            # Steps of all sizes have tactics of one kind.
            kinds = {t.name.rpartition(".")[2].rstrip("0123456789") for t in found if t.takes(1)}
            assert kinds == {"invariant"} | ({"hopper_invariant"} if sm == 90 else set())
            assert {t.sm for t in found if t.takes(1 << 20)} == ({0, 90} if sm == 90 else {0})


@pytest.mark.parametrize("make", [zoo.llama, zoo.qwen2])
def test_fusing_changes_no_logits(make: Any) -> None:
    hf = make()
    found = []
    for context in (ANY_KERNEL, FLOAT32):
        model = load_ours(hf)
        graph = trace(model, max_seq_len=64, block_size=4)
        run_graph_passes(PASSES, graph, context)
        assert ("linear_add" in ops(graph)) == (context is ANY_KERNEL)
        forward = graph_forward(graph, model, read_from(hf.state_dict()))
        found.append(torch.cat(run_packed(PagedRunner(model, forward=forward), texts((14, 9)))))
    assert relative_error(found[0], found[1]) < 1e-5
