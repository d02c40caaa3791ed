"""Where a run's figures go: metrics.csv always, further trackers as chosen. A tracker is a module of this folder."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrun.config import ConfigError
from flowrun.registry import Registry

log = logging.getLogger(__name__)

TRACKERS = Registry("tracker", "flowrun.tracking", "Tracker")
ALWAYS = "csv"


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What trackers are told about the run. stage: train or rollout. config: plain data. plan: as printed. start: updates done
    before."""

    directory: Path
    stage: str
    config: Mapping[str, Any]
    plan: str
    start: int


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What trackers are told about a sweep that has ended. name: of its jobs' group. table: its columns and, row by row, their
    cells. picture: None when there was nothing to draw. conclusion: as printed."""

    directory: Path
    name: str
    config: Mapping[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    picture: Path | None
    conclusion: str


class Tracker(ABC):
    """Subclasses bring a nested `Config` and open in `__init__`. optional: an error turns it off, the run goes on."""

    optional = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The tracker's own section; an empty one for none."""

    @abstractmethod
    def __init__(self, config: Config, run: Tracked) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Figures after `step` optimiser updates."""

    def pictures(self, step: int, grid: Path) -> None:
        """A sample grid (PNG) drawn after `step` updates."""

    def summary(self, result: Mapping[str, Any]) -> None:
        """What result.json says."""

    def close(self, failed: bool) -> None:
        """Nothing is logged after this."""

    @classmethod
    def gather(cls, config: Config, sweep: Swept) -> None:
        """A sweep has ended, of which each job was a run of its own here."""


Choice = list[tuple[str, type[Tracker], Any]]


def choose(settings: Mapping[str, Mapping[str, Any]] | None) -> Choice:
    """(name, class, checked config) per chosen tracker, csv in any case. Opens nothing; raises ConfigError."""
    wanted = {ALWAYS: {}, **(settings or {})}
    found = []
    for name, node in wanted.items():
        if not isinstance(node, Mapping):
            raise ConfigError(f"tracker.{name}", f"is {node!r}", "give its fields, or {} for none")
        cls = TRACKERS.find(name, f"tracker.{name}")
        found.append((name, cls, TRACKERS.build(f"tracker.{name}", cls, node)))
    return found


def gather(choice: Choice, sweep: Swept) -> None:
    """Tell each tracker; one that raises is reported with its reason."""
    for name, cls, config in choice:
        try:
            cls.gather(config, sweep)
        except Exception as error:
            log.warning("tracker %s has not got the sweep's table (%s: %s)", name, type(error).__name__, error)


class Trackers:
    """The chosen trackers as one. Made on the main process of a run; close it in a `finally`.

    An optional tracker that raises is reported once, with its reason, and is off from then on.
    """

    def __init__(self, choice: Choice, run: Tracked) -> None:
        self._open: dict[str, Tracker] = {}
        for name, cls, config in choice:
            self._guard(name, cls.optional, lambda cls=cls, config=config, name=name: self._add(name, cls(config, run)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def pictures(self, step: int, grid: Path) -> None:
        self._each(lambda tracker: tracker.pictures(step, grid))

    def summary(self, result: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.summary(result))

    def close(self, failed: bool = False) -> None:
        self._each(lambda tracker: tracker.close(failed))
        self._open.clear()

    def _add(self, name: str, tracker: Tracker) -> None:
        self._open[name] = tracker

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._guard(name, tracker.optional, lambda tracker=tracker: act(tracker))

    def _guard(self, name: str, optional: bool, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if not optional:
                raise
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {error}"
            log.warning("tracker %s is off for the rest of the run (%s); training goes on", name, reason)
