"""Weights that wait in the CPU's memory and are moved to the device, layer by layer, when they are called.

By diffusers' group offloading. After a layer's call they are gone again, so no gradient can pass through.
"""

from __future__ import annotations

import torch
from diffusers.hooks import apply_group_offloading
from torch import nn

from flowrun.pipelines import Holding, held_in


class Offloaded(Holding):
    describe = "in the CPU's memory, moved to the device layer by layer"

    def place(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """It stays where it is."""

    def settle(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        apply_group_offloading(module, onload_device=device, offload_device=torch.device("cpu"), offload_type="leaf_level")

    def bytes(self, outline: nn.Module, dtype: torch.dtype) -> int:
        """Of the largest layer."""
        sizes: dict[str, int] = {}
        for name, weight in outline.named_parameters():
            layer = name.rpartition(".")[0]
            sizes[layer] = sizes.get(layer, 0) + weight.numel() * held_in(outline, name, weight.dtype, dtype).itemsize
        return max(sizes.values(), default=0)
