"""Recipes and what is refused: every field is either used or refused with what would fit."""

from __future__ import annotations

import msgspec
import pytest

from pelton.errors import ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.quant.config import (
    NONE,
    ROUNDINGS,
    SCALINGS,
    WEIGHT_TYPES,
    Calibration,
    QuantConfig,
    activation_types,
    roundings,
    scalings,
    smaller_group,
)
from pelton.quant.recipes import RECIPES, recipe, with_fields

INT8, FP8 = ActivationQuant("int8"), ActivationQuant("fp8")


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_can_be_done_and_stored(name: str) -> None:
    config = recipe(name)
    config.check()
    assert config.name == name
    assert msgspec.json.decode(msgspec.json.encode(config), type=QuantConfig) == config


def test_the_table_of_combinations_is_what_is_checked() -> None:
    for quant in WEIGHT_TYPES:
        for rounding in ROUNDINGS:
            for scaling in SCALINGS:
                for a in (None, INT8, FP8):
                    fits = rounding in roundings(quant) and scaling in scalings(quant)
                    fits &= a is None or a.dtype in activation_types(quant)
                    fits &= scaling != "smoothquant" or a is not None
                    config = QuantConfig(weights=quant, rounding=rounding, scaling=scaling, activations=a)
                    try:
                        config.check()
                    except ConfigError:
                        assert not fits, (quant, rounding, scaling, a)
                    else:
                        assert fits, (quant, rounding, scaling, a)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "int5_g128"}, r"'int5_g128' \(known: int2_g32, "),
        ({"overrides": {"lm_head": "int9"}}, "'int9'"),
        ({"weights": NONE}, "cannot be quantised to 'none'"),
        (
            {"weights": "q4_k", "rounding": "gptq"},
            r"gptq does not make q4_k .*: nearest; gptq makes: int2",
        ),
        ({"weights": "nvfp4", "scaling": "smoothquant"}, r"smoothquant does not make nvfp4 .*none, awq"),
        ({"scaling": "smoothquant"}, "smoothquant is for quantised activations"),
        ({"per_tensor": True}, "per_tensor is for int8_row and fp8_row weights, not for rtn int4_g128"),
        ({"clip": True, "rounding": "gptq"}, "clip is for integer groups rounded to nearest"),
        ({"clip": True, "weights": "nf4_g64"}, "clip is for integer groups"),
        ({"double_quantization": True}, "double_quantization is for nf4_g64"),
        ({"progressive": True}, r"progressive is for int4 groups .* \(W4A8\)"),
        ({"weights": "fp8_row", "activations": INT8}, r"int8 activations .* \(for fp8_row: fp8\)"),
        ({"weights": "nf4_g64", "activations": INT8}, r"\(for nf4_g64: none\)"),
        ({"activations": ActivationQuant("int8", scale=-1.0)}, "set per to tensor"),
        ({"activations": ActivationQuant("int8", outliers=6.0)}, r"outliers .* \(LLM.int8\)"),
        ({"alpha": 1.5}, "alpha must be between 0 and 1, not 1.5"),
        ({"damping": 0.0}, "damping must be between 0 and 1"),
        (
            {"alpha": 0.5},
            "alpha is for awq and smoothquant scaling, not for rtn int4_g128 sym.*; leave it out",
        ),
        ({"damping": 0.1}, "damping is for gptq, not for rtn"),
        ({"act_order": False}, "act_order is for gptq, not for rtn"),
        ({"calibration": Calibration(seed=-1)}, "seed must not be negative"),
        ({"calibration": Calibration(length=1)}, "at least 2 tokens, not 32 of 1"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_fields(QuantConfig(), **fields)


def test_an_unknown_recipe_is_refused_with_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'gptq-int44'; did you mean gptq-int4\?"):
        recipe("gptq-int44")
    with pytest.raises(ConfigError, match="there are: int8, int4"):
        recipe("zzz")


def test_which_modules_get_which_type() -> None:
    config = QuantConfig(
        ignore=("*.layers.0.*",),
        overrides={"*.layers.1.mlp.*": "int8_g128", "*.down_proj": NONE, "lm_head": "int8_row"},
    )
    assert config.type_of("model.layers.2.mlp.up_proj") == "int4_g128"
    assert config.type_of("model.layers.2.mlp.down_proj") == NONE
    assert config.type_of("model.layers.1.mlp.down_proj") == "int8_g128", "the first that fits"
    assert config.type_of("model.layers.0.mlp.up_proj") == NONE
    assert config.type_of("lm_head", outside=True) == "int8_row"
    assert config.type_of("model.embed_tokens", outside=True) == NONE
    assert QuantConfig(modules=("*.mlp.*",)).type_of("model.layers.2.self_attn.q_proj") == NONE


def test_calibration_is_needed_where_activations_matter() -> None:
    needed = {name for name, config in RECIPES.items() if config.calibrated}
    assert {"gptq-int4", "awq-int4", "smoothquant", "fp8-static", "w4a8"} <= needed
    assert not needed & {"int8", "int4", "nf4", "fp8", "fp8-tensor", "fp8-block", "w8a8", "llm-int8"}
    assert RECIPES["awq-gptq-int4"].algorithm == "awq+gptq" and RECIPES["int4"].algorithm == "rtn"


@pytest.mark.parametrize(
    ("quant", "columns", "expected"),
    [
        ("int4_g128", 256, "int4_g128"),
        ("int4_g128", 576, "int4_g64"),
        ("int4_g128", 96, "int4_g32"),
        ("int4_g128", 40, NONE),
        ("int4_g32", 48, NONE),
        ("fp8_g128", 576, "fp8_row"),
        ("int8_row", 7, "int8_row"),
        ("nf4_g64", 96, NONE),
        ("q4_k", 576, "q5_0"),
        ("q4_k", 40, NONE),
    ],
)
def test_groups_that_do_not_fit_get_smaller(quant: str, columns: int, expected: str) -> None:
    assert smaller_group(quant, columns) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": 4}, "^weights must be text, not 4$"),
        ({"rounding": "GPTQ"}, "^rounding must be 'nearest' or 'gptq', not 'GPTQ'$"),
        ({"kv": "int4"}, "^kv must be 'int8' or 'fp8' or None, not 'int4'$"),
        ({"symmetric": None}, "^symmetric must be True or False, not None$"),
        ({"alpha": True, "scaling": "awq"}, "^alpha must be a number or None, not True$"),
        ({"ignore": "*.q_proj"}, "^ignore must be a tuple of texts, not"),
        ({"overrides": {"*.q_proj": 4}}, "^overrides must be a dict of texts, not"),
        ({"calibration": {"sequences": 4}}, "^calibration must be of type Calibration, not"),
        (
            {"calibration": Calibration(sequences=2.5)},
            "^calibration.sequences must be a whole number, not 2.5$",
        ),  # type: ignore[arg-type]
        ({"activations": "int8"}, "^activations must be of type ActivationQuant or None, not 'int8'$"),
        (
            {"activations": ActivationQuant("int8", "row")},
            "^activations.per must be 'token' or 'tensor', not",
        ),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_values_of_other_types_are_refused_by_their_field(fields: dict[str, object], message: str) -> None:
    """Structs check nothing when they are made, and users make them."""
    with pytest.raises(ConfigError, match=message):
        QuantConfig(**fields).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "quant",
    [
        ActivationQuant("int8", group=-3),
        ActivationQuant("int8", outliers=-1.0),
        ActivationQuant("int8", outliers=float("nan")),
        ActivationQuant("int8", "tensor", scale=float("inf")),
        ActivationQuant("int8", "tensor", group=32),
    ],
    ids=str,
)
def test_quantised_inputs_that_cannot_be(quant: ActivationQuant) -> None:
    with pytest.raises(
        ConfigError, match=r"activations have a finite scale|a group of columns is of a token's"
    ):
        QuantConfig(weights="int8_row", activations=quant).check()


def test_more_calibration_than_anyone_means() -> None:
    with pytest.raises(ConfigError, match="sequences of calibration are beyond 100000; use less"):
        QuantConfig(rounding="gptq", calibration=Calibration(sequences=10**12)).check()
