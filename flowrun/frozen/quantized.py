"""Linear layers with weights of 4 or 8 bits, by diffusers' quantisers for bitsandbytes and torchao.

Everything else in the network is held in its precision. Quantising reads the weights as they were loaded, adapters that
were merged first included.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from diffusers.utils import is_bitsandbytes_version, is_torchao_version
from torch import nn

from flowrun.cache.key import digest
from flowrun.config import ConfigError, Held
from flowrun.frozen.layers import delicate, in_full, linear_layers
from flowrun.pipelines import Holding

LIBRARIES = {
    Held.bnb_nf4: "bitsandbytes", Held.bnb_int8: "bitsandbytes", Held.torchao_int8: "torchao", Held.torchao_float8: "torchao",
}  # fmt: skip
LEAST = {"bitsandbytes": "0.50", "torchao": "0.18"}  # as in pyproject.toml
NEWER = {"bitsandbytes": partial(is_bitsandbytes_version, ">="), "torchao": partial(is_torchao_version, ">=")}
BLOCK = 64  # weights that share a scale in nf4
SCALE = 4  # bytes of a scale, fp32; torchao's integers also have a zero point each
LEVELS = 16 * 4  # bytes of nf4's sixteen values, beside each layer
DESCRIBED = {
    Held.bnb_nf4: "nf4 (bitsandbytes)",
    Held.bnb_int8: "int8 (bitsandbytes)",
    Held.torchao_int8: "int8 (torchao)",
    Held.torchao_float8: "float8 (torchao)",
}


class Quantized(Holding):
    def __init__(self, held: Held) -> None:
        self.held, self.describe = held, DESCRIBED[held]

    @property
    def identity(self) -> bytes:
        """Other releases may round otherwise."""
        package = LIBRARIES[self.held]
        return digest("quantized", self.held.value, package, version(package))

    def place(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        quantize(module, _config(self.held, dtype), device)

    def settle(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """It stays as it was placed."""

    def bytes(self, outline: nn.Module, dtype: torch.dtype) -> int:
        return quantized_bytes(outline, self.held, dtype)


def quantize(network: nn.Module, config: Any, device: torch.device) -> None:
    """Replace the linear layers' weights, one by one, and place all of the network. config: diffusers' own."""
    from diffusers.quantizers import DiffusersAutoQuantizer

    quantizer = DiffusersAutoQuantizer.from_config(config, pre_quantized=False)
    weights = dict(network.named_parameters())
    quantizer.preprocess_model(network, device_map=None, keep_in_fp32_modules=delicate(network))
    for name, weight in weights.items():
        if quantizer.check_if_quantized_param(network, weight, name, {}):
            quantizer.create_quantized_param(network, weight, name, device, {}, [])
        else:
            layer, _, own = name.rpartition(".")
            weight.data = weight.data.to(device)
            network.get_submodule(layer)._parameters[own] = weight  # a replaced layer's bias is lost otherwise
    for buffer in network.buffers():
        buffer.data = buffer.data.to(device)
    quantizer.postprocess_model(network)


def quantized_bytes(outline: nn.Module, held: Held, dtype: torch.dtype) -> int:
    """Of all weights and buffers. outline: the network on the meta device."""
    linear = [layer for _, layer in linear_layers(outline)]
    before = sum(layer.weight.numel() * dtype.itemsize for layer in linear)
    return in_full(outline, dtype) - before + sum(_layer_bytes(layer.weight, held) for layer in linear)


def _layer_bytes(weight: torch.Tensor, held: Held) -> int:
    """weight: [out, in]. Scales are one for each block of nf4, else one for each output."""
    count, outputs = weight.numel(), weight.shape[0]
    if held is Held.bnb_nf4:
        return -(-count // 2) + SCALE * -(-count // BLOCK) + LEVELS
    return count + outputs * (SCALE + (held is Held.torchao_int8))


def _config(held: Held, dtype: torch.dtype) -> Any:
    from diffusers import BitsAndBytesConfig, TorchAoConfig

    if held is Held.bnb_nf4:
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    if held is Held.bnb_int8:
        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig() if held is Held.torchao_int8 else Float8WeightOnlyConfig())


def check_installed(key: str, held: Held, package: str) -> None:
    """Raises ConfigError when the library is not installed, or too old."""
    fix, needs = "pip install 'flowrun[quantized]'", f"is {held.value}, which needs {package} {LEAST[package]} or newer"
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise ConfigError(key, f"{needs}, and it is not installed", fix) from error
    if not NEWER[package](LEAST[package]):
        raise ConfigError(key, f"{needs}, and {found} is installed", fix)
