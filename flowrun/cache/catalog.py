"""The shards of one cache as a whole: finds keys, opens shards, checks values, sets damaged ones aside. No torch."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrun.cache.index import Index
from flowrun.cache.layout import SHARD_NAME, Layout
from flowrun.cache.quarantine import Fault, Quarantine
from flowrun.cache.shard import Form, Shard
from flowrun.cache.tensorfile import ITEM_BYTES, Damaged, OtherFormat
from flowrun.cache.threads import for_each
from flowrun.config import Failure, Verify

LARGE_BYTES = 1 << 20  # read at once; from here on it pays to wake other threads
MOST_OPEN = 256  # shards; each holds two file descriptors, and many systems allow a process 1024
REMEDY = "run stage=cache to make it again"
Take = Callable[[int, Form], tuple[Any, Sequence[Any]]]
log = logging.getLogger(__name__)


class MissingValue(Failure):
    """No shard holds the key."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        super().__init__(f"the cache has no value {key.hex()}", REMEDY)


class DamagedValue(Failure):
    """The key's only copy was found damaged, and set aside."""

    def __init__(self, key: bytes, fault: Fault) -> None:
        self.key, self.fault = key, fault
        whole = f"cache: value {key.hex()} lies in a damaged file: {fault}"
        super().__init__(whole if fault.value is None else f"cache: {fault}", REMEDY)


