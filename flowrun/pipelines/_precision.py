"""In what precision a network computes, however its weights are held."""

from __future__ import annotations

import torch
from torch import nn

from flowrun.config import Precision

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
MARK = "computes_in"


def computes_in(network: nn.Module, dtype: torch.dtype) -> None:
    """Note it on a network whose weights do not say it, since they are quantised or cast when they are called."""
    setattr(network, MARK, dtype)


def dtype_of(network: nn.Module) -> torch.dtype:
    """What its inputs are to be in. network: maybe in a wrapper that averages its gradients."""
    marked = getattr(getattr(network, "module", network), MARK, None)
    return next(network.parameters()).dtype if marked is None else marked
