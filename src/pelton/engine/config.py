"""``config.json`` of an engine: what it is and what it was built for. All typed, all read back."""

from __future__ import annotations

from typing import Literal

import msgspec

from pelton.engine.shapes import OptimizationProfile

PassMode = Literal["auto", "force", "off"]


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table: same head count and size, same window."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Sliding window in tokens (a query sees itself and ``window - 1`` before); 0: full."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime must know of the model, whatever its architecture."""

    architecture: str
    """Such as ``LlamaForCausalLM``."""
    name: str
    """The checkpoint's (file's or folder's), shown to users and served as model id."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_parameters: int
    max_position_embeddings: int
    kv_groups: tuple[KVGroup, ...]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """All ids that end a generation (config.json and generation_config.json together)."""
    generation: dict[str, float | int] = {}
    """The checkpoint's recommended sampling defaults: temperature, top_k, top_p, ..."""


class BuildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is built for. ``None`` means automatic; ``builder.resolve`` fills it in."""

    max_batch_size: int | None = None
    """Sequences in one step (8 on a CPU)."""
    max_seq_len: int | None = None
    """Prompt and answer together, tokens (the model's own limit, capped at 8192 on a CPU)."""
    max_num_tokens: int | None = None
    """Tokens in one step: the scheduler's budget (512 on a CPU)."""
    max_input_len: int | None = None
    """Longest prompt, tokens (``max_seq_len`` - 1)."""
    block_size: int | None = None
    """Tokens in a KV block (16)."""
    dtype: str | None = None
    """Type of matrices that the checkpoint does not quantise: float32, bfloat16 or float16 (the
    checkpoint's own)."""
    quant: str | None = None
    """Recipe that the weights are quantised by first, of ``pelton quantize --list`` (none)."""
    activations: str | None = None
    """Input precision of block-quantised matrix products: float32 or int8 (int8); of GPU engines ``dtype``,
    or int8 or fp8 where weights are of that type (what the checkpoint says)."""
    kv_dtype: str | None = None
    """Type of cached keys and values: float32, float16, bfloat16, int8 or fp8 (float16, or float32 where
    weights and activations are). Those of 8 bits have a scale a KV head, measured on text at build."""
    deterministic: bool | None = None
    """GPU engines: every kernel gives a row the same bits whatever else is in the step, so that answers do
    not depend on batching, chunking or cached prefixes; slower (no)."""
    accumulate: str | None = None
    """GPU engines: what tensor cores add up in, float32 or float16 (float32). float16 is for ``dtype``
    float16, steps of more than 128 tokens and GeForce cards, whose tensor cores add it twice as fast."""
    gpu_memory_fraction: float | None = None
    """Share of a GPU's free memory that a session takes, weights and KV cache together (0.9)."""
    threads: int | None = None
    """CPU threads of a session; 0, the automatic value, means all cores the process may use."""
    fast_build: bool | None = None
    """Build in the shortest time: the fewest passes, a shorter check (False)."""
    timing: bool | None = None
    """Measure tactics on the build machine where no timing cache has the answer (yes, where the target's
    kernels run); otherwise tactics are chosen by their default order."""
    plugins: dict[str, str] = {}
    """Tactic by op: ``auto``, a tactic's name, or ``disable`` (the op runs on the reference)."""
    target: str | None = None
    """Device that the engine is for: cpu, an NVIDIA GPU's architecture (sm_80, sm_90, ...), or cuda: this
    machine's GPU, else sm_90 (cpu)."""
    cpu_level: str | None = None
    """CPU level whose kernels may be used (this machine's): generic, avx2, avxvnni, avx512, avx512bf16,
    or any: kernels that run everywhere."""
    model_impl: str | None = None
    """Where the model's definition comes from: pelton (its file in ``models/``), transformers (imported),
    or auto: the file where there is one, else imported (auto)."""
    profiling: str | None = None
    """What the plan keeps for profilers and debuggers (names): none, names of instructions and tensors, or
    detailed: their shapes and types besides. Without names there are no extra outputs."""
    passes: dict[str, PassMode] = {}
    """Compiler passes by name: ``auto``, ``force`` (fail the build where it does not apply) or ``off``.
    Those that are not named are auto."""
    profiles: tuple[OptimizationProfile, ...] | None = None
    """Kinds of steps to choose tactics for (one, from the limits above)."""
    opt_num_tokens: int | None = None
    """Tokens that a step most often has (``max_batch_size``: every sequence decodes)."""


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes an engine needs, known before it is loaded."""

    weights: int
    arena: int
    workspace: int
    kv_bytes_per_token: int
    """Over all layers, window not counted."""
    inputs: int = 0
    """A step's arrays of the largest size: token ids, positions, block tables."""

    @property
    def work(self) -> int:
        """What a step needs besides weights and KV cache."""
        return self.arena + self.workspace + self.inputs


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``config.json``."""

    model: ModelConfig
    build: BuildConfig
    """Resolved: no field is None."""
    memory: MemoryPlan
