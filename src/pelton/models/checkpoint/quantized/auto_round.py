"""AutoRound checkpoints (quant_method auto-round): GPTQ's or AWQ's layout under another config.

``packing_format`` says which: auto_round:auto_gptq stores zero points as GPTQ's version 1 does, auto_round
and auto_round:gptqmodel as they are, auto_round:auto_awq is AWQ's gemm. ``extra_config`` has settings of
modules of their own. Cheng et al. 2023 (SignRound).
"""

from __future__ import annotations

from collections.abc import Iterator

from pelton.models.checkpoint.quantized.awq import awq_weights
from pelton.models.checkpoint.quantized.gptq import gptq_weights
from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import StoredTensors
from pelton.models.checkpoint.quantized.weight import QuantizedWeight

PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "gemm",
}


def auto_round_weights(settings: Settings, stored: StoredTensors) -> Iterator[QuantizedWeight]:
    """Every weight that is stored as a qweight. Raises ``CheckpointError``."""
    packing = settings.choice("packing_format", known=PACKINGS, default="auto_round")
    settings.choice("data_type", known=("int",), default="int")
    settings.integer("act_bits", default=16, among=(16, 32))
    layout = PACKINGS[packing]
    values = {**settings.values, "checkpoint_format": layout, "version": layout, "desc_act": False}
    if layout == "gemm":
        yield from awq_weights(Settings(settings.where, values), stored)
        return
    # Names, or patterns, of modules.
    values["dynamic"] = {f"+:{key}$": own for key, own in settings.table("extra_config").items()}
    yield from gptq_weights(Settings(settings.where, values), stored)
