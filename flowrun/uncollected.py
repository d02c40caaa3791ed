"""No search for garbage while a run is prepared, nor later among what was prepared. No torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, objects in cycles are kept. Modules, and the rows of large data, are millions of objects that all stay:
    Python would walk through them again and again, which takes a fifth of the time, and find nothing."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def set_apart() -> Iterator[None]:
    """Inside, what is there at the start is not walked through: one walk over modules and rows stalls a run for tenths of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
