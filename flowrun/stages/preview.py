"""Sample grids while training: fixed prompts or rows, and seeds, averaged weights, no effect on what is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrun import grids
from flowrun.config import Sample
from flowrun.disk import saving
from flowrun.pipelines import Pipeline
from flowrun.prompts import Asked
from flowrun.sampling import Picture, pictures
from flowrun.stages.updates import Updates

log = logging.getLogger(__name__)


@dataclass
class Preview:
    """asked: what to draw, with conditions computed under the weights of the moment."""

    sample: Sample
    pipeline: Pipeline
    asked: Callable[[], Sequence[Asked]]
    folder: Path

    @property
    def wanted(self) -> bool:
        return bool(self.sample.prompts or self.sample.rows)

    def due(self, step: int, last: int) -> bool:
        return self.wanted and (step % self.sample.every == 0 or step == last)

    def path(self, step: int) -> Path:
        """The grid of `step`."""
        return grids.path(self.folder, step)

    def draw(self, updates: Updates) -> list[Picture]:
        with updates.averaged(), updates.dist.autocast():
            return [picture for asked in self.asked() for picture in self._draw(asked)]

    def save(self, step: int, drawn: Sequence[Picture]) -> Path:
        """The grid of `step`; returns its path. Raises Failure when the disk is full."""
        with saving(self.folder, f"samples of step {step}"):
            path = grids.save(self.folder, step, drawn)
        log.info("samples of step %d: %s", step, path)
        return path

    def _draw(self, asked: Asked) -> list[Picture]:
        s = self.sample
        found = pictures(self.pipeline, asked.encoded, asked.prompts, s.seeds, asked.shape, s.steps, s.guidance)
        return [replace(picture, seen=asked.seen) for picture in found]
