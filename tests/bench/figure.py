"""One measured figure: what it is, its value, what is to be reached, and why it was missed if it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Figure:
    """reached: None for a figure that has no target. cause: what makes up the value, shown when the target is missed."""

    name: str
    value: str
    target: str = ""
    reached: bool | None = None
    cause: str = ""

    @property
    def verdict(self) -> str:
        return {None: "", True: "reached", False: f"MISSED: {self.cause}"}[self.reached]


def interleaved(*acts: Callable[[], float], rounds: int) -> list[float]:
    """Medians of measurements taken in turns, so that what the machine does besides reaches all alike."""
    return [median(column) for column in zip(*([act() for act in acts] for _ in range(rounds)), strict=True)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Small networks are slower on several, and on a busy machine threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best(act: Callable[[], object], times: int) -> float:
    """Seconds of the quickest of several calls."""
    return min(seconds(act) for _ in range(times))


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def cpu_seconds(act: Callable[[], object]) -> float:
    """Of this process alone, on all its threads: what waits for others on a busy machine does not count."""
    began = time.process_time()
    act()
    return time.process_time() - began
