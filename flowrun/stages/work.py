"""What training and learning from rollouts share: figures to trackers, pictures, checkpoints, the weights at the end."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrun import adapters
from flowrun.accelerators import Accelerator, applied, report
from flowrun.checkpoint import Checkpoints
from flowrun.stages.preview import Preview
from flowrun.stages.updates import Updates
from flowrun.tracking import Trackers

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Work(ABC):
    """accelerators: of the shared slot. start: updates done before. trackers: of the first process; None on others."""

    updates: Updates
    preview: Preview
    checkpoints: Checkpoints
    folder: Path
    trainable: list[str]
    adapter: adapters.Config
    accelerators: Sequence[Accelerator]
    start: int = 0
    trackers: Trackers | None = None

    def run(self) -> dict[str, Any]:
        """The updates from `start` to the end. Returns the figures for result.json.

        Raises Stopped, after saving, when asked to stop; Failure on a loss that is not finite."""
        failed = True
        try:
            pipeline, dist = self.updates.pipeline, self.updates.dist
            with applied(self.accelerators, pipeline):
                for accelerator in self.accelerators if self.start < self.updates.steps else ():
                    dist.each(partial(accelerator.prove, pipeline, self.trial))
                result = self.work() | report(self.accelerators)
            if self.trackers:
                self.trackers.summary(result)
            failed = False
            return result
        finally:
            if self.trackers:
                self.trackers.close(failed)

    @abstractmethod
    def trial(self) -> Tensor:
        """A loss of the first batch, with gradients and without an update; the same each time. 0-d, fp32."""

    @abstractmethod
    def work(self) -> dict[str, Any]: ...

    def checkpoint(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], plain: Mapping[str, Any]) -> None:
        self.updates.dist.on_main(lambda: self.checkpoints.save(step, tensors, plain))
        self.updates.saved = step

    def save(self) -> list[str]:
        """The result, averaged weights if there are any, as plain diffusers reads it."""
        if not self.trackers:
            return []
        pipeline = self.updates.pipeline
        with self.updates.averaged():
            saved = adapters.save_trained(
                self.folder / "model", pipeline.models, self.trainable, self.adapter, pipeline.adapter_names
            )
        log.info("trained weights: %s", ", ".join(map(str, saved)))
        return [str(path) for path in saved]
