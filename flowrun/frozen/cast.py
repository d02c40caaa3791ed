"""Weights stored as 8-bit floats and cast to the network's precision, layer by layer, while each one is called.

By diffusers' layerwise casting, of linear layers alone: the backward pass of a convolution looks for the weight in its
place, where it has 8 bits by then, while that of a linear layer keeps what was called until then. So for a network that
gradients pass through it saves memory together with gradient checkpointing only.
"""

from __future__ import annotations

import re

import torch
from diffusers import ModelMixin
from diffusers.hooks import apply_layerwise_casting
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from torch import nn

from flowrun.cache.key import digest
from flowrun.frozen.layers import in_full, linear_layers
from flowrun.pipelines import Holding

STORED = torch.float8_e4m3fn


class Cast(Holding):
    describe = "fp8, cast when called"
    identity = digest("fp8_cast")

    def place(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """It stays where it is: an adapter takes its precision from the layers."""

    def settle(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Adapters' own layers are trained, and so are left out; their frozen base is cast."""
        frozen = [layer for layer in cast_layers(module) if not any(p.requires_grad for p in layer.parameters())]
        for layer in frozen:
            apply_layerwise_casting(layer, STORED, dtype, skip_modules_pattern=None)
        module.to(device)

    def bytes(self, outline: nn.Module, dtype: torch.dtype) -> int:
        saved = sum(p.numel() * (dtype.itemsize - STORED.itemsize) for layer in cast_layers(outline) for p in layer.parameters())
        return in_full(outline, dtype) - saved


def cast_layers(network: nn.Module) -> list[nn.Module]:
    """Without the layers that diffusers, or the network's class, name as too delicate."""
    patterns = [*DEFAULT_SKIP_MODULES_PATTERN]
    if isinstance(network, ModelMixin):
        patterns += network._skip_layerwise_casting_patterns or ()
    return [
        layer
        for name, layer in linear_layers(network)
        if not any(re.search(pattern, name) for pattern in patterns)
    ]
