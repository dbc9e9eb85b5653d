"""Optimisation profiles: parsed, completed, held to each other, and cut into buckets."""

from __future__ import annotations

from typing import Any

import pytest

from pelton.builder.profiles import buckets, step_limits
from pelton.builder.resolve import CheckpointFacts, resolve
from pelton.engine.config import BuildConfig
from pelton.engine.shapes import STEP_DIMS, DimRange, OptimizationProfile
from pelton.errors import ConfigError
from pelton.models.registry import create_model
from tests.builder.random_checkpoint import TINY_LLAMA

FACTS = CheckpointFacts(max_position_embeddings=2048, matrix_elements={"bfloat16": 1000})


def resolved(*profiles: str, **settings: Any) -> BuildConfig:
    given = tuple(OptimizationProfile.parse(p) for p in profiles) or None
    return resolve(BuildConfig(profiles=given, **settings), FACTS)[0]


def ends(config: BuildConfig) -> list[tuple[int, dict[str, int]]]:
    return [(b.max_tokens, dict(b.dims)) for b in buckets(config)]


def test_the_automatic_profile_covers_every_step_and_is_fastest_at_decoding() -> None:
    config = resolved()
    assert config.profiles is not None
    (profile,) = config.profiles
    assert str(profile) == "T=1:8:512,B=1:8:8,N=1:8:512"
    assert config.opt_num_tokens == 8
    assert ends(config) == [
        (1, {"T": 1, "B": 1, "N": 1}),
        (8, {"T": 8, "B": 8, "N": 8}),
        (64, {"T": 64, "B": 8, "N": 8}),
        (512, {"T": 512, "B": 8, "N": 8}),
    ]


@pytest.mark.parametrize(
    ("batch", "tokens", "expected"),
    [
        (1, 512, [1, 8, 64, 512]),
        (4, 40, [1, 4, 40]),
        (6, 512, [1, 6, 48, 512]),
        (8, 100, [1, 8, 100]),  # 64 would hardly differ from 100
        (256, 8192, [1, 8, 64, 256, 2048, 8192]),
    ],
)
def test_buckets_grow_by_factors_and_end_at_the_batch_size(
    batch: int, tokens: int, expected: list[int]
) -> None:
    config = resolved(max_batch_size=batch, max_num_tokens=tokens, block_size=8)
    assert [b.max_tokens for b in buckets(config)] == expected


def test_opt_num_tokens_is_where_its_bucket_is_timed() -> None:
    found = ends(resolved(opt_num_tokens=300))
    assert found[-1] == (512, {"T": 300, "B": 8, "N": 8})


def test_several_profiles_end_buckets_and_set_the_limits() -> None:
    config = resolved("T=1:1:8,B=1:1:8", "input_ids=9:128:300")
    assert (config.max_num_tokens, config.max_batch_size, config.opt_num_tokens) == (300, 8, 1)
    assert ends(config) == [
        (1, {"T": 1, "B": 1, "N": 1}),
        (8, {"T": 8, "B": 1, "N": 1}),
        (64, {"T": 64, "B": 8, "N": 8}),
        (300, {"T": 128, "B": 8, "N": 8}),
    ]


def test_fewer_logits_rows_need_less_memory() -> None:
    assert step_limits(resolved("T=1:8:512,B=1:8:8,N=1:8:8")) == {"T": 512, "B": 8, "N": 8}


def test_a_resolved_configuration_resolves_to_itself() -> None:
    for config in (resolved(), resolved("T=1:1:8", "T=5:64:256", max_batch_size=4)):
        assert resolve(config, FACTS)[0] == config


@pytest.mark.parametrize(
    ("profiles", "settings", "message"),
    [
        (["input_ids=1:1:8,positions=1:1:16"], {}, r"input_ids and positions share dimension T .*1:1:8 and"),
        (["T=1:8:8,slot_mapping.0=1:1:8"], {}, r"T and slot_mapping\.0 share dimension T"),
        (["seq_lens=1:4:4,block_table.0=1:4:8"], {}, r"seq_lens and block_table\.0 share dimension B"),
        (["S=1:1:8"], {}, r"no dimension or input 'S' of dynamic size: T \(input_ids, positions"),
        (["T=8:1:8"], {}, r"T=8:1:8 must have 1 <= MIN <= OPT <= MAX"),
        (["T=0:1:8"], {}, r"must have 1 <= MIN"),
        (["T=1:8:64,B=1:16:16"], {}, r"more sequences of a step \(block_table, seq_lens\) than tokens"),
        (["T=1:8:64,N=1:8:128"], {}, r"more logits rows of a step \(logits_indices\) than tokens"),
        (["T=1:8:64,B=1:8:8,N=1:4:4"], {}, r"8 sequences \(block_table, seq_lens\) want a row of logits"),
        (["T=1:1:8", "T=16:64:64"], {}, r"no profile covers steps of 9 to 15 tokens \(input_ids"),
        (["T=2:8:64"], {}, r"no profile covers steps of 1 token \("),
        (
            ["T=1:8:64"],
            {"max_num_tokens": 512},
            r"covers steps of 65 to 512 tokens.*or set max_num_tokens 64",
        ),
        (["T=1:8:64"], {"max_num_tokens": 32}, r"a profile has T up to 64, beyond max_num_tokens 32"),
        (["T=1:8:64,B=1:8:8"], {"max_batch_size": 4}, r"a profile has B up to 8, beyond max_batch_size 4"),
        (["T=1:8:64"], {"opt_num_tokens": 7}, r"opt_num_tokens 7 is the optimum of no profile"),
        ([], {"opt_num_tokens": 600}, r"opt_num_tokens 600 is not between 1 and max_num_tokens 512"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_names(
    profiles: list[str], settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(*profiles, **settings)


@pytest.mark.parametrize("text", ["", "T", "T=1", "T=1:2", "T=1:x:8", "=1:1:8", "T=1:1:8,", "T=1:-1:8"])
def test_a_profile_that_cannot_be_read_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not NAME=MIN:OPT:MAX, such as T=1:1:8,B=1:1:8"):
        OptimizationProfile.parse(text)


def test_a_name_stands_once() -> None:
    with pytest.raises(ConfigError, match="names T twice"):
        OptimizationProfile.parse("T=1:1:8,T=1:1:8")
    assert OptimizationProfile.parse("T=1:2:8").dims == {"T": DimRange(1, 2, 8)}


def test_profiles_know_the_inputs_that_models_have() -> None:
    from pelton.builder.trace import trace

    graph = trace(create_model(TINY_LLAMA, max_seq_len=64), max_seq_len=64)
    found: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and graph.input_of(node).kind == "input":
            dim = str(graph.shape(node.meta["val"])[0])
            found.setdefault(dim, set()).add(graph.input_of(node).name.split(".")[0])
    assert found.pop("B+1") == {"cu_seqlens"}
    assert found == {dim: set(inputs) for dim, inputs in STEP_DIMS.items()}


def test_logits_take_memory_for_what_a_step_may_ask_for() -> None:
    """Not for every token of a GPU's large step: 8192 rows of 128256 logits were 4.2 GB."""
    limits = step_limits(resolved(max_batch_size=256, max_num_tokens=8192))
    assert limits == {"T": 8192, "B": 256, "N": 256 + 512}
