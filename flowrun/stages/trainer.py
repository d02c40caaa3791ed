"""One optimiser update, and everything that an update changes.

Every random number is a function of (seed, step, the micro-batch's place among those of all processes): nothing but the
step is needed to go on after a stop, and one process with twice the accumulation computes what two do.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flowrun.adapters import trained_parameters
from flowrun.algorithms import Algorithm, StepOut
from flowrun.batches import Batches, Visit
from flowrun.checkpoint import Checkpoint
from flowrun.config import ConfigError, Failure, Run
from flowrun.dist import Dist
from flowrun.feed import Feed
from flowrun.graph import seed_of
from flowrun.graph.draws import seed_networks
from flowrun.optim import Ema, make_optimizer, make_schedule
from flowrun.pipelines import Pipeline
from flowrun.plain import pack, unpack

log = logging.getLogger(__name__)

SHOWN = 20  # parameters without a gradient that are listed by name
TRAINED, AVERAGE, OPTIMIZER, SCHEDULE = "trained", "average", "optimizer", "schedule"  # groups of a checkpoint


def wrapped(algorithm: Algorithm, pipeline: Pipeline) -> str | None:
    """The network that stands in a wrapper which averages its gradients over the processes as they are computed. None where
    several networks take turns: a process that calls one would wait for ever for those that call another."""
    networks = algorithm.networks(pipeline)
    return networks[0] if len(networks) == 1 else None


@dataclass
class Trainer:
    """steps: updates in the whole run. end: batches after which the epochs asked for are complete; None when steps govern."""

    run: Run
    pipeline: Pipeline
    algorithm: Algorithm
    feed: Feed
    batches: Batches
    dist: Dist
    steps: int
    end: int | None

    def __post_init__(self) -> None:
        self.parameters = trained_parameters(self.pipeline.models)
        self.optimizer = make_optimizer(self.run.optimizer, self.parameters)
        self.schedule = make_schedule(self.run.optimizer, self.optimizer, self.steps)
        self._wrapped = wrapped(self.algorithm, self.pipeline)
        self._outside = [p for name, p in self.parameters.items() if name.split(".")[0] != self._wrapped]
        self.saved = 0  # updates in the newest checkpoint, 0 while there is none
        self._looked = False  # for parameters without a gradient
        self.ema = Ema(list(self.parameters.values()), self.run.optimizer.ema) if self.run.optimizer.ema else None

    def step(self, step: int) -> dict[str, float]:
        """Update number `step` (from 0). Returns the row-weighted means of loss and metrics, gradient norm and rate.

        Raises Failure when loss or gradient is not finite, by all processes; the weights are then as before the step."""
        rate, window, means, bad = self.schedule.get_last_lr()[0], self._window(step), {}, []
        for micro, (visits, share) in enumerate(window):
            with self._syncing(micro == len(window) - 1):
                for name, value in self._micro(step, micro, visits, share, bad).items():
                    means[name] = means.get(name, 0.0) + value * share
        means = self.dist.sum_each(means)
        if not math.isfinite(means["loss"]):
            rows = ", ".join(dict.fromkeys(row for part in self.dist.gather(bad) for row in part))
            raise Failure(f"step {step + 1}: the loss is {means['loss']} for {rows}", self._remedy(), by_all=True)
        norm = self._update(step)
        return {**means, "grad_norm": norm, "lr": rate}

    def trial(self) -> Tensor:
        """The loss of this process's first batch, with gradients and without an update; the same each time. 0-d, fp32."""
        visits, _ = self._window(0)[0]
        return self._loss(0, 0, visits).loss

    def _syncing(self, last: bool) -> Any:
        return nullcontext() if self._wrapped is None else self.dist.syncing(self.pipeline.models[self._wrapped], last)

    def _window(self, step: int) -> list[tuple[list[Visit], float]]:
        """This process's micro-batches, each with its share of the rows of the whole step.

        The end of an epoch may leave a process with fewer than the first one has: it then repeats one that does not count,
        since all must take part in averaging the gradients."""
        if self.dist.world == self.batches.accumulate == 1:
            return [(visits, 1.0) for visits in self.batches.window(step, 0, self.end)]
        own, longest = (self.batches.window(step, rank, self.end) for rank in (self.dist.rank, 0))
        total = self.batches.rows_in(step, self.end)
        return [(visits, len(visits) / total) for visits in own] + [(longest[-1], 0.0)] * (len(longest) - len(own))

    def weights_applied(self) -> Any:
        """Context: the averaged weights stand in the model if there are any."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    def _micro(self, step: int, micro: int, visits: list[Visit], share: float, bad: list[str]) -> dict[str, float]:
        """Forward and backward of one micro-batch; its gradients count by its share of the step's rows. bad: gets the
        rows whose loss is not finite."""
        out = self._loss(step, micro, visits)
        loss = float(out.loss.detach())
        if not math.isfinite(loss):
            per_row = zip(visits, out.per_row.tolist(), strict=True)
            bad += [self.feed.rows[visit.row].id for visit, value in per_row if not math.isfinite(value)]
        weight = share * self.dist.world
        self.dist.backward(out.loss if weight == 1 else out.loss * weight)
        return {"loss": loss, **{name: float(value) for name, value in out.metrics.items()}}

    def _loss(self, step: int, micro: int, visits: list[Visit]) -> StepOut:
        place = micro * self.dist.world + self.dist.rank  # as `Batches.window` deals them out
        key = seed_of(self.run.seed, "step", 0, step, place)
        seed_networks(key)  # dropout inside networks draws from there
        batch = self.feed.batch(visits)
        with self.dist.autocast():
            return self.algorithm.loss(self.pipeline, batch, torch.Generator().manual_seed(key))

    def _update(self, step: int) -> float:
        self.dist.average(self._outside)
        norm = self.dist.clip(self.optimizer, self.parameters.values(), self.run.optimizer.clip)
        if not math.isfinite(norm) and not self.dist.scales_gradients:
            raise Failure(f"step {step + 1}: the gradient norm is {norm} although the loss is finite", self._remedy(), by_all=True)
        if not self._looked:
            self._looked = True
            self._tell_idle()
        if self.dist.step(self.optimizer):
            self.schedule.step()
            if self.ema is not None:
                self.ema.update()
        for parameter in self.parameters.values():  # all that the optimizer has; its zero_grad takes ten times as long
            parameter.grad = None
        return norm

    def _tell_idle(self) -> None:
        """Name what is trained and got no gradient, which the optimizer leaves as it is."""
        idle = [name for name, parameter in self.parameters.items() if parameter.grad is None]
        if idle and self.dist.is_main:
            more = f" and {len(idle) - SHOWN} more" if len(idle) > SHOWN else ""
            log.warning("%d of %d trained parameters got no gradient in the first update, which left them as they are: %s%s",
                        len(idle), len(self.parameters), ", ".join(idle[:SHOWN]), more)  # fmt: skip

    def _remedy(self) -> str:
        advice = (
            "use precision=bf16 or fp32"
            if self.run.precision.value == "fp16"
            else "lower optimizer.lr, or look at these rows"
        )
        kept = f"the checkpoint of step {self.saved} is kept" if self.saved else "there is no checkpoint yet"
        return f"{advice}; {kept}"

    def state(self, step: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(tensors by group, plain data) of everything that an update changes, after `step` of them."""
        optimizer, optimizer_plan = pack(self.optimizer.state_dict())
        schedule, schedule_plan = pack(self.schedule.state_dict())
        averages, updates = self.ema.state() if self.ema is not None else ({}, 0)
        tensors = {TRAINED: dict(self.parameters), AVERAGE: averages, OPTIMIZER: optimizer, SCHEDULE: schedule}
        plain = {OPTIMIZER: optimizer_plan, SCHEDULE: schedule_plan, AVERAGE: updates, "scaler": self.dist.state()}
        plain["batches"] = {"place": self.batches.place(step, self.end), "per_epoch": self.batches.per_epoch}
        return {name: group for name, group in tensors.items() if group}, plain

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from `state()`, maybe with another number of processes: rows go on where they were, and where epochs are
        asked for, `steps` become those that are left. Raises ConfigError in one line when it is of other parameters."""
        saved = checkpoint.tensors[TRAINED]
        self._check_same(saved)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(saved[name])
        tensors, plain = checkpoint.tensors, checkpoint.plain
        try:
            if (self.ema is None) == (AVERAGE in tensors):
                raise ValueError(f"optimizer.ema is {self.run.optimizer.ema:g}")
            self._take_up(checkpoint)
            _load_optimizer(self.optimizer, unpack(tensors.get(OPTIMIZER, {}), plain[OPTIMIZER]))
            self.schedule.load_state_dict(unpack(tensors.get(SCHEDULE, {}), plain[SCHEDULE]))
            self.dist.load_state(plain["scaler"])
            if self.ema is not None:
                self.ema.load(tensors.get(AVERAGE, {}), plain[AVERAGE])
        except (KeyError, ValueError) as error:
            what = f"the checkpoint is of another optimizer, schedule or average of weights ({error})"
            raise ConfigError("resume", what, "use the settings it was made with, or start anew with resume=none") from error
        self.saved = checkpoint.step

    def _take_up(self, checkpoint: Checkpoint) -> None:
        if "batches" not in checkpoint.plain:  # of a version before this one
            return
        self.batches.go_on(checkpoint.step, **checkpoint.plain["batches"])
        if self.end is not None and self.steps != (steps := self.batches.steps(self.run.train.epochs)):
            self.steps, self.schedule = steps, make_schedule(self.run.optimizer, self.optimizer, steps)

    def _check_same(self, saved: dict[str, Tensor]) -> None:
        own = self.parameters
        if saved.keys() != own.keys():
            odd = sorted(saved.keys() ^ own.keys())
            raise ConfigError(
                "resume",
                f"the checkpoint trains other weights ({odd[0]}, {len(odd)} differ)",
                "resume with the same task, model and adapter, or start anew with resume=none",
            )
        for name, parameter in own.items():
            if saved[name].shape != parameter.shape:
                raise ConfigError(
                    "resume",
                    f"{name} is {list(saved[name].shape)} in the checkpoint and {list(parameter.shape)} here",
                    "use the rank and sizes it was made with, or start anew with resume=none",
                )


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """load_state_dict takes any optimizer's state; this one's own settings must be in it. Raises ValueError."""
    lacking = sorted({name for group in optimizer.param_groups for name in group} - set(state["param_groups"][0]))
    if lacking:
        raise ValueError(f"it has no {', '.join(lacking)}")
    optimizer.load_state_dict(state)
