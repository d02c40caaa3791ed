"""Networks whose weights have shape, precision and device, and no content: every operation on them costs nothing.

They say that they are on the CPU: attention then takes the fused kernel that keeps as much as the one on GPUs. What a
network reads beside its weights is real, so that code may look into masks and lengths.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from flowrun.config import ConfigError, Held
from flowrun.frozen.cast import STORED, Cast, cast_layers
from flowrun.frozen.layers import linear_layers
from flowrun.frozen.quantized import Quantized
from flowrun.pipelines import Holding

MODE = FakeTensorMode(allow_non_fake_inputs=True)
# Functions that autocast computes in fp32 on GPUs, and mostly not on CPUs: those of the list in torch's documentation
# (torch.amp, "CUDA Ops that can autocast to float32") that networks call.
IN_FP32 = frozenset({
    "layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "softplus", "exp", "log", "pow", "square", "__pow__",
    "rsqrt", "reciprocal", "__rtruediv__", "sum", "prod", "cumsum", "norm", "normalize", "cosine_similarity", "mse_loss",
})  # fmt: skip


def faked(network: nn.Module) -> nn.Module:
    """Replace all weights and buffers, on the meta device or elsewhere, in place. Which are trained stays."""
    for module in network.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                module._parameters[name] = nn.Parameter(_fake(tensor), requires_grad=tensor.requires_grad)
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = _fake(tensor)
        for name, value in vars(module).items():  # tables of positions that are no buffers
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, torch.zeros(value.shape, dtype=value.dtype))
    return network


def called_as(network: nn.Module, name: str, holding: Holding, dtype: torch.dtype) -> None:
    """Let the frozen linear layers of a network on the meta device be called as they are when they are held so.

    Raises ConfigError for what is not estimated."""
    if isinstance(holding, Cast):
        for layer in cast_layers(network):
            if not layer.weight.requires_grad:
                layer.to(STORED)
                layer.forward = partial(_cast_linear, layer, dtype)
    elif isinstance(holding, Quantized) and holding.held is Held.bnb_nf4:
        for _, layer in linear_layers(network):
            if not layer.weight.requires_grad:
                layer.forward = partial(_quantized_linear, layer, dtype)
    else:
        what = f"is {holding.describe}, whose training steps are not estimated"
        raise ConfigError(f"memory.weights.{name}", what, "use bnb_nf4 or fp8_cast")


def _cast_linear(layer: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """As diffusers' hook: the copy in full is what autograd keeps."""
    return F.linear(x, layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype))


def _quantized_linear(layer: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """As bitsandbytes: computed in `dtype`, returned in the precision of x."""
    return _Dequantized.apply(x.to(dtype), layer.weight, layer.bias).to(x.dtype)


class _Dequantized(torch.autograd.Function):
    """The weight in full exists within each call, and is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, torch.empty_like(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ torch.empty_like(ctx.weight), None, None


class GpuAutocast(TorchFunctionMode):
    """Beside autocast for the CPU: what autocast would compute in fp32 on a GPU. Around the forward pass, and around
    what `checkpointed` computes again in the backward pass, for which torch takes modes off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in IN_FP32:
            args, kwargs = [_wide(value) for value in args], {name: _wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def checkpointed(block: nn.Module, *args: Any) -> Any:
    """As diffusers' networks call their blocks under gradient checkpointing."""
    return checkpoint(block, *args, use_reentrant=False, context_fn=_again)


def _again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), GpuAutocast() if torch.is_autocast_enabled("cpu") else nullcontext()


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _fake(tensor: Tensor) -> Tensor:
    with MODE:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
