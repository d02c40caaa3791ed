"""Values and shards that were found damaged: set aside, so that they count as missing and are made again. No torch.

One small file each: written atomically, named after the shard and the value, so that two processes that find the same
fault write the same file.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrun.cache.layout import SHARD_NAME
from flowrun.disk import saving
from flowrun.files import write_atomic
from flowrun.launch import OWN

FAULT_NAME = re.compile(SHARD_NAME.pattern + r"(\.\d+)?\.json")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """One damaged value, or a whole damaged file (`value` and `key` are None then). `key`: hexadecimal."""

    shard: str
    value: int | None
    key: str | None
    row: str
    what: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.shard}: {self.what}"
        return f"row {self.row!r}: value {self.key} in {self.shard} is damaged ({self.what})"


class Quarantine:
    """The faults recorded in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, fault: Fault) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = fault.shard if fault.value is None else f"{fault.shard}.{fault.value}"
        with saving(self.folder, "what was found damaged"):
            write_atomic(self.folder / f"{name}.json", json.dumps(asdict(fault)).encode())
        log.warning("cache: %s; it is set aside and counts as missing", fault, extra=OWN)

    def __iter__(self) -> Iterator[tuple[Path, Fault]]:
        for path in sorted(self.folder.glob("*.json")):
            if match := FAULT_NAME.fullmatch(path.name):
                try:
                    yield path, Fault(**json.loads(path.read_text()))
                except (ValueError, TypeError):  # written by someone else: all of the shard counts as damaged
                    shard = path.name.removesuffix(".json").removesuffix(match[4] or "")
                    yield path, Fault(shard, None, None, "", f"the note about it, {path.name}, cannot be read")

    def shards(self) -> set[str]:
        """Shards that are set aside whole."""
        return {fault.shard for _, fault in self if fault.value is None}

    def values(self) -> set[tuple[str, int]]:
        """(shard, value number) of single values."""
        return {(fault.shard, fault.value) for _, fault in self if fault.value is not None}
