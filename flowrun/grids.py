"""Sampled pictures on disk: one PNG each, a table of their prompts and seeds, and a grid to look at.

samples/step-000250.png          the grid, each picture with its caption below, and what it was made from on its left; of a video
                                 its first, middle and last frame
samples/step-000250/000.png ...  the pictures; of a video 000.webp, animated, lossless, at 16 frames a second or at those of its
                                 sound, which is 000.wav beside it, of 16 bits
samples/step-000250/samples.csv  file,prompt,seed
"""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
import wave
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrun.data._picture import from_tensor
from flowrun.disk import saving
from flowrun.files import write_atomic
from flowrun.sampling import Picture
from flowrun.sound import Wave

COLUMNS = 8
CELL = 96  # pixels; smaller pictures are enlarged by a whole factor
STRIP = 3  # frames of a video in its cell
GAP = 4
FONT_PX = 10
LINES = 2  # of a caption
LOUDEST = 2**15 - 1  # of 16 bits


def save(folder: Path, step: int, pictures: Sequence[Picture]) -> Path:
    """Write all of it for one step, in place of what an earlier attempt left; returns the grid's path.

    A kill leaves the step's pictures whole or absent. Raises ValueError when there are no pictures."""
    name = path(folder, step).stem
    images = [to_image(film_strip(picture.image)) for picture in pictures]
    several = len({picture.seed for picture in pictures}) > 1
    captions = [f"{picture.prompt} ({picture.seed})" if several else picture.prompt for picture in pictures]
    columns = COLUMNS // STRIP if any(_is_video(picture) for picture in pictures) else COLUMNS
    sheet = grid([_beside(picture, image) for picture, image in zip(pictures, images, strict=True)], captions, columns)
    part = folder / f".{name}.{os.getpid()}.part"
    part.mkdir(parents=True)
    try:
        _save_each(part, pictures)
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(part, folder / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return _write(path(folder, step), sheet)


def save_sheet(path: Path, images: Sequence[Image.Image], captions: Sequence[str]) -> Path:
    """A grid alone. Raises Failure when the disk is full."""
    with saving(path.parent, path.name):
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write(path, grid(images, captions))


def _write(path: Path, sheet: Image.Image) -> Path:
    png = io.BytesIO()
    sheet.save(png, format="PNG")
    return write_atomic(path, png.getvalue())


def path(folder: Path, step: int) -> Path:
    """Where `save` puts the grid."""
    return folder / f"step-{step:06d}.png"


def _beside(picture: Picture, image: Image.Image) -> Image.Image:
    """The picture with those that it was made from on its left."""
    row = [*(from_tensor(film_strip(seen)) for seen in picture.seen), image]
    sheet = Image.new("RGB", (sum(one.width for one in row), max(one.height for one in row)), "white")
    left = 0
    for one in row:
        sheet.paste(one, (left, 0))
        left += one.width
    return sheet


def _save_each(folder: Path, pictures: Sequence[Picture]) -> None:
    table = io.StringIO()
    rows = csv.writer(table)
    rows.writerow(("file", "prompt", "seed"))
    for index, picture in enumerate(pictures):
        name = f"{index:03d}.{'webp' if _is_video(picture) else 'png'}"
        _save_one(folder / name, picture)
        rows.writerow((name, picture.prompt, picture.seed))
    write_atomic(folder / "samples.csv", table.getvalue().encode())


def _save_one(path: Path, picture: Picture) -> None:
    if not _is_video(picture):
        to_image(picture.image).save(path)
        return
    first, *others = (to_image(frame) for frame in picture.image)
    ends = [round((number + 1) * 1000 / picture.fps) for number in range(1 + len(others))]  # whole milliseconds, right on the whole
    times = [end - begin for begin, end in pairwise([0, *ends])]
    first.save(path, save_all=True, append_images=others, duration=times, loop=0, lossless=True)
    if picture.sound is not None:
        _save_sound(path.with_suffix(".wav"), picture.sound)


def _save_sound(path: Path, sound: Wave) -> None:
    values = (sound.samples.clamp(-1, 1) * LOUDEST).round().short().numpy().astype("<i2")  # [K, S]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(values))
        file.setsampwidth(values.itemsize)
        file.setframerate(sound.rate)
        file.writeframes(values.T.tobytes())


def _is_video(picture: Picture) -> bool:
    return picture.image.ndim == 4


def film_strip(picture: Tensor) -> Tensor:
    """A video [F, 3, H, W] -> its first, middle and last frame, as many as there are, side by side: [3, H, up to 3 W]. A
    picture stays what it is."""
    if picture.ndim == 3:
        return picture
    shown = sorted({0, (len(picture) - 1) // 2, len(picture) - 1})
    return torch.cat([picture[frame] for frame in shown], dim=2)


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
        for number, line in enumerate(_wrap(_drawable(caption), width * factor, font)):
            pen.text((left, top + height * factor + 1 + number * (FONT_PX + 2)), line, fill="black", font=font)
    return sheet


def _drawable(text: str) -> str:
    """Pillow's own font, the only one that is everywhere, has ASCII: accents are left out, other letters become `?`."""
    plain = (normalize("NFKD", letter)[0] for letter in text)
    return "".join(letter if letter.isascii() else "?" for letter in plain)


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
