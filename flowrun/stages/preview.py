"""Sample grids while training: fixed prompts and seeds, averaged weights, no effect on what is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flowrun import grids
from flowrun.config import Sample
from flowrun.disk import saving
from flowrun.pipelines import Pipeline, Shape
from flowrun.sampling import pictures
from flowrun.stages.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass
class Preview:
    """encode: the prompts' conditions, computed under the weights of the moment. shape: of the pictures."""

    sample: Sample
    pipeline: Pipeline
    encode: Callable[[], Mapping[str, Mapping[str, Tensor]]]
    shape: Shape
    folder: Path

    def due(self, step: int, last: int) -> bool:
        return bool(self.sample.prompts) and (step % self.sample.every == 0 or step == last)

    def path(self, step: int) -> Path:
        """The grid of `step`."""
        return grids.path(self.folder, step)

    def save(self, trainer: Trainer, step: int) -> Path:
        """Draw the grid of `step`; returns its path. Raises Failure when the disk is full."""
        with trainer.weights_applied(), trainer.dist.autocast():
            drawn = pictures(
                self.pipeline,
                self.encode(),
                self.sample.prompts,
                self.sample.seeds,
                self.shape,
                self.sample.steps,
                self.sample.guidance,
            )
        with saving(self.folder, f"samples of step {step}"):
            path = grids.save(self.folder, step, drawn)
        log.info("samples of step %d: %s", step, path)
        return path
