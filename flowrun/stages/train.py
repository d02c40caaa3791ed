"""Stage train: batches -> live units -> loss -> optimiser update, until `steps` updates are done.

A run that was stopped, or killed, goes on from its newest complete checkpoint; its loss curve then equals the unbroken
one bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowrun.config import Stopped
from flowrun.progress import Progress, peak_memory_gb
from flowrun.stages.pace import Pace
from flowrun.stages.trainer import Trainer
from flowrun.stages.work import Work
from flowrun.stop import Stop, how_to_go_on

log = logging.getLogger(__name__)

RECENT = 50  # last steps whose mean loss is the run's result


@dataclass(kw_only=True)
class Training(Work):
    trainer: Trainer
    pace: Pace = field(default_factory=Pace)

    def trial(self) -> Tensor:
        return self.trainer.trial(self.start)

    def work(self) -> dict[str, Any]:
        trainer, start = self.trainer, self.start
        began, recent = time.monotonic(), deque(maxlen=RECENT)
        if not self.preview.path(start).exists():  # a run that was stopped or killed may lack its last one
            self._picture(start)
        with Stop() as stop, Progress("train", trainer.steps, "step", start) as bar:
            for step in range(start, trainer.steps):
                recent.append(self._step(step, bar)["loss"])
                done, stopping = step + 1, trainer.dist.any(stop.asked)
                if stopping or done % trainer.run.train.checkpoint_every == 0 or done == trainer.steps:
                    self.checkpoint(done, *trainer.state(done))
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
            **self.pace.figures("step"),
            "memory_gb": peak_memory_gb(),
            "weights": self.save(),
        }

    def _step(self, step: int, bar: Progress) -> dict[str, float]:
        trainer, clock = self.trainer, time.perf_counter()
        metrics = trainer.step(step)
        seconds, done = time.perf_counter() - clock, step + 1
        self.pace.add(seconds)
        if self.trackers and (done % trainer.run.train.log_every == 0 or done == trainer.steps):
            more = {"epoch": trainer.batches.epoch_of(done), "s_per_step": seconds, "memory_gb": peak_memory_gb()}
            self.trackers.log(done, metrics | more)
        bar.advance(lambda: f"loss {metrics['loss']:.4f}, lr {metrics['lr']:.2e}, {peak_memory_gb():.2f} GB")
        return metrics

    def _picture(self, step: int) -> None:
        if self.trackers and self.preview.due(step, self.trainer.steps):
            self.trackers.pictures(step, self.preview.save(step, self.preview.draw(self.updates)))
