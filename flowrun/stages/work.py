"""What training and learning from rollouts share: figures to trackers, pictures, checkpoints, the weights at the end."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrun import adapters
from flowrun.checkpoint import Checkpoints
from flowrun.stages.preview import Preview
from flowrun.stages.updates import Updates
from flowrun.tracking import Trackers

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Work(ABC):
    """start: updates done before. trackers: of the first process; None on others."""

    updates: Updates
    preview: Preview
    checkpoints: Checkpoints
    folder: Path
    trainable: list[str]
    adapter: adapters.Config
    start: int = 0
    trackers: Trackers | None = None

    def run(self) -> dict[str, Any]:
        """The updates from `start` to the end. Returns the figures for result.json.

        Raises Stopped, after saving, when asked to stop; Failure on a loss that is not finite."""
        failed = True
        try:
            result = self.work()
            if self.trackers:
                self.trackers.summary(result)
            failed = False
            return result
        finally:
            if self.trackers:
                self.trackers.close(failed)

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
