"""Optimiser updates: the trained weights and everything that an update changes, saved and taken up as one.

Gradients are of the caller; here they are averaged over processes where no wrapper does it, clipped, and applied.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flowrun.adapters import trained_parameters
from flowrun.algorithms import Algorithm
from flowrun.checkpoint import Checkpoint
from flowrun.config import ConfigError, Failure, Run
from flowrun.dist import Dist
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


class Updates:
    """What is trained, its optimizer, schedule and average."""

    def __init__(self, run: Run, pipeline: Pipeline, algorithm: Algorithm, dist: Dist, steps: int) -> None:
        """steps: updates in the whole run."""
        self.run, self.pipeline, self.dist = run, pipeline, dist
        self.parameters = trained_parameters(pipeline.models)
        self.optimizer = make_optimizer(run.optimizer, self.parameters)
        self.plan(steps)
        self._wrapped = wrapped(algorithm, pipeline)
        self._outside = [p for name, p in self.parameters.items() if name.split(".")[0] != self._wrapped]
        self.saved = 0  # updates in the newest checkpoint, 0 while there is none
        self._looked = False  # for parameters without a gradient
        self.ema = Ema(list(self.parameters.values()), run.optimizer.ema) if run.optimizer.ema else None

    def plan(self, steps: int) -> None:
        """The learning rate's schedule for so many updates."""
        self.steps, self.schedule = steps, make_schedule(self.run.optimizer, self.optimizer, steps)

    @property
    def rate(self) -> float:
        """Learning rate of the next update."""
        return self.schedule.get_last_lr()[0]

    def syncing(self, last: bool) -> Any:
        """Context of one forward and backward pass; processes average their gradients in the last one of an update."""
        return nullcontext() if self._wrapped is None else self.dist.syncing(self.pipeline.models[self._wrapped], last)

    def averaged(self) -> Any:
        """Context: the averaged weights stand in the model if there are any."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    def update(self, step: int) -> float:
        """Apply the gradients as update number `step` (from 0); returns their norm before clipping.

        Raises Failure when it is not finite, by all processes; the weights are then as before."""
        self.dist.average(self._outside)
        norm = self.dist.clip(self.optimizer, self.parameters.values(), self.run.optimizer.clip)
        if not math.isfinite(norm) and not self.dist.scales_gradients:
            raise Failure(f"step {step + 1}: the gradient norm is {norm} although the loss is finite", self.remedy(), by_all=True)
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

    def remedy(self) -> str:
        """What to do about a loss that is not finite."""
        advice = (
            "use precision=bf16 or fp32"
            if self.run.precision.value == "fp16"
            else "lower optimizer.lr, or look at these rows"
        )
        kept = f"the checkpoint of step {self.saved} is kept" if self.saved else "there is no checkpoint yet"
        return f"{advice}; {kept}"

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(tensors by group, plain data) of all of it."""
        optimizer, optimizer_plan = pack(self.optimizer.state_dict())
        schedule, schedule_plan = pack(self.schedule.state_dict())
        averages, updates = self.ema.state() if self.ema is not None else ({}, 0)
        tensors = {TRAINED: dict(self.parameters), AVERAGE: averages, OPTIMIZER: optimizer, SCHEDULE: schedule}
        plain = {OPTIMIZER: optimizer_plan, SCHEDULE: schedule_plan, AVERAGE: updates, "scaler": self.dist.state()}
        return {name: group for name, group in tensors.items() if group}, plain

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from `state()`. Raises ConfigError in one line when it is of other parameters."""
        saved = checkpoint.tensors[TRAINED]
        self._check_same(saved)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(saved[name])
        tensors, plain = checkpoint.tensors, checkpoint.plain
        try:
            if (self.ema is None) == (AVERAGE in tensors):
                raise ValueError(f"optimizer.ema is {self.run.optimizer.ema:g}")
            _load_optimizer(self.optimizer, unpack(tensors.get(OPTIMIZER, {}), plain[OPTIMIZER]))
            self.schedule.load_state_dict(unpack(tensors.get(SCHEDULE, {}), plain[SCHEDULE]))
            self.dist.load_state(plain["scaler"])
            if self.ema is not None:
                self.ema.load(tensors.get(AVERAGE, {}), plain[AVERAGE])
        except (KeyError, ValueError) as error:
            what = f"the checkpoint is of another optimizer, schedule or average of weights ({error})"
            raise ConfigError("resume", what, "use the settings it was made with, or start anew with resume=none") from error
        self.saved = checkpoint.step

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
