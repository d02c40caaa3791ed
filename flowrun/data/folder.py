"""A folder of pictures, searched through its sub-folders, each with a caption in a text file of the same stem."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import PIL

from flowrun.cache.key import digest
from flowrun.config import ConfigError, DataError
from flowrun.data import Row, Source
from flowrun.data import _picture as picture
from flowrun.data._captions import CaptionFault, read_caption
from flowrun.data._geometry import RESIZING, Geometry
from flowrun.data._listing import Listing, list_folder
from flowrun.files import HashFile

log = logging.getLogger(__name__)

PILLOW_LIMIT = 178_956_970  # pixels; above it Pillow refuses to open a picture


class OnError(Enum):
    stop = "stop"  # all faults are listed and nothing is trained
    skip = "skip"  # rows with a fault are left out, each with its reason


class Check(Enum):
    headers = "headers"  # sizes only: damage further on stops the run when the picture is decoded
    full = "full"  # every picture is decoded once before the run


class Folder(Source):
    """Rows named by path relative to `path`, with `/`, in sorted order: "cats/tom.jpg"."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        source: str
        path: str | None
        on_error: OnError
        check: Check
        max_pixels: int  # of a file, before geometry
        ground: list[int]  # RGB 0..255 laid under transparent parts
        geometry: Geometry

        def __post_init__(self) -> None:
            if len(self.ground) != 3 or not all(0 <= value <= 255 for value in self.ground):
                raise ConfigError("data.ground", f"is {self.ground}", "give red, green, blue, each 0 to 255")
            if not 1 <= self.max_pixels <= PILLOW_LIMIT:
                raise ConfigError(
                    "data.max_pixels", f"is {self.max_pixels}", f"give 1 to {PILLOW_LIMIT} (Pillow's limit)"
                )

    def rows(self) -> list[Row]:
        root = _root(self.config.path)
        listing = list_folder(root)
        if not listing.pictures and not listing.faults:
            seen = f"{listing.ignored} other files" if listing.ignored else "no files"
            raise ConfigError(
                "data.path", f"{root} holds no pictures ({seen})", f"pictures end in {', '.join(picture.EXTENSIONS)}"
            )
        rows, faults = [], dict(listing.faults)
        for name in listing.pictures:
            row, reasons = self._row(root, name, listing)
            faults |= {name: "; ".join(reasons)} if reasons else {}
            rows += [row] if row is not None else []
        self._settle(root, rows, faults, listing)
        return rows

    def place(self) -> str:
        return "" if self.config.path is None else str(Path(self.config.path).expanduser().resolve())

    def gone(self) -> bool:
        return self.config.path is not None and not Path(self.place()).exists()

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        wanted = self.names if names is None else names
        inputs: dict[str, Any] = {"prompt": row.prompt} if "prompt" in wanted else {}
        if "image" in wanted:
            try:
                upright = picture.read(row.source, self.config.max_pixels, tuple(self.config.ground))
            except picture.PictureFault as error:
                raise DataError(
                    [f"{row.source}: {error}"], "repair or remove it; data.check=full finds such files early"
                ) from error
            inputs["image"] = picture.to_tensor(self.config.geometry.apply(upright))  # uint8 [3, H, W]
        return inputs

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        geometry = {**asdict(self.config.geometry), "mode": self.config.geometry.mode.value}
        versions = {"decoding": picture.DECODING, "resizing": RESIZING, "pillow": PIL.__version__}
        rules = {**versions, "ground": self.config.ground, "geometry": geometry}
        return {"image": digest("picture", hash_file(row.source), rules), "prompt": digest("prompt", row.prompt)}

    def _row(self, root: Path, name: str, listing: Listing) -> tuple[Row | None, list[str]]:
        """The row, or None and everything that is wrong with its picture and its caption."""
        path, reasons = root / name, []
        size, caption = (0, 0), ""
        try:
            own = picture.check(path, self.config.max_pixels, self.config.check is Check.full)
            size = self.config.geometry.target(*own)
        except (picture.PictureFault, ValueError) as error:
            reasons.append(str(error))
        try:
            caption = read_caption(path, listing.near)
        except CaptionFault as error:
            reasons.append(str(error))
        return (None if reasons else Row(id=name, prompt=caption, size=size, source=path)), reasons

    def _settle(self, root: Path, rows: list[Row], faults: dict[str, str], listing: Listing) -> None:
        """Stop or skip as configured; `skipped` says what was left out and why. Raises DataError."""
        self.ignored = listing.ignored
        self.skipped = sorted(faults.items())
        lines = [f"{root / name}: {reason}" for name, reason in self.skipped]
        if faults and (self.config.on_error is OnError.stop or not rows):
            which = f"{len(faults)} of {len(faults) + len(rows)} rows"
            remedy = "repair them" if not rows else "repair them, or leave them out with data.on_error=skip"
            raise DataError(lines, f"data.path: {which} cannot be used; {remedy}{listing.unread()}")
        if listing.ignored:
            log.info("%s: %d hidden or other files ignored%s", root, listing.ignored, listing.unread())


def _root(path: str | None) -> Path:
    if path is None:
        raise ConfigError("data.path", "names no folder", "give data.path=FOLDER with pictures and captions")
    root = Path(path).expanduser().absolute()
    if not root.exists():
        raise ConfigError("data.path", f"{root} does not exist", "give an existing folder")
    if not root.is_dir():
        raise ConfigError("data.path", f"{root} is a file", "give the folder that holds it")
    try:
        os.scandir(root).close()
    except OSError as error:
        raise ConfigError(
            "data.path", f"{root} cannot be read: {error.strerror}", "give a folder that you may read"
        ) from error
    return root
