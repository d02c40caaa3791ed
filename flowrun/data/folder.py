"""A folder of pictures, searched through its sub-folders, each with its caption in a file of the same stem."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flowrun.config import ConfigError
from flowrun.data import _picture as picture
from flowrun.data._captions import Caption, CaptionFault, read_captions
from flowrun.data._listing import list_folder
from flowrun.data._pictures import Entry, Found, Pictures
from flowrun.files import missing


class Folder(Pictures):
    """Rows named by path relative to `path`, with `/`, in sorted order: "cats/tom.jpg"."""

    @dataclass(kw_only=True, slots=True)
    class Config(Pictures.Config):
        caption: Caption

    def find(self) -> Found:
        root = folder(self.config.path)
        listing = list_folder(root, self.config.caption.ending)
        if not listing.pictures and not listing.faults:
            seen = f"{listing.ignored} other files" if listing.ignored else "no files"
            raise ConfigError(
                "data.path", f"{root} holds no pictures ({seen})", f"pictures end in {', '.join(picture.EXTENSIONS)}"
            )
        unlisted = [Entry(name, f"{root / name}", {}, faults=[reason]) for name, reason in listing.faults.items()]
        entries = []
        for name in listing.pictures:
            captions, faults = [], []
            try:
                captions = read_captions(root / name, self.config.caption, listing.near)
            except CaptionFault as error:
                faults = [str(error)]
            entries.append(Entry(name, f"{root / name}", {"image": root / name}, captions, faults))
        return Found([*unlisted, *entries], listing.ignored, listing.unread())


def folder(path: str | None) -> Path:
    """`path` as a folder that can be read. Raises ConfigError."""
    if path is None:
        raise ConfigError("data.path", "names no folder", "give data.path=FOLDER with pictures and captions")
    root = Path(path).expanduser().absolute()
    if why := missing(root):
        raise ConfigError("data.path", f"{root} {why}", "give an existing folder that you may read")
    if not root.is_dir():
        raise ConfigError("data.path", f"{root} is a file", "give the folder that holds it, or read a table with data=table")
    try:
        os.scandir(root).close()
    except OSError as error:
        raise ConfigError(
            "data.path", f"{root} cannot be read: {error.strerror}", "give a folder that you may read"
        ) from error
    return root
