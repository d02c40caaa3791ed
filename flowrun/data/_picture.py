"""One picture file -> RGB, by rules that are part of a picture's content key. Not a source: sources share it."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from flowrun.data._member import File, open_file, size_of

DECODING = 2  # raise when a file may decode to other pixels than before
EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
UNREAD = (".tif", ".tiff", ".gif", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".tga", ".ppm", ".psd")  # other formats' endings
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "I;16", "I;16B", "I;16L")

# What makes a picture upright again, by its EXIF orientation.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What Pillow's decoders raise on damaged files. Anything else is a mistake of ours and is not turned into a data fault.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, LookupError, struct.error, zlib.error,
          Image.DecompressionBombError)  # fmt: skip


def not_read(ending: str) -> str:
    """What is wrong with a picture that has a caption and one of the endings UNREAD."""
    return f"pictures that end in {ending} are not read: save it as one that ends in {', '.join(EXTENSIONS)}"


class PictureFault(Exception):
    """A picture cannot be used; the message says why, without the file's name."""


def check(file: File, max_pixels: int, full: bool) -> tuple[int, int]:
    """(height, width) as displayed, from the header; with `full` every pixel is decoded. Raises PictureFault."""
    with _opened(file, max_pixels) as picture:
        height, width = picture.height, picture.width
        turned = _orientation(picture) in range(5, 9)  # these swap the axes
        if full:
            picture.load()
    return (width, height) if turned else (height, width)


def read(file: File, max_pixels: int, ground: tuple[int, int, int]) -> Image.Image:
    """The whole picture, upright, RGB, transparent parts laid over `ground`. Raises PictureFault."""
    with _opened(file, max_pixels) as picture:
        turn = UPRIGHT.get(_orientation(picture))
        picture.load()
        rgb = _to_rgb(picture, ground)
        return rgb if turn is None else rgb.transpose(turn)


def to_tensor(picture: Image.Image) -> Tensor:
    """RGB picture -> uint8 [3, H, W]."""
    pixels = torch.from_numpy(np.array(picture))  # [H, W, 3]
    return pixels.permute(2, 0, 1).contiguous()


def from_tensor(pixels: Tensor) -> Image.Image:
    """uint8 [3, H, W] -> RGB picture."""
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))


@contextmanager
def _opened(file: File, max_pixels: int) -> Iterator[Image.Image]:
    try:
        with open_file(file) as opened, _open(opened) as picture:
            _check_header(picture, max_pixels)
            yield picture
    except UnidentifiedImageError as error:
        if size_of(file) == 0:
            raise PictureFault("the file is empty (0 bytes)") from error
        raise PictureFault("is no PNG, JPEG, WebP or BMP picture, or its header is damaged") from error
    except BROKEN as error:
        raise PictureFault(f"cannot be read: {error}") from error


def _open(file: BinaryIO) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # how large is too large, data.max_pixels says
        return Image.open(file, formats=FORMATS)


def _check_header(picture: Image.Image, max_pixels: int) -> None:
    if picture.mode not in MODES:
        raise PictureFault(f"pixel mode {picture.mode} is not supported")
    if picture.width * picture.height > max_pixels:
        raise PictureFault(f"has {picture.width * picture.height} pixels, more than data.max_pixels = {max_pixels}")
    if getattr(picture, "is_animated", False) and picture.format != "MPO":  # MPO: a phone's JPEG with a preview inside
        raise PictureFault(f"is an animation of {picture.n_frames} frames; a still picture is needed")


def _orientation(picture: Image.Image) -> int:
    """EXIF orientation: 1 to 8, while others turn nothing. A PNG's may follow its pixels: only then they are decoded for it."""
    if picture.format == "PNG" and "exif" not in picture.info and _exif_follows(picture.fp):
        picture.load()
    return Image.Image.getexif(picture).get(ExifTags.Base.Orientation, 1)


def _exif_follows(png: BinaryIO) -> bool:
    """Whether one of its chunks, each of length (4 bytes), kind (4), content and checksum (4), is an eXIf. Reads their heads."""
    place, at, kind = png.tell(), 8, b""
    while kind != b"eXIf" and len(head := _read(png, at, 8)) == 8:
        kind, at = head[4:], at + 12 + int.from_bytes(head[:4], "big")
    png.seek(place)
    return kind == b"eXIf"


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _to_rgb(picture: Image.Image, ground: tuple[int, int, int]) -> Image.Image:
    if picture.mode.startswith("I;16"):
        return _from_16_bit(picture, ground)
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    coloured = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", coloured.size, (*ground, 255)), coloured).convert("RGB")


def _from_16_bit(picture: Image.Image, ground: tuple[int, int, int]) -> Image.Image:
    """Grey 0..65535 -> 0..255, rounded; Pillow's own conversion would clip almost all of it to white."""
    deep = np.array(picture).astype(np.uint32)  # [H, W]
    grey = ((deep * 255 + 32767) // 65535).astype(np.uint8)
    rgb = np.repeat(grey[:, :, None], 3, axis=2)  # [H, W, 3]
    if "transparency" in picture.info:
        rgb[deep == picture.info["transparency"]] = ground
    return Image.fromarray(rgb)
