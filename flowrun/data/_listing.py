"""What lies in a data folder: pictures, and the files that are neither pictures nor their captions."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from flowrun.data._picture import EXTENSIONS, UNREAD, not_read
from flowrun.outputs import are_results

log = logging.getLogger(__name__)

SHOWN = 3  # names of files in a message
MOST_COMPARED = 200  # names; spelling is compared pair by pair, so in large folders only the stem counts


@dataclass
class Listing:
    """pictures: sorted, relative to the root with `/`; others: folder -> names of unused visible files;
    faults: name -> reason for what could not be listed."""

    pictures: list[str] = field(default_factory=list)
    others: dict[Path, list[str]] = field(default_factory=dict)
    hidden: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    _by_stem: dict[Path, list[str]] = field(default_factory=dict)

    @property
    def ignored(self) -> int:
        return self.hidden + sum(map(len, self.others.values()))

    def add_others(self, folder: Path, names: list[str]) -> None:
        self.others[folder] = names
        for name in names:
            self._by_stem.setdefault(folder / _stem(name), []).append(name)

    def near(self, path: Path) -> list[str]:
        """Unused files of the folder whose names resemble that of `path`, which is missing."""
        near = self._by_stem.get(path.parent / _stem(path.name), [])
        others = self.others.get(path.parent, [])
        if not near and len(others) <= MOST_COMPARED:
            near = get_close_matches(path.name, others, n=SHOWN, cutoff=0.8)
        return near[:SHOWN]

    def unread(self) -> str:
        """Words about visible files that nothing reads, such as a metadata file at the root; or none."""
        names = [name for folder in sorted(self.others) for name in self.others[folder]]
        more = ", ..." if len(names) > SHOWN else ""
        return f" (not read: {', '.join(names[:SHOWN])}{more})" if names else ""


def _stem(name: str) -> str:
    """What stands before the first dot, in lower case: `cat` for Cat.png.txt."""
    return name.casefold().partition(".")[0]


def list_folder(root: Path, captions: str, endings: Sequence[str] = EXTENSIONS, folders: bool = False) -> Listing:
    """Walks `root`, links to folders included, each real folder once, and none with results of runs below it.

    captions: the ending of caption files, `.txt`.

    endings: of what counts as a picture. folders: whether folders have captions too."""
    found, seen = Listing(), {os.path.realpath(root)}

    def unreadable(error: OSError) -> None:
        found.faults[Path(error.filename).relative_to(root).as_posix()] = f"the folder cannot be read: {error.strerror}"

    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=unreadable):
        if folder != str(root) and are_results(folder, files):
            log.info("%s holds results of runs, which are no data", folder)
            subfolders.clear()
            continue
        subfolders[:] = sorted(
            name for name in subfolders if not name.startswith(".") and _new(Path(folder, name), seen)
        )
        used = {f"{name}{captions}" for name in subfolders} if folders else set()
        _sort_out(root, Path(folder), files, captions, endings, used, found)
    found.pictures.sort()
    return found


def _new(folder: Path, seen: set[str]) -> bool:
    real = os.path.realpath(folder)
    if real in seen:
        return False
    seen.add(real)
    return True


def _sort_out(
    root: Path, folder: Path, files: list[str], ending: str, endings: Sequence[str], used: set[str], found: Listing
) -> None:
    """Adds what one folder holds. used: names of files that are known to be captions."""
    visible = sorted(name for name in files if not name.startswith("."))
    found.hidden += len(files) - len(visible)
    pictures = [name for name in visible if os.path.splitext(name)[1].lower() in endings]
    used |= {*pictures, *(os.path.splitext(name)[0] + ending for name in pictures)}
    foreign = _foreign(visible, ending, used) if endings == EXTENSIONS else {}
    used |= {*foreign, *foreign.values()}
    if others := [name for name in visible if name not in used]:
        found.add_others(folder, others)
    inside = folder.relative_to(root).as_posix()
    for name in (*pictures, *foreign):
        path = name if inside == "." else f"{inside}/{name}"
        readable = path.encode("utf-8", "backslashreplace").decode()
        if name in foreign:
            found.faults[readable] = not_read(os.path.splitext(name)[1])
        elif readable != path:
            found.faults[readable] = "the file's name is not valid UTF-8"
        else:
            found.pictures.append(path)


def _foreign(names: Sequence[str], ending: str, used: Collection[str]) -> dict[str, str]:
    """Pictures in formats that are not read, each with a caption that is no other picture's: name -> the caption's."""
    beside = {name: os.path.splitext(name)[0] + ending for name in names if os.path.splitext(name)[1].lower() in UNREAD}
    there = set(names) - set(used)
    return {name: caption for name, caption in beside.items() if name in there and caption in there}
