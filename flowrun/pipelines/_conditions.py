"""Condition pictures: what an editing model sees of a row beside its caption.

Data call them condition, condition_2, condition_3 ..., diffusers' blocks call them `image`, which here is the target. A
row's pictures are all of its own size, so rows of one size have latents of one shape.

Legend: N condition pictures of a row, C channels, h w latent height and width, H W picture height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowrun.cache.code import code_identity
from flowrun.graph import Unit

IMAGE = "image"  # of the blocks


def condition_names(count: int) -> tuple[str, ...]:
    """As the data name the condition pictures of a row."""
    return tuple("condition" if number == 1 else f"condition_{number}" for number in range(1, count + 1))


def conditioned(unit: Unit, pictures: Sequence[str]) -> Unit:
    """A unit of blocks that read `image`, on these pictures of a row instead; other units as they are."""
    if IMAGE not in unit.input_params:
        return unit
    others = [name for name in unit.input_params if name != IMAGE]
    return replace(
        unit,
        input_params=(*others, *pictures),
        output_params=tuple(name for name in unit.output_params if name != IMAGE),
        process=_OnConditions(unit, tuple(pictures)),
        process_rows=None,  # the blocks take several pictures for one prompt, not for several
        settings={"unit": code_identity(unit).hex(), "pictures": list(pictures)},
    )


class _OnConditions:
    """A unit's process, given what diffusers' pipeline is given: a PIL picture, or a list of several."""

    def __init__(self, unit: Unit, pictures: tuple[str, ...]) -> None:
        self.unit, self.pictures = unit, pictures

    def __call__(self, ctx: Any, **inputs: Any) -> Mapping[str, Any]:
        """Pictures: uint8 [3, H, W]. Lists of latents, one for each picture, [1, C, h, w], become one tensor [N, C, h, w]."""
        pictures = [_to_picture(inputs.pop(name)) for name in self.pictures]
        given = pictures if len(pictures) > 1 else pictures[0]
        found = self.unit.process(ctx, **inputs, image=given)
        return {name: torch.cat(value) if isinstance(value, list) else value for name, value in found.items()}


def _to_picture(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().cpu().numpy())
