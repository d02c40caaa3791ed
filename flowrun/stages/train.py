"""Stage train: batches -> live units -> loss -> optimiser update, until `steps` updates are done.

A run that was stopped, or killed, goes on from its newest complete checkpoint; its loss curve then equals the unbroken
one bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowrun import adapters
from flowrun.accelerators import Accelerator, applied, report
from flowrun.checkpoint import Checkpoints
from flowrun.config import Stopped
from flowrun.progress import Progress, peak_memory_gb
from flowrun.stages.preview import Preview
from flowrun.stages.trainer import Trainer
from flowrun.stop import Stop, how_to_go_on
from flowrun.tracking import Trackers

log = logging.getLogger(__name__)

RECENT = 50  # last steps whose mean loss is the run's result


@dataclass
class Training:
    """A trainer and where its results go. trackers: None on processes other than the first. accelerators: of the shared slot."""

    trainer: Trainer
    preview: Preview
    checkpoints: Checkpoints
    trackers: Trackers | None
    folder: Path
    trainable: list[str]
    adapter: adapters.Config
    start: int
    accelerators: Sequence[Accelerator]

    def run(self) -> dict[str, Any]:
        """The updates from `start` to the end. Returns the figures for result.json.

        Raises Stopped, after saving, when asked to stop; Failure on a loss that is not finite."""
        failed = True
        try:
            with applied(self.accelerators, self.trainer.pipeline):
                for accelerator in self.accelerators:
                    self.trainer.dist.each(partial(accelerator.prove, self.trainer.pipeline, self.trainer.trial))
                result = self._run(self.trainer, self.start) | report(self.accelerators)
            if self.trackers:
                self.trackers.summary(result)
            failed = False
            return result
        finally:
            if self.trackers:
                self.trackers.close(failed)

    def _run(self, trainer: Trainer, start: int) -> dict[str, Any]:
        began, recent = time.monotonic(), deque(maxlen=RECENT)
        if not self.preview.path(start).exists():  # a run that was stopped or killed may lack its last one
            self._picture(start)
        with Stop() as stop, Progress("train", trainer.steps, "step", start) as bar:
            for step in range(start, trainer.steps):
                recent.append(self._step(step, bar)["loss"])
                done, stopping = step + 1, trainer.dist.any(stop.asked)
                if stopping or done % trainer.run.train.checkpoint_every == 0 or done == trainer.steps:
                    self._checkpoint(done)
                if stopping and done < trainer.steps:
                    raise Stopped(
                        f"stopped after step {done} of {trainer.steps}, which is saved; {how_to_go_on()}"
                    )
                self._picture(done)
        seconds = time.monotonic() - began
        return {
            "stage": "train",
            "steps": trainer.steps,
            "loss": recent[-1] if recent else None,
            "loss_mean": sum(recent) / len(recent) if recent else None,
            "seconds": seconds,
            "s_per_step": seconds / max(1, trainer.steps - start),
            "memory_gb": peak_memory_gb(),
            "weights": self._save(),
        }

    def _step(self, step: int, bar: Progress) -> dict[str, float]:
        trainer, clock = self.trainer, time.perf_counter()
        metrics = trainer.step(step)
        seconds, done = time.perf_counter() - clock, step + 1
        if self.trackers and (done % trainer.run.train.log_every == 0 or done == trainer.steps):
            more = {"epoch": trainer.batches.epoch_of(done), "s_per_step": seconds, "memory_gb": peak_memory_gb()}
            self.trackers.log(done, metrics | more)
        bar.advance(lambda: f"loss {metrics['loss']:.4f}, lr {metrics['lr']:.2e}, {peak_memory_gb():.2f} GB")
        return metrics

    def _picture(self, step: int) -> None:
        if self.trackers and self.preview.due(step, self.trainer.steps):
            self.trackers.pictures(step, self.preview.save(self.trainer, step))

    def _checkpoint(self, step: int) -> None:
        self.trainer.dist.on_main(lambda: self.checkpoints.save(step, *self.trainer.state(step)))
        self.trainer.saved = step

    def _save(self) -> list[str]:
        """The result, averaged weights if there are any, as plain diffusers reads it."""
        if not self.trackers:
            return []
        with self.trainer.weights_applied():
            saved = adapters.save_trained(
                self.folder / "model", self.trainer.pipeline.models, self.trainable, self.adapter,
                self.trainer.pipeline.adapter_names,
            )
        log.info("trained weights: %s", ", ".join(map(str, saved)))
        return [str(path) for path in saved]
