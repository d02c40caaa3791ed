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
from flowrun.grids import COLUMNS, grid
from flowrun.variants import Variants

log = logging.getLogger(__name__)

SHOWN = 64  # rows
SIDE = 128  # pixels of a tile's longer side; larger pictures are made smaller


def contact_sheet(variants: Variants, rows: Sequence[Row], consequence: str = "") -> Image.Image | None:
    """Rows of every size, evenly spread, each in another of its variants; None when the data hold no pictures.

    consequence: what a run does about a row that cannot be read, for the warning about it."""
    if not variants.source.names:  # only the cache is left of them
        return None
    tiles, captions = [], []
    for number, index in enumerate(spread(rows)):
        seen = variants.source.variant(rows[index], number % variants.source.variants)
        if (tile := _tile(variants, seen, consequence)) is not None:
            tiles.append(tile)
            captions.append(f"{_several(variants.source.names)}{seen.prompt}")
    columns = max(2, COLUMNS * SIDE // max(tile.width for tile in tiles)) if tiles else 0
    return grid(tiles, captions, min(columns, COLUMNS)) if tiles else None


def _several(names: Sequence[str]) -> str:
    """What the pictures of a tile are called, from left to right, when there are several."""
    pictures = [name for name in names if name not in ("prompt", "audio")]
    return f"({', '.join(pictures)}) " if len(pictures) > 1 else ""


def spread(rows: Sequence[Row]) -> list[int]:
    """Indices of up to SHOWN rows, evenly taken from the rows in order of their sizes."""
    by_size = sorted(range(len(rows)), key=lambda i: rows[i].shape)
    count = min(SHOWN, len(rows))
    return [by_size[i * len(rows) // count] for i in range(count)]


def _tile(variants: Variants, row: Row, consequence: str) -> Image.Image | None:
    """All pictures of the row side by side; None, with a warning, when they cannot be read."""
    try:
        inputs = variants.source.load(row)
    except DataError as error:
        log.warning("%s", "; ".join([*error.faults, consequence or error.fix]))
        return None
    pictures = [picture for value in inputs.values() for picture in _pictures(value)]
    if not pictures:
        return None
    image = from_tensor(torch.cat(pictures, dim=2))  # uint8 [3, H, sum of W]
    image.thumbnail((SIDE * len(pictures), SIDE), Image.Resampling.LANCZOS)
    return image


def _pictures(value: object) -> list[Tensor]:
    """What there is to see of a row's input: a picture, several, or first, middle and last frame of a video."""
    if isinstance(value, list):
        return [picture for item in value for picture in _pictures(item)]
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        return []
    if value.ndim == 4 and value.shape[1] == 3:  # [F, 3, H, W]
        return [value[place] for place in sorted({0, len(value) // 2, len(value) - 1})]
    return [value] if value.ndim == 3 and value.shape[0] == 3 else []
