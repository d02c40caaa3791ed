"""A contact sheet: pictures as the model will see them, cut and varied, each with its caption."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from flowrun.config import DataError
from flowrun.data import Row
from flowrun.data._picture import from_tensor
from flowrun.grids import grid
from flowrun.variants import Variants

log = logging.getLogger(__name__)

SHOWN = 64  # rows
SIDE = 128  # pixels of a tile's longer side; larger pictures are made smaller


def contact_sheet(variants: Variants, rows: Sequence[Row]) -> Image.Image | None:
    """Rows of every size, evenly spread, each in another of its variants; None when the data hold no pictures."""
    if not variants.source.names:  # only the cache is left of them
        return None
    tiles, captions = [], []
    for number, index in enumerate(spread(rows)):
        seen = variants.source.variant(rows[index], number % variants.source.variants)
        if (tile := _tile(variants, seen)) is not None:
            tiles.append(tile)
            captions.append(seen.prompt)
    return grid(tiles, captions) if tiles else None


def spread(rows: Sequence[Row]) -> list[int]:
    """Indices of up to SHOWN rows, evenly taken from the rows in order of their sizes."""
    by_size = sorted(range(len(rows)), key=lambda i: rows[i].shape)
    count = min(SHOWN, len(rows))
    return [by_size[i * len(rows) // count] for i in range(count)]


def _tile(variants: Variants, row: Row) -> Image.Image | None:
    """All pictures of the row side by side; None, with a warning, when they cannot be read."""
    try:
        inputs = variants.source.load(row)
    except DataError as error:
        log.warning("%s", error)
        return None
    pictures = [value for value in inputs.values() if _is_picture(value)]
    if not pictures:
        return None
    image = from_tensor(torch.cat(pictures, dim=2))  # uint8 [3, H, sum of W]
    image.thumbnail((SIDE * len(pictures), SIDE), Image.Resampling.LANCZOS)
    return image


def _is_picture(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 3 and value.shape[0] == 3
