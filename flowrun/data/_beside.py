"""Sources in a folder whose captions lie in files beside what they are about. Not a source: they derive from it."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrun.config import ConfigError
from flowrun.data._captions import Caption, CaptionFault, read_captions
from flowrun.data._listing import SHOWN, Listing
from flowrun.data._pictures import Entry, Pictures
from flowrun.files import missing

log = logging.getLogger(__name__)


class Beside(Pictures):
    @dataclass(kw_only=True, slots=True)
    class Config(Pictures.Config):
        caption: Caption

    def _entry(self, root: Path, listing: Listing, name: str, files: Mapping[str, Any], faults: Sequence[str] = ()) -> Entry:
        """name: relative to root; of a folder, with `/` at its end."""
        path = os.path.join(root, name.removesuffix("/"))
        text = (path if name.endswith("/") else os.path.splitext(path)[0]) + self.config.caption.ending
        captions = []
        try:
            captions = read_captions(text, self.config.caption, listing.near)
        except CaptionFault as error:
            faults = [*faults, str(error)]
        return Entry(name.removesuffix("/"), path, files, captions, faults)

    def _unlisted(self, root: Path, listing: Listing) -> list[Entry]:
        return [Entry(name, f"{root / name}", {}, faults=[reason]) for name, reason in listing.faults.items()]


def tell_shared(names: Sequence[str], ending: str) -> None:
    """Names the caption files that serve several files each. names: with endings, relative to the data's folder."""
    by_stem = defaultdict(list)
    for name in names:
        by_stem[os.path.splitext(name)[0]].append(name)
    shared = [f"{stem}{ending} for {', '.join(several)}" for stem, several in by_stem.items() if len(several) > 1]
    if shared:
        more = ", ..." if len(shared) > SHOWN else ""
        log.warning("%d captions serve several files each: %s%s", len(shared), "; ".join(shared[:SHOWN]), more)


def folder(path: str | None, key: str = "data.path") -> Path:
    """`path` as a folder that can be read. Raises ConfigError."""
    if path is None:
        raise ConfigError(key, "names no folder", f"give {key}=FOLDER")
    root = Path(path).expanduser().absolute()
    if why := missing(root):
        raise ConfigError(key, f"{root} {why}", "give an existing folder that you may read")
    if not root.is_dir():
        raise ConfigError(key, f"{root} is a file", "give the folder that holds it, or read a table with data=table")
    try:
        os.scandir(root).close()
    except OSError as error:
        raise ConfigError(key, f"{root} cannot be read: {error.strerror}", "give a folder that you may read") from error
    return root
