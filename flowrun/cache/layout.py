"""Where a cache keeps what, and how its files are named. No torch.

    <root>/index.safetensors              derived from the shards, rebuilt at will
    <root>/shards/<writer>-<number>.safetensors
    <root>/manifests/<model>-<data>-<parts>.safetensors
    <root>/sources/<writer>-<number>.safetensors
    <root>/looks/<writer>-<number>.safetensors
    <root>/quarantine/<shard>[.<value>].json
    <root>/writers/<writer>               a mark that lasts as long as the writer; nobody waits for it
    <root>/maintenance.lock               held while shards are rewritten
    <root>/pace.json                      how long values took, for forecasts

Writers are named as in flowrun.files.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from flowrun.files import this_host

WRITER = r"(?P<host>[a-z0-9_]+)-(?P<process>\d+)-(?P<token>[0-9a-f]{12})"
SHARD_NAME = re.compile(WRITER + r"-\d{5,}\.safetensors")
MANIFEST_NAME = re.compile(r"[A-Za-z0-9_.]+-[A-Za-z0-9_.]+-[0-9a-f]{16}\.safetensors")
TEMP_NAME = re.compile(r"\..+\." + WRITER + r"\.part")
WRITER_NAME = re.compile(WRITER)
OTHER_HOST_S = 24 * 3600.0  # a file of another machine's process counts as abandoned after this long without a change


@dataclass(frozen=True)
class Layout:
    """The folders of the cache at `root`. Making a Layout touches nothing; `create` makes the folders."""

    root: Path

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def index(self) -> Path:
        return self.root / "index.safetensors"

    @property
    def pace(self) -> Path:
        return self.root / "pace.json"

    @property
    def manifests(self) -> Path:
        return self.root / "manifests"

    @property
    def sources(self) -> Path:
        return self.root / "sources"

    @property
    def looks(self) -> Path:
        return self.root / "looks"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def writers(self) -> Path:
        return self.root / "writers"

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.root, self.shards, self.manifests, self.sources, self.looks, self.quarantine, self.writers)

    def create(self) -> None:
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)


def is_alive(writer: re.Match[str], path: Path) -> bool:
    """Whether the process in `writer` may still be working on `path`; on another host, by the file's age."""
    if writer["host"] != this_host():
        return time.time() - path.stat().st_mtime < OTHER_HOST_S
    try:
        os.kill(int(writer["process"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to someone else
        return True
    return True
