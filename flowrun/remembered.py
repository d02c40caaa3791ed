"""Rows of which only the cache is left: when the data's folder is gone, training goes on from the newest manifest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from flowrun.cache.key import KEY_BYTES
from flowrun.cache.keyplan import Output
from flowrun.cache.manifest import Kept, Manifest, newest_manifest
from flowrun.config import DataError, Run
from flowrun.data import Row, Source
from flowrun.files import HashFile
from flowrun.graph import Unit
from flowrun.prompts import NO_PICTURE

UNKNOWN = bytes(KEY_BYTES)  # key of a value that the manifest does not list: no store has it


class Remembered(Source):
    """Rows as the manifest lists them. Nothing can be loaded: every unit that reads the data must be cached."""

    names = ()

    def __init__(self, manifest: Manifest, source: Source) -> None:
        """source: the one that is gone."""
        self.manifest, self.variants, self.not_content = manifest, source.variants, source.not_content
        listed = [row for row in manifest.rows() if row.size != NO_PICTURE]
        self.skipped = [(row.id, row.fault) for row in listed if row.fault]
        self.ignored = 0
        self._listed = {row.id: row for row in listed if not row.fault}

    def rows(self) -> list[Row]:
        return [Row(id=row.id, prompt=row.caption, size=row.size, frames=row.frames) for row in self._listed.values()]

    def place(self) -> str:
        return self.manifest.parts.place

    def stamp(self, row: Row) -> bytes:
        """Of the content the row had, as it was written down."""
        return self._listed[row.id].source

    def load(self, row: Row, names: Collection[str] | None = None) -> dict[str, Any]:
        raise DataError([f"{row.id}: its data are gone"], f"only what {self.manifest.path} lists is left")

    def fingerprints(self, row: Row, hash_file: HashFile) -> dict[str, bytes]:
        return {"row": self._listed[row.id].source}

    def keys(self, row: Row, variant: int, outputs: Sequence[Output], units: Sequence[Unit]) -> list[bytes]:
        """The keys under which the row's outputs were stored."""
        known = self._listed[row.id].keys
        return [known.get(Kept(variant, units[i].name, *param), UNKNOWN) for i, param in outputs]


def remember(run: Run, source: Source) -> Remembered | None:
    """What the cache remembers of the configured data in their place, or None."""
    manifest = newest_manifest(Path(run.cache.root).absolute(), run.model["name"], run.data["source"], source.place())
    return None if manifest is None else Remembered(manifest, source)
