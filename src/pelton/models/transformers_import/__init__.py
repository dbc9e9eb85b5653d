"""Any causal language model of ``transformers`` whose attention goes through its attention interface.

The module is made from its configuration without weights (``skeleton``), run once on meta tensors
(``capture``), rewritten to packed tokens and paged attention (``pack``), and its norms, rotations and
activations are found (``match_*``). What is left are ATen ops, which tracing lowers to generic ones as
in any model. The result is a ``CausalLM`` like those in ``models/``: every graph pass, tactic and check
applies to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pelton.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from pelton.models.transformers_import.model import ImportedCausalLM
    from pelton.models.transformers_import.packed import PackedGraph


def import_model(hf_config: Mapping[str, Any], *, max_seq_len: int) -> ImportedCausalLM:
    """The model of a Hugging Face configuration, on the meta device.

    ``max_seq_len`` as in ``create_model``. Raises ``CheckpointError`` with the reason where the model
    cannot be imported, ``transformers`` being missing among them. Code in a checkpoint is never run.
    """
    from pelton.models.transformers_import import capture, pack, skeleton
    from pelton.models.transformers_import.fold_weights import fold_weights
    from pelton.models.transformers_import.match_activations import match_activations
    from pelton.models.transformers_import.match_norms import match_norms
    from pelton.models.transformers_import.match_rope import match_rope
    from pelton.models.transformers_import.match_splits import match_splits
    from pelton.models.transformers_import.model import ImportedCausalLM
    from pelton.models.transformers_import.packed import Edit
    from pelton.models.transformers_import.unpair_rope import unpair_rope

    config = skeleton.load_config(hf_config)
    import transformers

    module = skeleton.make(config, max_seq_len)
    name = type(module).__name__
    captured = capture.capture(module, config.num_hidden_layers, max_seq_len)
    layers = pack.layer_kv(captured)
    groups = list(dict.fromkeys(layers))
    stored = skeleton.checkpoint_names(module)
    packed = pack.pack(captured, name, [groups.index(kv) for kv in layers], stored)
    edit = Edit(packed)
    for find in (fold_weights, match_norms, match_rope, unpair_rope, match_activations, match_splits):
        find(edit)
    packed.clean()
    _check_ops(packed, name)
    _check_positions(packed, name, max_seq_len)
    saved = module.state_dict(keep_vars=True)
    model = ImportedCausalLM(packed, config=config, layers=layers, saved=saved, stored=stored)
    model.ignored_options = skeleton.unknown_options(config, hf_config)
    model.unused_tensors = skeleton.unused_tensors(module)
    model.origin = f"transformers {transformers.__version__}"
    return model


def _check_ops(packed: PackedGraph, name: str) -> None:
    """Refuse the ops that only patterns can take."""
    aten: Any = torch.ops.aten
    for target in (aten.cat.default, aten.repeat_interleave.self_int, aten.to.dtype):
        left = next((n for n in packed.graph.nodes if n.target is target), None)
        if left is not None:
            raise CheckpointError(
                f"{name} cannot be imported: {target} in {left.meta['where'] or 'the model'} is not an op "
                "that an engine can run"
            )


def _check_positions(packed: PackedGraph, name: str, max_seq_len: int) -> None:
    """Refuse lengths beyond a table of learned positions."""
    for node in packed.graph.nodes:
        if node.target is torch.ops.pelton.embedding.default and node.args[0].target == "positions":
            rows = node.args[1].meta["val"].shape[0]
            if rows < max_seq_len:
                raise ConfigError(
                    f"max_seq_len {max_seq_len} exceeds the {rows} positions this {name} has learned; "
                    f"build with --max-seq-len {rows} or less"
                )


def reference_module(config: Any, max_seq_len: int) -> Any:
    """The module of ``transformers`` with its own attention, parameters on the meta device.

    ``config``: an imported model's.
    """
    from pelton.models.transformers_import import skeleton

    return skeleton.make(config, max_seq_len, "eager")
