"""The pass that makes channels of keys alike: the network's function stays, the keys become even."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pelton import nn
from pelton.passes import PASSES, fuse_qkv, run_model_passes, smooth_keys
from tests.models import zoo
from tests.models.oracle import load_ours, read_from, relative_error, texts
from tests.models.paged import PagedRunner, run_packed
from tests.passes.support import FLOAT32, by_name, create

PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
ARCHITECTURES: dict[str, Any] = {
    "rows": zoo.llama,
    "rows and biases": zoo.qwen2,
    "half of a head rotates": lambda: zoo.llama(rope_parameters=PARTIAL),
    "norms of heads": zoo.qwen3,
    "norms with an offset": zoo.gemma3,
}


def uneven(hf: Any) -> Any:
    """With channels of keys that are a thousand times as large as others, in pairs that rotate and alone."""
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith(("k_proj.weight", "k_proj.bias", "k_norm.weight")):
                parameter[3::7] *= 300
                parameter[4::7] /= 10
    return hf


def run_keys(model: nn.CausalLM) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and of each layer the largest key of each channel (KV heads, head_dim)."""
    runner = PagedRunner(model)
    logits = torch.cat(run_packed(runner, texts((14, 9))))
    return logits, [cache.nan_to_num(0.0).abs().amax((0, 2)) for cache in runner.k_caches]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_become_even_and_logits_stay(name: str) -> None:
    hf = uneven(ARCHITECTURES[name]())
    want, sizes = run_keys(load_ours(hf))
    model = create(hf)
    context = replace(FLOAT32, key_sizes={layer: size.numpy() for layer, size in enumerate(sizes)})
    reports = by_name(run_model_passes(PASSES, model, context))
    assert (reports["smooth_keys"].changed, reports["smooth_keys"].skipped) == (model.num_layers, ())
    assert reports["fuse_qkv"].changed == model.num_layers
    nn.load_weights(model, read_from(hf.state_dict()))
    got, smoothed = run_keys(model)
    assert relative_error(got, want) < 1e-4
    attentions = [m for m in model.modules() if isinstance(m, nn.Attention)]
    for before, after, attention in zip(sizes, smoothed, attentions, strict=True):
        np.testing.assert_allclose(after, before.numpy() / attention.key_factors, rtol=1e-3, atol=1e-6)
        spread_before, spread_after = (k.amax(1) / k.median(1).values for k in (before, after))
        # Heads that share a norm are each other's compromise.
        assert spread_after.max() < min(8, spread_before.max() / 5)


def test_rows_are_scaled_by_powers_of_two() -> None:
    hf = uneven(zoo.llama())
    sizes = run_keys(load_ours(hf))[1]
    model = create(hf)
    smooth_keys.run(model, replace(FLOAT32, key_sizes={i: s.numpy() for i, s in enumerate(sizes)}))
    attention = next(m for m in model.modules() if isinstance(m, nn.Attention))
    factors = np.array(attention.q_proj.given_recipes["weight"].factors)
    assert (np.frexp(factors)[0] == 0.5).all()
    assert len(set(factors)) > 2
    keys = np.array(attention.k_proj.given_recipes["weight"].factors).reshape(attention.num_kv_heads, 1, -1)
    assert (factors.reshape(attention.num_kv_heads, -1, attention.head_dim) * keys == 1).all()


@pytest.mark.parametrize(
    ("make", "context", "why"),
    [
        (zoo.phi3, FLOAT32, "q, k and v are packed in the checkpoint"),
        (zoo.llama, replace(FLOAT32, quant_of=lambda _: "q8_0"), "q_proj is stored as q8_0"),
        (zoo.llama, replace(FLOAT32, stored_quant=lambda *_: "float16"), "q_proj is stored as float16"),
    ],
)
def test_what_cannot_be_scaled_without_loss_is_left_alone(make: Any, context: Any, why: str) -> None:
    model = create(make())
    sizes = {i: np.ones((kv.num_kv_heads, kv.head_dim), np.float32) for i, kv in enumerate(model.layer_kv())}
    report = smooth_keys.run(model, replace(context, key_sizes=sizes))
    assert report.changed == 0
    assert {said for _, said in report.skipped} == {why}
    assert fuse_qkv.run(model, FLOAT32).matched


def test_without_measured_keys_nothing_happens() -> None:
    report = smooth_keys.run(create(zoo.llama()), FLOAT32)
    assert (report.matched, report.note) == (0, "no keys of 8 bits were measured")
