"""The memory budget: what is said to fit fits, what does not is refused with what would."""

from __future__ import annotations

import msgspec
import pytest

from pelton.builder import budget as budget_module
from pelton.builder import target
from pelton.builder.budget import kv_bytes_per_token, plan_budget
from pelton.engine.config import BuildConfig, EngineConfig, KVGroup, MemoryPlan, ModelConfig
from pelton.errors import ConfigError, MissingDependencyError

MB = 1_000_000


def config(weights: int = 100 * MB, max_seq_len: int = 4096, dtype: str = "bfloat16") -> EngineConfig:
    groups = (
        KVGroup(layers=(0, 2), num_kv_heads=2, head_dim=64),
        KVGroup(layers=(1,), num_kv_heads=2, head_dim=64, window=512),
    )
    return EngineConfig(
        model=ModelConfig(
            architecture="LlamaForCausalLM",
            name="tiny",
            vocab_size=100,
            hidden_size=64,
            num_layers=3,
            num_parameters=1,
            max_position_embeddings=131072,
            kv_groups=groups,
        ),
        build=BuildConfig(
            max_batch_size=4,
            max_seq_len=max_seq_len,
            max_num_tokens=512,
            max_input_len=max_seq_len - 1,
            block_size=16,
            dtype=dtype,
            activations="float32",
            kv_dtype="float16",
            threads=0,
        ),
        memory=MemoryPlan(
            weights=weights,
            arena=8 * MB,
            workspace=2 * MB,
            kv_bytes_per_token=kv_bytes_per_token(groups, "float16"),
        ),
    )


def test_kv_bytes_count_keys_and_values_of_every_layer() -> None:
    assert config().memory.kv_bytes_per_token == 3 * 2 * 2 * 64 * 2


def test_everything_wanted_fits() -> None:
    budget = plan_budget(config(), free=1000 * MB)
    assert budget.kv_tokens == 4 * 4096
    assert budget.notes() == []
    assert budget.longest_context == 131072
    assert "weights 100 MB" in budget.text()


def test_a_smaller_cache_is_reported() -> None:
    budget = plan_budget(config(), free=125 * MB)
    assert 4096 <= budget.kv_tokens < 4 * 4096
    assert "will hold" in budget.notes()[0]
    assert budget.memory.weights + budget.work + budget.kv_bytes <= 125 * MB


def test_what_is_said_to_fit_does_fit() -> None:
    free = 113 * MB
    with pytest.raises(ConfigError, match="Fits with: max_seq_len ") as caught:
        plan_budget(config(), free=free)
    suggested = int(str(caught.value).partition("max_seq_len ")[2].split(";")[0])
    assert plan_budget(config(max_seq_len=suggested), free=free).kv_tokens >= suggested


def test_weights_beyond_memory_name_needed_and_free() -> None:
    with pytest.raises(ConfigError, match=r"tiny needs 10\d\d MB|tiny needs 1\.0 GB") as caught:
        plan_budget(config(weights=1000 * MB), free=125 * MB)
    assert "125 MB are free" in str(caught.value)
    assert "a smaller checkpoint" in str(caught.value)


def test_float32_weights_suggest_bfloat16() -> None:
    with pytest.raises(ConfigError, match="dtype bfloat16"):
        plan_budget(config(weights=200 * MB, dtype="float32"), free=140 * MB)


def large_step(tokens: int = 100_000, batch: int = 100_000) -> EngineConfig:
    """A batch so large that a step's buffers outgrow the weights: 20 GB at 100,000 tokens."""
    base = config()
    return msgspec.structs.replace(
        base,
        build=msgspec.structs.replace(base.build, max_batch_size=batch, max_num_tokens=tokens),
        memory=msgspec.structs.replace(base.memory, arena=tokens * 200_000),
    )


def test_work_memory_that_takes_much_of_the_machine_is_pointed_out() -> None:
    note = plan_budget(large_step(), free=24_000 * MB).notes()[0]
    assert "a step of 100000 tokens needs 20.0 GB of work memory, 83% of what is free" in note
    suggested = int(note.split("max_num_tokens ")[1].split()[0])
    assert f"with max_batch_size {suggested}" in note
    assert len(plan_budget(large_step(suggested, suggested), free=24_000 * MB).notes()) == 1  # KV alone
    assert not [n for n in plan_budget(config(), free=24_000 * MB).notes() if "work memory" in n]


def test_work_memory_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError, match="Fits with: max_num_tokens ") as caught:
        plan_budget(large_step(), free=8_000 * MB)
    suggested = int(str(caught.value).split("max_num_tokens ")[1].split()[0])
    assert f"with max_batch_size {suggested}" in str(caught.value)
    assert plan_budget(large_step(suggested, suggested), free=8_000 * MB).kv_tokens >= 4096


def test_memory_is_read_from_the_system() -> None:
    small = msgspec.structs.replace(
        config(), memory=MemoryPlan(weights=1, arena=1, workspace=1, kv_bytes_per_token=1536)
    )
    assert plan_budget(small).free > 0


class FakeGPU:
    """A GPU of 80 GB, half of which others have."""

    name, sm, total_memory = "NVIDIA A100", 80, 80_000 * MB

    def memory(self) -> tuple[int, int]:
        return 40_000 * MB, self.total_memory


def gpu_config(weights: int) -> EngineConfig:
    made = config(weights=weights)
    build = msgspec.structs.replace(made.build, target="sm_80", gpu_memory_fraction=0.9)
    return msgspec.structs.replace(made, build=build)


def test_an_engine_for_a_gpu_is_measured_against_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "available_memory", lambda: 0)
    monkeypatch.setattr(target, "Device", FakeGPU)
    budget = plan_budget(gpu_config(30_000 * MB))
    assert "of 34.9 GB free on NVIDIA A100; one sequence" in budget.text()
    with pytest.raises(ConfigError, match=r"are free on NVIDIA A100\. Fits with"):
        plan_budget(gpu_config(36_000 * MB))


def test_a_gpu_that_is_not_here_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "available_memory", lambda: 0)

    def none() -> FakeGPU:
        raise MissingDependencyError("no driver")

    monkeypatch.setattr(target, "Device", none)
    budget = plan_budget(gpu_config(300_000 * MB))
    assert budget.text().endswith("of a GPU of sm_80's memory; there is none here to say what is free")
    assert budget.notes() == []
    # Another kind of GPU says nothing of this one's memory.
    monkeypatch.setattr(target, "Device", type("Hopper", (FakeGPU,), {"sm": 90}))
    assert plan_budget(gpu_config(300_000 * MB)).free is None
