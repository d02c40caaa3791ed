"""Many files looked at: by several processes at once, and those not at all that are known."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import TypeVar

import PIL

from flowrun.cache.looks import Looks, Size, Ticket
from flowrun.config import Failure
from flowrun.data import _picture as picture
from flowrun.data._member import File

HEADERS, WHOLE = 2000, 64  # files; for fewer, starting processes takes longer than it saves
PORTION = 64  # files that a process takes at once
RULES = (picture.DECODING, PIL.__version__)
FAULTS = (picture.PictureFault, ValueError)
T = TypeVar("T")
F = TypeVar("F")


def each_of(look: Callable[[F], T], files: Sequence[F], least: int) -> Iterator[T | Exception]:
    """What `look` returns or raises for each file, in order. least: files from which on several processes look.

    Raises Failure when one of these was killed."""
    tried = partial(_tried, look)
    workers = min(_cores(), len(files) // PORTION)
    if len(files) < least or workers < 2:
        yield from map(tried, files)
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(workers, initializer=_begin)
    try:
        yield from pool.map(tried, files, chunksize=PORTION)
    except BaseException as error:  # nobody waits for the rest; a process that is left would keep this one from ending
        for process in set(active_children()) - others:
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise Failure("a process that looked at the data's files was killed", "is there enough memory?") from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def sizes_of(files: Sequence[File], max_pixels: int, full: bool, looks: Looks | None) -> Iterator[Size | Exception]:
    """(height, width) as displayed of each picture, in order, or why it cannot be used. looks: what is known of them."""
    tickets = [None if looks is None else _ticket(looks, file) for file in files]
    known = [None if ticket is None else looks.find(ticket, full) for ticket in tickets]
    known = [size if size is not None and size[0] * size[1] <= max_pixels else None for size in known]
    new = [file for file, size in zip(files, known, strict=True) if size is None]
    found = each_of(partial(picture.check, max_pixels=max_pixels, full=full), new, WHOLE if full else HEADERS)
    for ticket, size in zip(tickets, known, strict=True):
        if size is None:
            size = next(found)
            if ticket is not None and not isinstance(size, FAULTS):
                looks.add(ticket, full, size)
        yield size


def _begin() -> None:
    """In each process of several: Ctrl-C is for the one that started it, and it ends with that one. Nothing of that one's
    becomes garbage here: to search it would also copy all of it."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=_end_with, args=(parent_process().sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _tried(look: Callable[[F], T], file: F) -> T | Exception:
    try:
        return look(file)
    except FAULTS as fault:
        return fault


def _ticket(looks: Looks, file: File) -> Ticket | None:
    """None for a file that cannot be looked at: looking says why."""
    try:
        return looks.ticket(file, *RULES) if isinstance(file, Path) else looks.ticket(file.path, file.offset, file.size, *RULES)
    except (OSError, ValueError):
        return None


def _cores() -> int:
    """Of this process among those of its run on this machine."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return here // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
