"""Appending values to a cache: gathered in memory, written shard by shard. Any number of writers may work at once."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from flowrun.cache.catalog import Catalog
from flowrun.cache.shard import ShardBuilder, Stored, checksum
from flowrun.cache.values import encode
from flowrun.files import new_writer


class Writer:
    """Use it as a context: leaving it flushes, also on errors, so that finished work is kept.

    A kill loses at most what was put since the last flush: `flush_mb` megabytes (1e6 bytes) or `flush_s` seconds.
    """

    def __init__(self, catalog: Catalog, flush_mb: float, flush_s: float) -> None:
        self.catalog, self.flush_bytes, self.flush_s = catalog, flush_mb * 1e6, flush_s
        self.name, self.shards = new_writer(), 0
        self._waiting = ShardBuilder()
        self._first_at = self._last_at = time.monotonic()
        catalog.layout.create()
        self._mark = catalog.layout.writers / self.name
        self._mark.touch()

    def put(self, key: bytes, value: Any, row_id: str, field: str = "value") -> bool:
        """Store a copy of `value` unless `key` is known. Returns whether it was new.

        row_id: named when the value is refused or found damaged. field: a word for what it is; names the column.
        Raises BadValue (NaN, infinity, unknown types; nothing is stored), Failure (disk full).
        """
        new = key not in self._waiting.keys and self.catalog.index.find([key])[0] < 0
        if new:
            text, leaves = encode(value, row_id, field)
            if not self._waiting.keys:
                self._first_at = time.monotonic()
            self._waiting.add(Stored(key, row_id, field, text, tuple(leaves)), checksum(key, text, leaves))
        self._flush_if_due()
        return new

    def _flush_if_due(self) -> None:
        """Between two puts nothing is written, so what would be too old after one more such pause is written now."""
        now = time.monotonic()
        pause, self._last_at = now - self._last_at, now
        if self._waiting.nbytes >= self.flush_bytes or now - self._first_at + pause >= self.flush_s:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting as one shard. Raises Failure when the disk is full; the values go on waiting then."""
        if not self._waiting.keys:
            return
        self._waiting.write(self.catalog.layout.shards / f"{self.name}-{self.shards:05d}.safetensors")
        self.shards += 1
        self._waiting = ShardBuilder()
        self._mark.touch()
        self.catalog.refresh()

    def close(self) -> None:
        """Flush, and take the writer's mark away."""
        try:
            self.flush()
        finally:
            self._mark.unlink(missing_ok=True)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
