"""How long cached values took and how large they were, so that a later run can say what is to come. No torch.

<root>/pace.json   for each kind of work, known by a digest of what is run: rows, seconds, bytes
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from flowrun.cache.layout import Layout
from flowrun.files import write_atomic

log = logging.getLogger(__name__)

ENOUGH = 8  # rows of one run whose figures replace older ones: the first rows of a run are slow


@dataclass
class Work:
    """Rows done or to do, the seconds of one process for them, bytes of their values."""

    rows: int = 0
    seconds: float = 0.0
    bytes: float = 0.0

    def add(self, seconds: float, nbytes: float) -> None:
        self.rows, self.seconds, self.bytes = self.rows + 1, self.seconds + seconds, self.bytes + nbytes


class Pace:
    """Figures of earlier runs, by kind of work."""

    def __init__(self, root: Path) -> None:
        self.path = Layout(root).pace

    def read(self) -> dict[str, Work]:
        try:
            known = {kind: Work(*figures) for kind, figures in json.loads(self.path.read_text()).items()}
            return {kind: work for kind, work in known.items() if work.rows > 0}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("cache: %s cannot be read (%s); there is no forecast from it, and it is written anew", self.path, error)
            return {}

    def forecast(self, kinds: Iterable[str]) -> Work:
        """What one row of each of these kinds will come to; those of a kind that was never done are not in it."""
        known, total = self.read(), Work()
        for kind in kinds:
            if kind in known:
                done = known[kind]
                total.add(done.seconds / done.rows, done.bytes / done.rows)
        return total

    def save(self, done: Mapping[str, Work]) -> None:
        """Remember what this run has done; a few rows say less than an earlier run's many."""
        known = self.read()
        news = {kind: work for kind, work in done.items() if work.rows >= ENOUGH or kind not in known}
        if news:
            text = json.dumps({kind: astuple(work) for kind, work in {**known, **news}.items()})
            write_atomic(self.path, text.encode())
