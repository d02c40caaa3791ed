"""Which of a network's layers can be held otherwise, and what weights take."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from flowrun.pipelines import held_in


def delicate(network: nn.Module) -> list[str]:
    """Parts that the network's class wants in full: names between dots. T5 asks one of them what precision it has."""
    names = {*(getattr(network, "_keep_in_fp32_modules", None) or ()), *(getattr(network, "_keep_in_fp32_modules_strict", None) or ())}
    return sorted(names)


def linear_layers(network: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Name and layer, without those within a delicate part."""
    without = set(delicate(network))
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and not without & set(name.split(".")):
            yield name, module


def in_full(network: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of all weights and buffers when the network is held in `dtype`; weights that two layers share count once."""
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    return sum(t.numel() * held_in(network, name, t.dtype, dtype).itemsize for name, t in tensors.items())
