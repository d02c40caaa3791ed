"""Which of a network's layers can be held otherwise, and what weights take."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from flowrun.pipelines import held_in


def delicate(network: nn.Module) -> list[str]:
    """Parts that are held in full, names between dots: those that the network's class names, of which T5 asks one what
    precision it has, and layers that share their weight with an embedding."""
    named = {*(getattr(network, "_keep_in_fp32_modules", None) or ()), *(getattr(network, "_keep_in_fp32_modules_strict", None) or ())}
    looked_up = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    shared = {name.rpartition(".")[2] for name, module in network.named_modules()
              if isinstance(module, nn.Linear) and id(module.weight) in looked_up}  # fmt: skip
    return sorted(named | shared)


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
