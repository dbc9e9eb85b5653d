"""Perplexity of models that Pelton and the field's own tools quantised, of the same weights and the same
calibration tokens, read by the same evaluator: the table of peers in docs/quantisation.md.

    python benchmarks/quantisation_peers.py MODEL... [--methods rtn gptq awq] [--sequences 32] [--print]

Runs where ``llmcompressor`` and ``gptqmodel`` are installed. The model's dequantised float32 weights are
written as a Hugging Face folder; each tool quantises all linear layers of its decoder layers to 4 bits,
in groups of the largest size that divides their columns, and what it saved is opened by Pelton's readers.
Everything else is the tool's default. Each row goes into benchmarks/results/quantisation-peers.json as soon
as it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "quantisation-peers.json"
#: Ours beside a peer: a method's recipe.
RECIPES = {"rtn": "int4", "rtn-asymmetric": "int4-asymmetric", "gptq": "gptq-int4", "awq": "awq-int4"}
SYMMETRIC = {"rtn": True, "rtn-asymmetric": False, "gptq": True, "awq": False}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--tools", nargs="+", default=["pelton", *TOOLS], choices=["pelton", *TOOLS])
    parser.add_argument("--tokens", type=int, default=8192, help="of text that is measured")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=32, help="of 512 tokens, to calibrate")
    parser.add_argument("--print", action="store_true", help="only print the table of what was measured")
    given = parser.parse_args()
    if not given.print:
        for model in given.models:
            with tempfile.TemporaryDirectory(prefix="pelton-peers-") as scratch:
                _measure(model, given, Path(scratch))
    print(table())


def _measure(path: Path, given: argparse.Namespace, scratch: Path) -> None:
    import torch

    from pelton.builder.calibration import calibration_sequences
    from pelton.builder.evaluation import eager_config, exact_model, perplexity, windows
    from pelton.builder.quantized_view import draft
    from pelton.builder.text import BUILT_IN, built_in, checkpoint_text
    from pelton.models.checkpoint import Checkpoint, open_checkpoint
    from pelton.quant.config import Calibration

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    name = path.name.removesuffix(".gguf")
    base = scratch / "base"
    group = _write_float32(path, base)
    checkpoint = open_checkpoint(base)
    config = eager_config(checkpoint, given.window)
    text = checkpoint_text(checkpoint, built_in(1), config.model.vocab_size, name=BUILT_IN)
    batches = windows(text.head(given.tokens), config, given.window)
    calibration = Calibration(sequences=given.sequences)
    ids = calibration_sequences(calibration, checkpoint, draft(checkpoint))

    def measured(of: Checkpoint) -> float:
        return perplexity(batches, exact_model(of, config, given.window, hold=True).run)

    rows = {"unquantised": {"perplexity": measured(checkpoint), "tokens": given.tokens}}
    _keep(name, rows)
    for method in given.methods:
        for tool in given.tools:
            out = scratch / f"{method}-{tool}"
            started = time.perf_counter()
            if tool == "pelton":
                _pelton(base, out, method, group, calibration)
            elif method in TOOLS[tool]:
                TOOLS[tool][method](base, out, ids, group)
            else:
                continue
            seconds = time.perf_counter() - started
            row = {
                "perplexity": measured(open_checkpoint(out)),
                "group": group,
                "calibration_tokens": int(ids.size),
                "seconds": round(seconds, 1),
                "version": version(tool) if tool != "pelton" else None,
            }
            print(f"{name} {method} {tool}: {row['perplexity']:.4f} after {seconds:.0f} s", flush=True)
            _keep(name, {f"{method} {tool}": row})


def _write_float32(source: Path, out: Path) -> int:
    """The model as a folder of float32 weights; returns the largest group that divides every linear layer."""
    import torch
    import transformers

    from pelton import nn
    from pelton.builder.calibration import decoder_layers
    from pelton.builder.quantized_view import draft
    from pelton.ir.blocks import dequantize
    from pelton.ir.evaluate import evaluate
    from pelton.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(source)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    values = {
        tensor: torch.from_numpy(np.array(dequantize(evaluate(checkpoint.source(tensor), checkpoint.read))))
        for tensor in checkpoint.tensors
    }
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    model.save_pretrained(out)
    checkpoint.write_tokenizer(out)
    _, layers = decoder_layers(draft(checkpoint))
    widths = {m.in_features for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)}
    return next(size for size in (128, 64, 32) if all(width % size == 0 for width in widths))


def _pelton(base: Path, out: Path, method: str, group: int, calibration: Any) -> None:
    from pelton.builder.write_quantized import quantize
    from pelton.quant.recipes import recipe, with_fields

    wanted = recipe(RECIPES[method])
    quantize(base, with_fields(wanted, weights=f"int4_g{group}", calibration=calibration), out)


def _llm_compressor(method: str) -> Callable[[Path, Path, Any, int], None]:
    def run(base: Path, out: Path, ids: Any, group: int) -> None:
        import datasets
        import torch
        import transformers
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier

        if not torch.cuda.is_available():
            # Its AWQ pins memory for copies to a GPU, which fails without one.
            torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[assignment,method-assign]
        arguments = QuantizationArgs(
            num_bits=4, symmetric=SYMMETRIC[method], strategy="group", group_size=group
        )
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=arguments)}
        ignore = ["lm_head"]
        recipe: list[Any]
        if method == "gptq":
            recipe = [GPTQModifier(config_groups=groups, ignore=ignore)]
        else:
            recipe = [QuantizationModifier(config_groups=groups, ignore=ignore)]
            recipe = [AWQModifier()] * (method == "awq") + recipe
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]
        text: dict[str, Any] = {}
        if not method.startswith("rtn"):
            text = {
                "dataset": datasets.Dataset.from_list(rows),
                "max_seq_length": ids.shape[1],
                "num_calibration_samples": len(rows),
                "shuffle_calibration_samples": False,
            }
        oneshot(model=model, recipe=recipe, tokenizer=str(base), **text)
        model.save_pretrained(out, save_compressed=True)
        _copy_tokenizer(base, out)

    return run


def _gptqmodel(method: str) -> Callable[[Path, Path, Any, int], None]:
    def run(base: Path, out: Path, ids: Any, group: int) -> None:
        # It refuses machines of two cores.
        count, os.cpu_count = os.cpu_count, lambda: 8
        import gptqmodel
        import torch

        kind = {"method": "awq", "sym": False} if method == "awq" else {"sym": True}
        config = gptqmodel.QuantizeConfig(bits=4, group_size=group, **kind)
        model = gptqmodel.GPTQModel.load(str(base), config, dtype=torch.float32)
        rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]
        model.quantize(rows, batch_size=1)
        _mend_rope(model.model.config)
        model.save(str(out))
        os.cpu_count = count
        _copy_tokenizer(base, out)

    return run


def _mend_rope(config: Any) -> None:
    """Gemma's rotary parameters by kind of layer, without what GPTQModel added beside them: saving checks."""
    given = getattr(config, "rope_parameters", None)
    if isinstance(given, dict) and any(isinstance(value, dict) for value in given.values()):
        config.rope_parameters = {kind: value for kind, value in given.items() if isinstance(value, dict)}


