"""What sources of pictures share: the rule for faults, geometry, decoding, content keys. Not a source: they derive from it."""

from __future__ import annotations

import logging
import os
import sys
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import PIL
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from flowrun.cache.key import Encoded, digest
from flowrun.config import ConfigError, DataError
from flowrun.data import Row, Source
from flowrun.data import _picture as picture
from flowrun.data._augment import CENTRE, Augment, Look, Several
from flowrun.data._geometry import RESIZING, Geometry
from flowrun.data._listing import MOST_COMPARED
from flowrun.data._looking import FAULTS, sizes_of
from flowrun.data._member import File, absence, content
from flowrun.files import HashFile, missing

log = logging.getLogger(__name__)

PILLOW_LIMIT = 178_956_970  # pixels; above it Pillow refuses to open a picture
ID_HEX = 8  # digits that tell the captions of one picture apart


class OnError(Enum):
    stop = "stop"  # all faults are listed and nothing is trained
    skip = "skip"  # rows with a fault are left out, each with its reason


class Check(Enum):
    auto = "auto"  # full, unless a cache stage decodes all pictures before training anyway and names what it cannot
    headers = "headers"  # sizes only: damage further on stops the run when the picture is decoded
    full = "full"  # every picture is decoded once before the run


@dataclass(frozen=True, slots=True)
class Entry:
    """A row as it was found. files: its pictures by the names that units read, each one or several; the first, which is one,
    gives the row its size.

    captions: each makes a row of its own. where: for messages. faults: what is already known to be wrong with it."""

    id: str
    where: str
    files: Mapping[str, File | tuple[File, ...]]
    captions: Sequence[str] = ()
    faults: Sequence[str] = ()


@dataclass
class Found:
    """ignored: how many files are no data. unread: words about such files that may have been meant as data."""

    entries: list[Entry] = field(default_factory=list)
    ignored: int = 0
    unread: str = ""


