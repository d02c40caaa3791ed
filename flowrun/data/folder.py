"""A folder of pictures, searched through its sub-folders, each with its caption in a file of the same stem."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrun.config import ConfigError
from flowrun.data import _picture as picture
from flowrun.data._beside import Beside, folder, tell_shared
from flowrun.data._listing import list_folder
from flowrun.data._pictures import Found


class Folder(Beside):
    """Rows named by path relative to `path`, with `/`, in sorted order: "cats/tom.jpg".

    pictures: further pictures of each row, input name -> a folder with files of the same relative names, whatever their endings."""

    not_content = (*Beside.not_content, "pictures")

    @dataclass(kw_only=True, slots=True)
    class Config(Beside.Config):
        pictures: dict[str, str]

        def __post_init__(self) -> None:
            Beside.Config.__post_init__(self)
            if taken := {"image", "prompt"} & set(self.pictures):
                raise ConfigError(f"data.pictures.{min(taken)}", "is the name of what data.path holds", "choose another name")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.names = ("image", *config.pictures, "prompt")

    def find(self) -> Found:
        root = folder(self.config.path)
        listing = list_folder(root, self.config.caption.ending)
        if not listing.pictures and not listing.faults:
            seen = f"{listing.ignored} other files" if listing.ignored else "no files"
            kinds = f"pictures end in {', '.join(picture.EXTENSIONS)}; data=video reads videos"
            raise ConfigError("data.path", f"{root} holds no pictures ({seen})", kinds)
        tell_shared(listing.pictures, self.config.caption.ending)
        beside = {name: _by_stem(folder(path, f"data.pictures.{name}")) for name, path in self.config.pictures.items()}
        entries = self._unlisted(root, listing)
        for name in listing.pictures:
            partners, faults = _partners(name, beside)
            entries.append(self._entry(root, listing, name, {"image": root / name, **partners}, faults))
        return Found(entries, listing.ignored, listing.unread())


def _by_stem(root: Path) -> tuple[Path, dict[str, list[str]]]:
    """The folder, and its pictures by relative name without the ending."""
    found: dict[str, list[str]] = {}
    for name in list_folder(root, "").pictures:
        found.setdefault(os.path.splitext(name)[0], []).append(name)
    return root, found


def _partners(
    name: str, beside: Mapping[str, tuple[Path, Mapping[str, Collection[str]]]]
) -> tuple[dict[str, Path], list[str]]:
    """The row's further pictures by input name, and what is wrong with them."""
    files, faults, stem = {}, [], os.path.splitext(name)[0]
    for given, (root, by_stem) in beside.items():
        found = by_stem.get(stem, ())
        if len(found) == 1:
            (only,) = found
            files[given] = root / only
        else:
            what = f"several pictures, {', '.join(found)}," if found else "no picture"
            faults.append(f"there is {what} of its name in {root} for {given}")
    return files, faults
