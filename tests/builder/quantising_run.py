"""Quantises a random bfloat16 checkpoint and prints the memory that took, as JSON.

Run as a process of its own: ``python -m tests.builder.quantising_run FOLDER CONFIG_JSON RECIPE LENGTH``;
LENGTH is that of each of the four sequences that calibrate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from pelton.builder.peak import PeakMemory, anonymous_bytes
from pelton.builder.write_quantized import quantize
from pelton.quant.config import Calibration
from pelton.quant.recipes import RECIPES, with_fields
from tests.builder.streaming_build import write_checkpoint
from tests.serving.fake_engine import write_tokenizer


def main() -> None:
    torch.set_num_threads(1)
    folder, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    (folder / "model").mkdir()
    write_checkpoint(folder / "model", config)
    write_tokenizer(folder / "model", chat_template=False)
    recipe = RECIPES[sys.argv[3]]
    if recipe.calibrated:
        text = Calibration(sequences=4, length=int(sys.argv[4]))
        # AWQ's exponent is given: a search tries twenty, each in the same memory.
        recipe = with_fields(recipe, calibration=text, alpha=0.5 if recipe.scaling == "awq" else None)
    before = anonymous_bytes()
    with PeakMemory() as peak:
        report = quantize(folder / "model", recipe, folder / "small")
    print(json.dumps({"took": peak.peak - before, "layers": len(report.layers)}))


if __name__ == "__main__":
    main()
