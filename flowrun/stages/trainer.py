"""One optimiser update, and everything that an update changes.

Every random number is a function of (seed, step, the micro-batch's place among those of all processes): nothing but the
step is needed to go on after a stop, and one process with twice the accumulation computes what two do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrun.algorithms import StepOut, Supervised
from flowrun.batches import Batches, Visit
from flowrun.checkpoint import Checkpoint
from flowrun.config import Failure, Run
from flowrun.dist import Dist
from flowrun.feed import Feed
from flowrun.graph import seed_of
from flowrun.graph.draws import seed_networks
from flowrun.pipelines import Pipeline
from flowrun.stages.reading import read
from flowrun.stages.updates import Updates


@dataclass
class Trainer:
    """updates: of the whole run. end: batches after which the epochs asked for are complete; None when steps govern."""

    run: Run
    pipeline: Pipeline
    algorithm: Supervised
    feed: Feed
    batches: Batches
    dist: Dist
    updates: Updates
    end: int | None

    @property
    def steps(self) -> int:
        return self.updates.steps

    def step(self, step: int) -> dict[str, float]:
        """Update number `step` (from 0). Returns the row-weighted means of loss and metrics, gradient norm and rate.

        Raises Failure when loss or gradient is not finite, by all processes; the weights are then as before the step."""
        rate, window, means, outs = self.updates.rate, self._window(step), {}, []
        for micro, (visits, share) in enumerate(window):
            with self.updates.syncing(micro == len(window) - 1):
                outs.append(self._micro(step, micro, visits, share))
        for metrics, (_, share) in zip(read([{"loss": out.loss, **out.metrics} for out in outs]), window, strict=True):
            for name, value in metrics.items():
                means[name] = means.get(name, 0.0) + value * share
        means = self.dist.sum_each(means)
        if not math.isfinite(means["loss"]):
            bad = [row for (visits, _), out in zip(window, outs, strict=True) for row in self._bad(visits, out)]
            rows = ", ".join(dict.fromkeys(row for part in self.dist.gather(bad) for row in part))
            raise Failure(f"step {step + 1}: the loss is {means['loss']} for {rows}", self.updates.remedy(), by_all=True)
        norm = self.updates.update(step)
        return {**means, "grad_norm": norm, "lr": rate}

    def trial(self, step: int) -> Tensor:
        """The loss of this process's first batch of a step, with gradients and without an update; the same each time. 0-d, fp32."""
        visits, _ = self._window(step)[0]
        return self._loss(step, 0, visits).loss

    def _window(self, step: int) -> list[tuple[list[Visit], float]]:
        """This process's micro-batches, each with its share of the rows of the whole step.

        The end of an epoch may leave a process with fewer than the first one has: it then repeats one that does not count,
        since all must take part in averaging the gradients."""
        if self.dist.world == self.batches.accumulate == 1:
            return [(visits, 1.0) for visits in self.batches.window(step, 0, self.end)]
        own, longest = (self.batches.window(step, rank, self.end) for rank in (self.dist.rank, 0))
        total = self.batches.rows_in(step, self.end)
        return [(visits, len(visits) / total) for visits in own] + [(longest[-1], 0.0)] * (len(longest) - len(own))

    def _micro(self, step: int, micro: int, visits: list[Visit], share: float) -> StepOut:
        """Forward and backward of one micro-batch; its gradients count by its share of the step's rows. Detached."""
        out = self._loss(step, micro, visits)
        weight = share * self.dist.world
        self.dist.backward(out.loss if weight == 1 else out.loss * weight)
        return replace(out, loss=out.loss.detach())

    def _bad(self, visits: list[Visit], out: StepOut) -> list[str]:
        """The rows of a loss that is not finite which made it so."""
        if out.loss.isfinite():
            return []
        values = zip(visits, out.per_row.tolist(), strict=True)
        return [self.feed.rows[visit.row].id for visit, value in values if not math.isfinite(value)]

    def _loss(self, step: int, micro: int, visits: list[Visit]) -> StepOut:
        place = micro * self.dist.world + self.dist.rank  # as `Batches.window` deals them out
        key = seed_of(self.run.seed, "step", 0, step, place)
        seed_networks(key)  # dropout inside networks draws from there
        batch = self.feed.batch(visits)
        with self.dist.autocast():
            return self.algorithm.loss(self.pipeline, batch, torch.Generator().manual_seed(key))

    def state(self, step: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(tensors by group, plain data) of everything that an update changes, after `step` of them."""
        tensors, plain = self.updates.state()
        return tensors, {**plain, "batches": {"place": self.batches.place(step, self.end), "per_epoch": self.batches.per_epoch}}

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from `state()`, maybe with another number of processes: rows go on where they were, and where epochs are
        asked for, `steps` become those that are left. Raises ConfigError in one line when it is of other parameters."""
        if "batches" in checkpoint.plain:  # a version before this one had none
            self.batches.go_on(checkpoint.step, **checkpoint.plain["batches"])
            if self.end is not None and self.steps != (steps := self.batches.steps(self.run.train.epochs)):
                self.updates.plan(steps)
        self.updates.load(checkpoint)
