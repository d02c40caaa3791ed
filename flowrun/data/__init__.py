"""Where rows come from: pictures with captions. A source lists its rows and decodes them one at a time.

A new source is one module here with one subclass of `Source`, and one option file in conf/data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flowrun.cache.looks import Looks
from flowrun.config import ConfigError
from flowrun.files import HashFile
from flowrun.registry import SOURCES
from flowrun.sound import Hearing


@dataclass(kw_only=True, slots=True)
class Row:
    """One sample. `id` is stable: it survives reordering, additions and moves of the data root.

    size: (height, width) in pixels of what `Source.load` returns, upright and after geometry; for prompts without
    pictures that of the pictures to sample. frames: of a video; None for pictures. Batches are built on `shape`.
    source: the file that messages name, a path or a part of a file; None when the picture is made, not read. files: pictures by input name.
    extra: what else the source knows about it.
    """

    id: str
    prompt: str
    size: tuple[int, int]
    source: Any = None
    files: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    frames: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(height, width), of a video (frames, height, width)."""
        return self.size if self.frames is None else (self.frames, *self.size)


class Source(ABC):
    """Rows of a data set. `names`: the shared-scope inputs that `load` gives to the units.

    After `rows()`, `skipped` holds (row id, reason) of the rows left out under `on_error: skip`, and `ignored` counts
    the files that are neither pictures nor captions. `variants` counts the forms in which each row may be seen, all
    equally often; with more than one of them `variant` says which is which.
    """

    Config: ClassVar[type]
    names: ClassVar[tuple[str, ...]] = ("image", "prompt")
    not_content: ClassVar[tuple[str, ...]] = ("path", "on_error", "check")  # settings that reach no value

    variants: int = 1
    looks: Looks | None = None  # set by the run: what is known of pictures that were looked at before
    read_before_training: bool = False  # set by the run: its cache stage reads every row to the end before training does

    def __init__(self, config: Any) -> None:
        self.config = config
        self.skipped: list[tuple[str, str]] = []
        self.ignored = 0

    def listen(self, hearing: Hearing) -> None:
        """Give `audio` too, where the source can: fp32 [channels, samples] in [-1, 1] of as much time as the row's frames last.

        Raises ConfigError for settings that do not go with it."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """All rows in a fixed order, without decoding more than the configuration asks for.

        Raises ConfigError when there is no data to look at, DataError with every fault of the data at once."""

    def variant(self, row: Row, number: int) -> Row:
        """The row as its variant `number` sees it, 0 ... variants - 1, with the same id and size; always the same one."""
        return row

    def decoders(self) -> dict[str, Any]:
        """What turns files into pixels, by name, and its version: part of the keys of all that is decoded."""
        return {}

    def place(self) -> str:
        """Where the data lie, as one name; empty when they come with a package."""
        return ""

    def gone(self) -> bool:
        """True when the place that holds the data is not there at all, so that only a cache can know the rows."""
        return False

    @abstractmethod
    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        """The row's inputs among `names` (None: all). A picture: uint8 [3, H, W] RGB with (H, W) = row.size, or a list of such;
        a video: uint8 [F, 3, H, W] with F = row.frames; prompt: str.

        A picture is decoded only when it is asked for. Raises DataError naming the file when it cannot be read."""

    @abstractmethod
    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        """One content key per input name: the bytes it comes from and every rule that made it from them."""


def make_source(settings: Mapping[str, Any], key: str = "data") -> Source:
    """settings: a section like `data`. key: its name, for messages. Raises ConfigError."""
    name = settings.get("source")
    if not isinstance(name, str):
        raise ConfigError(f"{key}.source", f"is {name!r}", f"name one: {', '.join(SOURCES.names())}")
    cls = SOURCES.find(name, f"{key}.source")
    return cls(SOURCES.build(key, cls, settings))
