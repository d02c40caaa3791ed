"""Several threads for one call, where its work is copying by the system and hashing, which other threads need not wait for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

Item = TypeVar("Item")

HELPERS = min(4, os.cpu_count() or 1) - 1  # more than a few threads do not copy faster


def for_each(act: Callable[[Item], None], items: Sequence[Item]) -> None:
    """act(item) for each item, by this thread and its helpers, who take the next item as they become free."""
    rest = iter(items)
    helpers = [_pool(os.getpid()).submit(_drain, act, rest) for _ in range(min(HELPERS, len(items) - 1))]
    _drain(act, rest)
    for helper in helpers:
        if not helper.cancel():  # one that never began has nothing left to do
            helper.result()


def _drain(act: Callable[[Item], None], rest: Iterator[Item]) -> None:
    for item in rest:
        act(item)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """By process, since threads do not survive a fork."""
    return ThreadPoolExecutor(max(1, HELPERS), thread_name_prefix="cache")
