"""Perplexity, KL and size of models by recipe: the table of docs/quantisation.md.

    python benchmarks/quantisation.py MODEL... [--recipes int4 gptq-int4 ...] [--tokens 4096] [--print]

Writes benchmarks/results/quantisation.json, a row as soon as it is measured; rows of other recipes and
models stay, so it may be run for some recipes at a time (all of them take a core hours). GGUF files are
dequantised first. Calibration and measured text: the two halves of Python's documentation topics.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

RESULTS = Path(__file__).parent / "results" / "quantisation.json"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--recipes", nargs="+", help="default: all but those of KV caches")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--print", action="store_true", help="only print the table of what was measured")
    given = parser.parse_args()
    if not given.print:
        for model in given.models:
            _measure(model, given)
    print(table())


def _measure(model: Path, given: argparse.Namespace) -> None:
    import torch

    from pelton.builder.sweep import sweep
    from pelton.models.checkpoint import open_checkpoint
    from pelton.quant.recipes import RECIPES as ALL
    from pelton.quant.recipes import recipe

    torch.set_num_threads(1)
    configs = []
    # Caches are float32 here: recipes that differ in them have the rows of their weights.
    for name in given.recipes or [name for name, config in ALL.items() if config.kv is None]:
        config = recipe(name)
        calibration = msgspec.structs.replace(config.calibration, sequences=given.sequences)
        configs.append(msgspec.structs.replace(config, calibration=calibration))
    checkpoint = open_checkpoint(model)
    rows = sweep(
        checkpoint, configs, tokens=given.tokens, window=given.window, note=lambda text: print("  " + text)
    )
    for row in rows:
        print(f"{row.recipe:20} {row.bits:6.3f} {row.perplexity:9.4f} {row.kl:9.5f}", flush=True)
        record = load()
        model_rows = record.setdefault(checkpoint.name, {})
        model_rows[row.recipe] = model_rows.get(row.recipe, {}) | {
            **msgspec.to_builtins(row),
            "window": given.window,
            "calibration_tokens": given.sequences * 512 if ALL[row.recipe].calibrated else 0,
        }
        order = {name: i for i, name in enumerate(ALL)}
        record[checkpoint.name] = dict(sorted(model_rows.items(), key=lambda item: order[item[0]]))
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def load() -> dict[str, dict[str, Any]]:
    """What was measured: model -> recipe -> row."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table() -> str:
    """Every measured row, in Markdown."""
    lines = [
        "| model | recipe | bits | MB | perplexity | KL | same top token | decode beside llama.cpp |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, rows in load().items():
        first = next(iter(rows.values()))
        lines.append(f"| {model} | unquantised | | | {first['perplexity_unquantised']:.2f} | | | |")
        for row in rows.values():
            ratio = f"{row['decode_ratio']:.2f} of {row['decode_against']}" if "decode_ratio" in row else "-"
            lines.append(
                f"| | `{row['recipe']}` | {row['bits']:.2f} | {row['nbytes'] / 1e6:.1f} | "
                f"{_beside(row['perplexity'], row['perplexity_unquantised'])} | {row['kl']:.4f} | "
                f"{row['top1']:.1%} | {ratio} |"
            )
    return "\n".join(lines)


def _beside(found: float, unquantised: float) -> str:
    """A perplexity, and how much more it is than another: nothing of a model is left beyond a hundredfold."""
    times = found / unquantised
    return f"{found:.2f} ({times - 1:+.1%})" if times < 100 else f"{found:.0e}"


if __name__ == "__main__":
    main()
