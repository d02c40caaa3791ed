"""Tar archives as webdataset lays them out: `a/b.jpg` and `a/b.txt` (or `.json`) side by side make a row."""

from __future__ import annotations

import logging
import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flowrun.config import ConfigError, DataError
from flowrun.data import _picture as picture
from flowrun.data._captions import Caption, CaptionFault, captions_in
from flowrun.data._member import Member
from flowrun.data._pictures import Entry, Found, Pictures
from flowrun.files import missing

log = logging.getLogger(__name__)

MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Tar(Pictures):
    """Rows named by archive and member, without the ending: "00000.tar/cats/tom"."""

    @dataclass(kw_only=True, slots=True)
    class Config(Pictures.Config):
        caption: Caption

    def find(self) -> Found:
        found = Found()
        for archive in _archives(self.config.path):
            grouped = _grouped(archive)
            with open(archive, "rb") as file:
                for name, parts in grouped.items():
                    self._add(found, f"{archive.name}/{name}", f"{archive}/{name}", parts, file)
        if not found.entries:
            raise ConfigError("data.path", f"{self.place()} holds no pictures", f"pictures end in {', '.join(picture.EXTENSIONS)}")
        return found

    def _add(self, found: Found, row_id: str, where: str, parts: Sequence[tuple[str, Member]], archive: BinaryIO) -> None:
        """parts: (ending, member) of one name, in the archive's order."""
        rule, members = self.config.caption, dict(parts)
        pictures = [ending for ending in members if ending in picture.EXTENSIONS]
        foreign = [ending for ending in members if ending in picture.UNREAD and rule.ending in members and not pictures]
        found.ignored += len(members) - len(pictures + foreign) - (rule.ending in members and bool(pictures + foreign))
        if foreign:
            readable = row_id.encode("utf-8", "backslashreplace").decode()
            found.entries.append(Entry(readable, where, {}, faults=[picture.not_read(foreign[0])]))
        if not pictures:
            return
        captions, faults = [], [f"{member.name} stands twice in the archive" for ending, member in parts if members[ending] is not member]
        if len(pictures) > 1:
            faults.append(f"has several pictures: {', '.join(pictures)}")
        if not _is_text(row_id):
            row_id, faults = row_id.encode("utf-8", "backslashreplace").decode(), [*faults, "its name is not valid UTF-8"]
        try:
            if rule.ending not in members:
                raise CaptionFault(f"has no caption {rule.ending}, only {', '.join(members)}")
            captions = captions_in(members[rule.ending].read_from(archive), rule, rule.ending)
        except CaptionFault as error:
            faults.append(str(error))
        found.entries.append(Entry(row_id, where, {"image": members[pictures[0]]}, captions, faults))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _archives(path: str | None) -> list[Path]:
    """One archive, or all in a folder. Raises ConfigError."""
    if path is None:
        raise ConfigError("data.path", "names no archive", "give data.path=FILE.tar, or a folder of them")
    place = Path(path).expanduser().absolute()
    if why := missing(place):
        raise ConfigError("data.path", f"{place} {why}", "give a tar archive, or a folder of them")
    found = sorted(place.glob("*.tar")) if place.is_dir() else [place]
    if not found:
        raise ConfigError("data.path", f"{place} holds no .tar files", "give a tar archive, or a folder of them")
    return found


def _grouped(archive: Path) -> dict[str, list[tuple[str, Member]]]:
    """Name up to its first dot -> (ending, member). Raises ConfigError for a compressed archive, DataError for damage."""
    with open(archive, "rb") as file:
        begin = file.read(6)
    for magic, kind in MAGIC.items():
        if begin.startswith(magic):
            fix = "unpack it once, `gunzip FILE`: pictures are compressed already, and are read in place"
            raise ConfigError("data.path", f"{archive} is compressed with {kind}", fix)
    rows: dict[str, list[tuple[str, Member]]] = {}
    try:
        for member in _members(archive):
            folder, _, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")
            if stem:  # hidden files have none
                rows.setdefault(f"{folder}/{stem}" if folder else stem, []).append((f".{ending.lower()}", member))
    except tarfile.TarError as error:
        raise DataError([f"{archive} cannot be read: {error}"], "data.path: get the archive again") from error
    return rows


def _members(archive: Path) -> Iterator[Member]:
    size, seen = archive.stat().st_size, {}
    with tarfile.open(archive, "r:") as tar:
        for info in tar:
            if info.offset_data + info.size > size:
                raise tarfile.ReadError(f"{info.name} is cut short")
            name = posixpath.normpath(info.name)
            if info.isfile():
                seen[name] = member = Member(archive, name, info.offset_data, info.size)
                yield member
            elif info.islnk() or info.issym():  # a picture with several names is stored once
                target = posixpath.normpath(info.linkname if info.islnk() else posixpath.join(posixpath.dirname(name), info.linkname))
                if target in seen:
                    yield Member(archive, name, seen[target].offset, seen[target].size)
                elif name.lower().endswith(picture.EXTENSIONS):
                    raise tarfile.ReadError(f"{name} is a link to {target}, which is not in the archive before it")
        _check_end(archive, tar.offset)


def _check_end(archive: Path, offset: int) -> None:
    """The library takes a damaged header, or zeros, for the archive's end. Raises ReadError when anything follows."""
    with open(archive, "rb") as file:
        file.seek(offset)
        if not (rest := file.read(tarfile.BLOCKSIZE)):
            log.warning("%s has no end mark: it may have been cut short", archive)
        while rest:
            if rest.strip(b"\0"):
                raise tarfile.ReadError(f"what follows byte {offset:,} is damaged, or another archive's")
            rest = file.read(1 << 20)
