"""Metrics from the device to the host: all of an update at once, since a device stops for each that is read alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor


def read(found: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """The same with numbers instead of 0-d tensors, equal to the last bit. Those of one device are read in one transfer."""
    tensors = [value.detach() for metrics in found for value in metrics.values()]
    numbers: dict[int, float] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        there = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        widest = reduce(torch.promote_types, (tensors[i].dtype for i in there))
        numbers |= zip(there, torch.stack([tensors[i].to(widest) for i in there]).tolist(), strict=True)
    ordered = iter([numbers[i] for i in range(len(tensors))])
    return [{name: float(next(ordered)) for name in metrics} for metrics in found]
