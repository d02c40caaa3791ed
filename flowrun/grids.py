"""Sampled pictures on disk: one PNG each, a table of their prompts and seeds, and a grid to look at.

samples/step-000250.png          the grid, each picture with its caption below, and what it was made from on its left
samples/step-000250/000.png ...  the pictures
samples/step-000250/samples.csv  file,prompt,seed
"""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrun.data._picture import from_tensor
from flowrun.files import write_atomic
from flowrun.sampling import Picture

COLUMNS = 8
CELL = 96  # pixels; smaller pictures are enlarged by a whole factor
GAP = 4
FONT_PX = 10
LINES = 2  # of a caption


def save(folder: Path, step: int, pictures: Sequence[Picture]) -> Path:
    """Write all of it for one step, in place of what an earlier attempt left; returns the grid's path.

    A kill leaves the step's pictures whole or absent. Raises ValueError when there are no pictures."""
    name = path(folder, step).stem
    images = [to_image(picture.image) for picture in pictures]
    several = len({picture.seed for picture in pictures}) > 1
    captions = [f"{picture.prompt} ({picture.seed})" if several else picture.prompt for picture in pictures]
    png = io.BytesIO()
    grid([_beside(picture, image) for picture, image in zip(pictures, images, strict=True)], captions).save(png, format="PNG")
    part = folder / f".{name}.{os.getpid()}.part"
    part.mkdir(parents=True)
    try:
        _save_each(part, pictures, images)
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(part, folder / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return write_atomic(path(folder, step), png.getvalue())


def path(folder: Path, step: int) -> Path:
    """Where `save` puts the grid."""
    return folder / f"step-{step:06d}.png"


def _beside(picture: Picture, image: Image.Image) -> Image.Image:
    """The picture with those that it was made from on its left."""
    row = [*map(from_tensor, picture.seen), image]
    sheet = Image.new("RGB", (sum(one.width for one in row), max(one.height for one in row)), "white")
    left = 0
    for one in row:
        sheet.paste(one, (left, 0))
        left += one.width
    return sheet


def _save_each(folder: Path, pictures: Sequence[Picture], images: Sequence[Image.Image]) -> None:
    table = io.StringIO()
    rows = csv.writer(table)
    rows.writerow(("file", "prompt", "seed"))
    for index, (picture, image) in enumerate(zip(pictures, images, strict=True)):
        image.save(folder / f"{index:03d}.png")
        rows.writerow((f"{index:03d}.png", picture.prompt, picture.seed))
    write_atomic(folder / "samples.csv", table.getvalue().encode())


def to_image(picture: Tensor) -> Image.Image:
    """[3, H, W] in [-1, 1] -> 8-bit RGB, rounded."""
    return from_tensor(((picture + 1) * 127.5).round().clamp(0, 255).byte().cpu())


def grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int = COLUMNS) -> Image.Image:
    """Pictures in rows of `columns`, white ground, captions below in at most two lines. Raises ValueError for none."""
    if not images:
        raise ValueError("a grid needs at least one picture")
    width, height = max(image.width for image in images), max(image.height for image in images)
    factor = max(1, CELL // width)
    cell_width, cell_height = width * factor + GAP, height * factor + GAP + LINES * (FONT_PX + 2)
    columns = min(columns, len(images))
    sheet = Image.new(
        "RGB", (columns * cell_width + GAP, math.ceil(len(images) / columns) * cell_height + GAP), "white"
    )
    font, pen = ImageFont.load_default(FONT_PX), ImageDraw.Draw(sheet)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = index % columns * cell_width + GAP, index // columns * cell_height + GAP
        sheet.paste(image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST), (left, top))
        for number, line in enumerate(_wrap(caption, width * factor, font)):
            pen.text((left, top + height * factor + 1 + number * (FONT_PX + 2)), line, fill="black", font=font)
    return sheet


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """Lines of at most `width` pixels, words kept whole where they fit; what does not fit ends in three dots."""
    words, lines = text.split(), [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    shown = lines[:LINES]
    if len(lines) > LINES:
        shown[-1] += "..."
    return [_cut(line, width, font) for line in shown]


def _cut(line: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    if font.getlength(line) <= width:
        return line
    body = line.removesuffix("...")
    while body and font.getlength(body + "...") > width:
        body = body[:-1]
    return body + "..."
