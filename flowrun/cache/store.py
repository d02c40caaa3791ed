"""The cache as its users see it: values by key."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrun.cache import merge
from flowrun.cache.catalog import Catalog
from flowrun.cache.quarantine import Fault
from flowrun.cache.values import Stack, take
from flowrun.cache.writer import Writer
from flowrun.config import Verify


class Store:
    """The values under `root`, as of the last `refresh` (and of this process's own flushes). Keys are 16 bytes.

    verify: `never` trusts every value; `first_read` checks each when this process first reads it; `full` also makes
    `missing` read, and so check, every value that it vouches for.
    """

    def __init__(self, root: Path, verify: Verify = Verify.first_read) -> None:
        self.catalog = Catalog(root, verify)

    def __len__(self) -> int:
        """Values that can be read; one that several shards hold counts as often."""
        return len(self.catalog.index)

    def refresh(self) -> None:
        """Take in what other processes wrote since."""
        self.catalog.refresh()

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that are not there or were found damaged, in order."""
        return self.catalog.missing(keys)

    def faults(self, keys: Collection[bytes]) -> list[Fault]:
        """Damage that was found and may be why these keys are missing: to their values, and to whole shards."""
        wanted = {key.hex() for key in keys}
        return [fault for _, fault in self.catalog.quarantine if fault.key is None or fault.key in wanted]

    def get(self, key: bytes) -> Any:
        """The value; its tensors lie in memory of their own. Raises MissingValue, DamagedValue."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        """Several values with one look-up. Raises MissingValue, DamagedValue."""
        return self.catalog.read(keys, take)

    def stack(self, keys: Sequence[bytes]) -> Tensor:
        """Values that are one tensor each, as one fresh tensor [len(keys), *shape]; every byte is copied once.

        Raises MissingValue, DamagedValue; ValueError for no keys, no tensors, or types or shapes that differ.
        """
        if not keys:
            raise ValueError("there is nothing to stack")
        stack = Stack(len(keys))
        self.catalog.read(keys, stack.take)
        return stack.batch

    def ahead(self, keys: Sequence[bytes]) -> None:
        """Have the system read these values from disk while the caller goes on. Unknown keys are passed over."""
        for place in self.catalog.index.places(keys):
            if place is not None:
                self.catalog.advise(*place, mmap.MADV_WILLNEED)

    def writer(self, flush_mb: float, flush_s: float) -> Writer:
        return Writer(self.catalog, flush_mb, flush_s)

    def merge(self) -> int:
        """For the end of a run: merge small shards, save the index. Returns how many shards were merged away."""
        return merge.merge(self.catalog)