class Catalog:
    """`index` says where every key is, as of the last `refresh`. Safe to read from several threads."""

    def __init__(self, root: Path, verify: Verify) -> None:
        """`root` need not exist. verify: `never` trusts every value; else each is checked at its first read here."""
        self.layout, self.verify = Layout(Path(root)), verify
        self.quarantine = Quarantine(self.layout.quarantine)
        self._open: dict[str, Shard] = {}  # opened first, first
        self._aside: list[Fault] = []  # found by this process; kept here too in case the cache cannot be written
        self._foreign: set[str] = set()  # shards of another version of this program
        self._lock = threading.RLock()
        self.index = self.saved = self._load_index()
        self.refresh()

    def _load_index(self) -> Index:
        try:
            return Index.load(self.layout.index)
        except FileNotFoundError:
            pass  # a cache that never had one, or lost it: the shards say everything
        except Damaged as fault:
            log.warning("cache: %s; the index is made again from the shards", fault)
        return Index.empty()

    def refresh(self) -> None:
        """Take in the shards that appeared, and forget those that went, since the last look."""
        with self._lock:
            aside = self.quarantine.shards() | {fault.shard for fault in self._aside if fault.value is None}
            present = {name: size for name, size in self.present().items() if name not in aside | self._foreign}
            index = self.index.updated(present, self._keys)
            values = self.quarantine.values() | {(f.shard, f.value) for f in self._aside if f.value is not None}
            self.index = index.without(values) if values else index
            for name in [name for name in self._open if name not in self.index.sizes]:
                del self._open[name]

    def present(self) -> dict[str, int]:
        """Name and size in bytes of every shard file in the folder, by name. Other files are not looked at."""
        if not self.layout.shards.is_dir():
            return {}
        names = sorted(name for name in os.listdir(self.layout.shards) if SHARD_NAME.fullmatch(name))
        return {name: size for name in names if (size := self._size(name)) is not None}

    def _size(self, name: str) -> int | None:
        try:
            return os.stat(self.layout.shards / name).st_size
        except FileNotFoundError:  # merged away between listing and looking
            return None

    def _keys(self, name: str) -> np.ndarray | None:
        try:
            return self.open(name).keys
        except FileNotFoundError:
            return None
        except OtherFormat as fault:
            log.warning("cache: %s; it is left alone", fault)
            self._foreign.add(name)
        except Damaged as fault:
            self.set_aside(Fault(name, None, None, "", fault.why))
        return None

    def save_index(self) -> None:
        """Write the index file if it differs from what this process knows."""
        self.refresh()
        if self.index is not self.saved:
            self.index.save(self.layout.index)
            self.saved = self.index

    def open(self, name: str) -> Shard:
        """Raises FileNotFoundError, Damaged."""
        return self._open.get(name) or self._opened(name)

    def _opened(self, name: str) -> Shard:
        with self._lock:
            if name not in self._open:
                self._open[name] = Shard(self.layout.shards / name)
                if len(self._open) > MOST_OPEN:
                    del self._open[next(iter(self._open))]
            return self._open[name]

    def shards(self) -> Iterator[Shard]:
        """All of them, one after the other; damaged ones are set aside and left out."""
        for name in list(self.index.sizes):
            try:
                yield self.open(name)
            except FileNotFoundError:  # merged away meanwhile
                self.refresh()
            except Damaged as fault:
                self.set_aside(Fault(name, None, None, "", fault.why))

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that no shard holds, in order. With verify=full all are read, damaged ones are missing."""
        found = self.index.find(keys)
        missing = [key for key, entry in zip(keys, found, strict=True) if entry < 0]
        if self.verify is Verify.full:
            damaged = {key for key, entry in zip(keys, found, strict=True) if entry >= 0 and not self._reads(key)}
            missing = [key for key, entry in zip(keys, found, strict=True) if entry < 0 or key in damaged]
        return missing

    def _reads(self, key: bytes) -> bool:
        try:
            self.read([key], scratch)
        except (DamagedValue, MissingValue):  # the first has been logged by set_aside
            return False
        return True

    def read(self, keys: Sequence[bytes], take: Take) -> list[Any]:
        """What `take` makes of each value. Raises MissingValue, DamagedValue.

        take(place in keys, form) -> (result, buffers). It makes the memory that the value's tensors are to lie in; they
        are read into it and checked there: what is checked is what is used, and still in the processor's cache.
        """
        begun = [self._begin(n, place, take) for n, place in enumerate(self.index.places(keys))]
        if len(begun) > 1 and sum([memory.nbytes for reading in begun for memory in reading.memories]) >= LARGE_BYTES:
            for_each(self._finish, begun)
        else:
            for reading in begun:
                self._finish(reading)
        return [
            reading.result if reading.done else self._searched(n, key, reading.fault, take)
            for n, (key, reading) in enumerate(zip(keys, begun, strict=True))
        ]

    def _searched(self, n: int, key: bytes, fault: Fault | None, take: Take) -> Any:
        """The value from wherever else it is now: another process may have added it, or moved it to a larger shard."""
        while True:
            self.refresh()
            (place,) = self.index.places([key])
            if place is None:
                raise MissingValue(key) if fault is None else DamagedValue(key, fault)
            reading = self._begin(n, place, take)
            self._finish(reading)
            if reading.done:
                return reading.result
            fault = reading.fault or fault

    def _begin(self, n: int, place: tuple[str, int] | None, take: Take) -> _Reading:
        reading = _Reading()
        if place is not None:
            name, number = place
            try:
                shard = self.open(name)
                reading.form = shard.form_of(number)
                reading.result, reading.memories = take(n, reading.form)
                reading.shard, reading.number = shard, number
            except FileNotFoundError:  # another process merged the shard into a larger one
                pass
            except Damaged as fault:
                reading.fault = self.set_aside(Fault(name, None, None, "", fault.why))
        return reading

    def _finish(self, reading: _Reading) -> None:
        """Fill the memories and check them: then it is done, or a fault is set aside. Any thread may do this."""
        shard, number = reading.shard, reading.number
        if shard is None:
            return
        try:
            shard.fill(number, reading.memories)
        except Damaged as fault:
            reading.fault = self.set_aside(Fault(shard.name, None, None, "", fault.why))
            return
        if self.verify is not Verify.never and not shard.checked[number]:
            if not shard.matches(number, reading.form, reading.memories):
                reading.fault = self.set_aside(self.fault(shard, number))
                return
            shard.checked[number] = 1
        reading.done = True

    def listed(self, shard: Shard) -> list[int]:
        """Numbers of the shard's values that are not set aside."""
        return np.sort(self.index.value[self.index.inside(shard.name)]).tolist()

    def advise(self, name: str, number: int, advice: int) -> None:
        """A hint only, so a shard that cannot be opened is left to `read`, which says what is wrong with it."""
        with contextlib.suppress(FileNotFoundError, Damaged):
            self.open(name).advise(number, advice)

    def holds_intact(self, place: tuple[str, int] | None) -> bool:
        """Whether the value at `place` is there and its checksum is right."""
        if place is None:
            return False
        try:
            shard = self.open(place[0])
        except (FileNotFoundError, Damaged):
            return False
        return shard.is_intact(place[1])

    @staticmethod
    def fault(shard: Shard, number: int) -> Fault:
        return Fault(shard.name, number, shard.key(number).hex(), shard.row_id(number), "its checksum is wrong")

    def set_aside(self, fault: Fault) -> Fault:
        """Record the fault, so that its value (or shard) counts as missing for every process from now on."""
        self._aside.append(fault)
        try:
            self.quarantine.add(fault)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            log.warning("cache: %s; the cache cannot be written, so only this process knows", fault)
        if fault.value is not None or fault.shard in self.index.sizes:
            self.refresh()
        return fault


class _Reading:
    """One value on its way: where it lies, the memory it goes to, what came of it."""

    __slots__ = ("done", "fault", "form", "memories", "number", "result", "shard")

    def __init__(self) -> None:
        self.done, self.memories, self.number = False, (), 0
        self.fault: Fault | None = None
        self.shard: Shard | None = None
        self.result: Any = None


def scratch(n: int, form: Form) -> tuple[None, list[np.ndarray]]:
    """Takes values that are only to be checked."""
    return None, [np.empty(math.prod(shape) * ITEM_BYTES[code], np.uint8) for code, shape in form.kinds]