#: Tool -> method -> what quantises a folder into another with calibration tokens, in groups of a size.
TOOLS: dict[str, dict[str, Callable[[Path, Path, Any, int], None]]] = {
    "llmcompressor": {method: _llm_compressor(method) for method in RECIPES},
    "gptqmodel": {method: _gptqmodel(method) for method in ("gptq", "awq")},
}


def _copy_tokenizer(base: Path, out: Path) -> None:
    for file in base.glob("token*"):
        (out / file.name).write_bytes(file.read_bytes())


def _keep(model: str, rows: dict[str, Any]) -> None:
    record = load()
    record.setdefault(model, {}).update(rows)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def load() -> dict[str, dict[str, Any]]:
    """What was measured: model -> method and tool -> row."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table() -> str:
    """Every measured row, in Markdown."""
    lines = [
        "| model | method | text seen | Pelton | llm-compressor | GPTQModel | Pelton beside the best |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, rows in load().items():
        exact = rows["unquantised"]["perplexity"]
        lines.append(f"| {model} | unquantised | | {exact:.3f} | | | |")
        for method in RECIPES:
            ours = rows.get(f"{method} pelton")
            if ours is None:
                continue
            found = {tool: rows.get(f"{method} {tool}") for tool in TOOLS}
            # What saw other text is no comparison.
            alike = ("group", "calibration_tokens")
            peers = {
                tool: row["perplexity"]
                for tool, row in found.items()
                if row is not None and all(row[field] == ours[field] for field in alike)
            }
            if not peers:
                continue
            tokens = "-" if method.startswith("rtn") else f"{ours['calibration_tokens']} tokens"
            cells = [f"{peers[tool]:.3f}" if tool in peers else "-" for tool in TOOLS]
            more = ours["perplexity"] / min(peers.values()) - 1
            mine = f"{ours['perplexity']:.3f}"
            lines.append(f"| | {method} | {tokens} | {mine} | {' | '.join(cells)} | {more:+.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