class Pictures(Source):
    """Subclasses find entries; which of them are rows, and what a row's pictures become, is decided here."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        source: str
        path: str | None
        on_error: OnError
        check: Check
        max_pixels: int  # of a file, before geometry
        ground: list[int]  # RGB 0..255 laid under transparent parts
        geometry: Geometry
        augment: Augment

        def __post_init__(self) -> None:
            if len(self.ground) != 3 or not all(0 <= value <= 255 for value in self.ground):
                raise ConfigError("data.ground", f"is {self.ground}", "give red, green, blue, each 0 to 255")
            if not 1 <= self.max_pixels <= PILLOW_LIMIT:
                raise ConfigError(
                    "data.max_pixels", f"is {self.max_pixels}", f"give 1 to {PILLOW_LIMIT} (Pillow's limit)"
                )

    @property
    def variants(self) -> int:
        return self.config.augment.variants

    def variant(self, row: Row, number: int) -> Row:
        if self.variants == 1:
            return row
        look = self.config.augment.look(row.id, number, row.extra["captions"])
        return replace(row, prompt=look.caption, extra={**row.extra, "look": look})

    @abstractmethod
    def find(self) -> Found:
        """All entries in a fixed order. Raises ConfigError when there is nothing to look at."""

    def rows(self) -> list[Row]:
        found, rows, faults, near = self.find(), [], [], _Near()
        measures = self._measures([file for entry in found.entries for given in entry.files.values() for file in each(given)])
        for entry in tqdm(found.entries, "data", unit="row", disable=not sys.stderr.isatty(), leave=False):
            fit, reasons = self._look_at(entry, measures, near)
            if reasons:
                faults.append((entry, "; ".join(reasons)))
            else:
                rows += self._rows(entry, fit)
        self._settle(found, rows, faults)
        return rows

    def place(self) -> str:
        return "" if self.config.path is None else str(Path(self.config.path).expanduser().resolve())

    def gone(self) -> bool:
        return self.config.path is not None and missing(Path(self.place())) == "does not exist"

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        wanted, look = self.names if names is None else names, row.extra.get("look", Look(row.prompt))
        inputs: dict[str, Any] = {"prompt": row.prompt} if "prompt" in wanted else {}
        for name, file in row.files.items():
            if name in wanted:
                several = [self._loaded(one, row, look) for one in each(file)]
                inputs[name] = several if isinstance(file, tuple) else several[0]
        return inputs

    def _loaded(self, file: File, row: Row, look: Look) -> Tensor:
        try:
            return self._decoded(file, row, look)
        except picture.PictureFault as error:
            raise DataError([f"{file}: {error}"], "repair or remove it; data.check=full finds such files early") from error

    def _decoded(self, file: File, row: Row, look: Look) -> Tensor:
        """uint8 [3, H, W] with (H, W) = row.size. Raises PictureFault."""
        upright = picture.read(file, self.config.max_pixels, tuple(self.config.ground))
        return picture.to_tensor(self._shaped(upright, row.size, look))

    def _shaped(self, upright: Image.Image, size: tuple[int, int], look: Look) -> Image.Image:
        return self.config.geometry.apply(ImageOps.mirror(upright) if look.flipped else upright, size, look.at)

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        look = row.extra.get("look") or Look(row.prompt)
        seen = [] if (look.flipped, look.at) == (False, CENTRE) else [look.flipped, look.at]
        first = next(iter(row.files))
        return {
            "prompt": digest("prompt", row.prompt),
            # A further picture is cut to the size of the first one.
            **{name: self._content(file, hash_file, [self._rules, *([] if name == first else [row.size]), *seen])
               for name, file in row.files.items()},
        }  # fmt: skip

    def _content(self, file: File | tuple[File, ...], hash_file: HashFile, rules: Sequence[Any]) -> bytes:
        if isinstance(file, tuple):
            return digest("pictures", [self._content(one, hash_file, rules) for one in file])
        return digest("picture", content(file, hash_file), *rules)

    @cached_property
    def _rules(self) -> Encoded:
        return Encoded.of(self._made_by())

    def _made_by(self) -> dict[str, Any]:
        """All that makes a picture from a file's bytes."""
        given = {name: value for name, value in asdict(self.config.geometry).items() if value is not None}
        geometry = {**given, "mode": self.config.geometry.mode.value}
        return {**self.decoders(), "ground": self.config.ground, "geometry": geometry}

    def decoders(self) -> dict[str, Any]:
        return {"decoding": picture.DECODING, "resizing": RESIZING, "pillow": PIL.__version__}

    def _look_at(self, entry: Entry, measures: Iterator[Any], near: _Near) -> tuple[dict[str, Any], list[str]]:
        """What the row's first picture gives it, and everything that is wrong with its pictures and captions."""
        fits, reasons = [], []
        for name, file in ((name, file) for name, given in entry.files.items() for file in each(given)):
            said = "" if len(entry.files) == 1 else f"{name} {file.name} "
            try:
                measured = next(measures)
                if isinstance(measured, FAULTS):
                    raise measured
                fits.append(self._fit(file, measured))
            except FAULTS as error:
                why = absence(file)
                reasons.append(f"{file} {why}{near.hint(file)}" if why else f"{said}{error}")
        return (fits[0] if fits else {}), [*reasons, *entry.faults]

    def _measures(self, files: Sequence[Any]) -> Iterator[Any]:
        """What each file says of itself, for `_fit`, or why it cannot be used."""
        return sizes_of(files, self.config.max_pixels, self._full, self.looks)

    def _fit(self, file: Any, measured: Any) -> dict[str, Any]:
        """What a row gets from its first picture, `size` at least. Raises PictureFault, ValueError."""
        return {"size": self.config.geometry.target(*measured)}

    @property
    def _full(self) -> bool:
        """Whether every picture is decoded now. Which rows to skip has to be known before the cache is filled."""
        c = self.config
        return c.check is Check.full or (
            c.check is Check.auto and (c.on_error is OnError.skip or not self.read_before_training)
        )

    def _rows(self, entry: Entry, fit: Mapping[str, Any]) -> list[Row]:
        """One, or one for each caption."""
        more, shape = fit.get("extra", {}), {name: value for name, value in fit.items() if name != "extra"}
        row = partial(Row, source=next(iter(entry.files.values())), files=entry.files, **shape)
        if len(entry.captions) == 1 or self.config.augment.caption.several is Several.random:
            return [row(id=entry.id, prompt=entry.captions[0], extra={**more, "captions": entry.captions})]
        return [
            row(id=f"{entry.id}#{digest(caption).hex()[:ID_HEX]}", prompt=caption, extra={**more, "captions": [caption]})
            for caption in entry.captions
        ]

    def _settle(self, found: Found, rows: list[Row], faults: list[tuple[Entry, str]]) -> None:
        """Stop or skip as configured; `skipped` says what was left out and why. Raises DataError."""
        self.ignored = found.ignored
        self.skipped = [(entry.id, reason) for entry, reason in faults]
        if faults and (self.config.on_error is OnError.stop or not rows):
            lines = [f"{entry.where}: {reason}" for entry, reason in faults]
            which = f"{len(faults)} of {len(faults) + len(rows)} rows"
            remedy = "repair them" if not rows else "repair them, or leave them out with data.on_error=skip"
            raise DataError(lines, f"data.path: {which} cannot be used; {remedy}{found.unread}")
        if found.ignored:
            log.info("%s: %d hidden or other files ignored%s", self.place(), found.ignored, found.unread)


def each(file: File | tuple[File, ...]) -> tuple[File, ...]:
    return file if isinstance(file, tuple) else (file,)


class _Near:
    """Names like that of a missing file; each folder is listed once."""

    def __init__(self) -> None:
        self._names: dict[Path, list[str]] = {}

    def hint(self, missing: Path) -> str:
        if missing.parent not in self._names:
            self._names[missing.parent] = self._listed(missing.parent)
        names = [name for name in self._names[missing.parent] if name != missing.name]  # as a link to nothing has
        near = get_close_matches(missing.name, names, n=1)
        return f", but there is {near[0]}" if near else ""

    @staticmethod
    def _listed(folder: Path) -> list[str]:
        """At most so many that comparing spelling stays quick; none of a folder that cannot be read."""
        try:
            return [entry.name for entry in islice(os.scandir(folder), MOST_COMPARED)]
        except OSError:
            return []
