"""Loads checkpoints with vLLM's own code, as for an H200, where there is no GPU: what ``test_vllm.py`` runs.

    python -m tests.checkpoint.vllm_reader STUB OUT FOLDER...

vLLM's wheel for CUDA runs like this up to its kernels: the platform is CUDA's with an H200's compute
capability, and tensors lie in the machine's memory. ``STUB``: an empty shared library by the name of
libcuda.so.1, for machines without a driver. Of each folder ``OUT/<name>.safetensors`` has the values that
vLLM's parameters stand for, and its metadata which scheme vLLM took, what it loaded or why it refused.

A process of its own: what it sets would change every test after it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(stub: str, out: str, *folders: str) -> None:
    """Read all folders in this process."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        ctypes.CDLL(stub)
    # The extensions' references to CUDA's driver are looked up when they are called, which they are not.
    sys.setdlopenflags(os.RTLD_LAZY)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm.platforms

    vllm.platforms._current_platform = platform()
    import torch
    from safetensors.torch import save_file
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    started = False
    for folder in folders:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        facts: dict[str, Any] = {}
        values: dict[str, torch.Tensor] = {}
        try:
            # float16, as scales of 4-bit codes are stored: bfloat16 would round them.
            arguments = EngineArgs(
                model=folder, dtype="float16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
            )
            config = arguments.create_engine_config()
            with set_current_vllm_config(config):
                if not started:
                    place = f"file://{tempfile.mktemp()}"
                    init_distributed_environment(1, 0, place, 0, "gloo")
                    initialize_model_parallel(1, 1)
                    started = True
                facts, values = read(config)
        except (ValueError, NotImplementedError) as error:
            facts["error"] = f"{type(error).__name__}: {error}"
        save_file(values, f"{out}/{Path(folder).name}.safetensors", {"facts": json.dumps(facts)})


def platform() -> Any:
    """CUDA's platform with an H200's capability, on the CPU."""
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):
        device_type, device_name, dispatch_key, dist_backend = "cpu", "cpu", "CPU", "gloo"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    return Hopper()


def read(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the model and load it, as far as before kernels get their own layouts of weights."""
    import torch
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        model = loader.create_model(config, config.model_config)
    for parameter in model.parameters():
        if parameter.ndim:
            parameter.data.view(torch.uint8).fill_(0x7F)  # so that what is not loaded is seen
    stored: list[str] = []

    def weights() -> Any:
        for name, tensor in loader.get_all_weights(config.model_config, model):
            stored.append(name)
            yield name, tensor

    loaded = model.load_weights(weights())
    parameters = dict(model.named_parameters())
    values, schemes = {}, set()
    for name, module in model.named_modules():
        own = {n: p for n, p in parameters.items() if n.rpartition(".")[0] == name}
        scheme = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
        if type(scheme).__name__.startswith(("CompressedTensorsW", "AutoGPTQ")):
            schemes.add(type(scheme).__name__)
            values[name + ".weight"] = values_of(module)
            if module._parameters.get("input_scale") is not None:
                values[name + ".input_scale"] = module.input_scale.data.clone()
        else:
            values |= {n: p.data.float() for n, p in own.items() if n in loaded}
    facts = {
        "schemes": sorted(schemes),
        "stored": stored,
        "missing": sorted(parameters.keys() - loaded),
    }
    return facts, {name: value.contiguous().clone() for name, value in values.items()}


def values_of(layer: Any) -> Any:
    """The weight (out, in) in float32 that a quantised layer's parameters stand for, by vLLM's own functions
    where it has some that run on CPUs."""
    import torch
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as fp4

    scheme = getattr(layer, "scheme", None)
    if scheme is None:
        kind = layer.quant_method.quant_config.quant_type
        words = layer.qweight.data  # (in / codes a word, out)
        shifts = torch.arange(0, 32, kind.size_bits, dtype=torch.int32)
        codes = (words[:, None] >> shifts[:, None]) & (2**kind.size_bits - 1)
        codes = codes.reshape(-1, words.shape[1]) - kind.bias
        scales = layer.scales.data.float()
        return (codes * scales.repeat_interleave(len(codes) // len(scales), 0)).T
    if hasattr(layer, "weight_shape") and scheme.num_bits != 3:
        # The product that vLLM does when results must not depend on the batch, with the identity.
        compressed_tensors_wNa16.matmul_batch_invariant = torch.matmul
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data.float(), requires_grad=False)
        exact = SimpleNamespace(
            num_bits=scheme.num_bits, symmetric=scheme.symmetric, use_batch_invariant=True
        )
        take = compressed_tensors_wNa16.CompressedTensorsWNA16.apply_weights
        return take(exact, layer, torch.eye(layer.input_size_per_partition), None).T
    scale = layer.weight_scale.data
    if hasattr(layer, "weight_shape"):
        return layer.weight_packed.data  # vLLM's own compressed-tensors 0.17 unpacks 3 bits in another way
    if hasattr(layer, "weight_packed"):
        packed = layer.weight_packed.data
        if hasattr(layer, "weight_global_scale"):
            one = 1 / layer.weight_global_scale.data.max()  # as process_weights_after_loading has it
            return fp4.dequantize_to_dtype(packed, scale, one, torch.float32, 16, swizzle=False)
        sizes = torch.ldexp(torch.ones(()), scale.int() - 127)  # e8m0
        return fp4.break_fp4_bytes(packed, torch.float32) * sizes.repeat_interleave(32, 1)
    weight = layer.weight.data.float()
    if scale.ndim == 1:  # one for each of the stacked
        widths = getattr(layer, "logical_widths", None) or [len(weight)]
        return weight * torch.repeat_interleave(scale, torch.tensor(widths))[:, None]
    rows, columns = weight.shape
    whole = scale.repeat_interleave(-(-rows // len(scale)), 0)[:rows]
    return weight * whole.repeat_interleave(-(-columns // scale.shape[1]), 1)[:, :columns]


if __name__ == "__main__":
    main(*sys.argv[1:])
