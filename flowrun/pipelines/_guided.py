"""Networks that were distilled from guided samples and are told their guidance, as FLUX.1 [dev] and FLUX.2 [dev] are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowrun.config import ConfigError


def check_guidance(guidance: float | None, transformer: Mapping[str, Any]) -> None:
    """Raises ConfigError when it is given to a network that is not told any, or lacks."""
    told = transformer["guidance_embeds"]
    if told != (guidance is not None):
        what = f"is {guidance}, but the transformer {'must' if told else 'cannot'} be told a guidance"
        raise ConfigError("model.guidance", what, "give a number, e.g. 3.5" if told else "set it to null")


def told_guidance(guidance: float | None, noise: Tensor) -> dict[str, Tensor]:
    """What the loop reads of it: [B], fp32."""
    return {} if guidance is None else {"guidance": torch.full([len(noise)], float(guidance), device=noise.device)}
