"""Section `rollout` of a run: how pictures are sampled to learn from. An epoch samples a group of K for each of M prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from flowrun.config import ConfigError, Precision, at_least
from flowrun.flow.advantage import Aggregate, Spread
from flowrun.flow.policy import Dynamics, LogProb
from flowrun.flow.window import Window, noisy_steps
from flowrun.graph import seed_of

KEY = "rollout"


class Reference(Enum):
    """The policy that a KL term holds the trained one to."""

    base = "base"  # the weights without the adapter; without an adapter those that the run began with
    start = "start"  # what the run began with, adapter.init_from included
    snapshot = "snapshot"  # what was trained so far, taken anew every reference_every epochs
    ema = "ema"  # the average of the trained weights, optimizer.ema


@dataclass(kw_only=True, slots=True)
class NoisySteps:
    kind: Window
    size: int  # steps, of all kinds but `all`
    first: int  # the first step that may inject noise, from 0
    last: int | None  # the last one; null: the last but one of the walk
    stay: int  # epochs that `moving` stays in one place

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("first", 0), ("stay", 1)):
            at_least(f"{KEY}.sampler.window.{name}", getattr(self, name), least)


@dataclass(kw_only=True, slots=True)
class Sampler:
    dynamics: Dynamics
    eta: float  # how much noise a step injects
    steps: int
    guidance: float
    log_prob: LogProb
    store: Precision  # in which the states of a walk are kept, and rounded to as they come
    window: NoisySteps

    def __post_init__(self) -> None:
        key, ode = f"{KEY}.sampler", self.dynamics is Dynamics.ode
        at_least(f"{KEY}.sampler.steps", self.steps, 1)
        at_least(f"{KEY}.sampler.eta", self.eta, 0)
        if ode and self.eta:
            fix = f"set {key}.eta=0, or choose flow_sde, dance_sde or cps"
            raise ConfigError(f"{key}.eta", f"is {self.eta:g}, but dynamics=ode injects no noise", fix)
        if not ode and not self.eta:
            fix = f"give a positive number, or {key}.dynamics=ode"
            raise ConfigError(f"{key}.eta", f"is 0, but dynamics={self.dynamics.value} injects noise", fix)
        if self.dynamics is Dynamics.cps and self.eta > 1:
            raise ConfigError(f"{key}.eta", f"is {self.eta:g}", "cps replaces all noise at 1: give at most 1")
        if self.log_prob is LogProb.unnormalized and self.dynamics is not Dynamics.cps:
            fix = f"use it with {key}.dynamics=cps, or set it to normalized"
            raise ConfigError(f"{key}.log_prob", "unnormalized is CPS's own form", fix)
        if not ode:
            self._check_window()

    def _check_window(self) -> None:
        key, window = f"{KEY}.sampler.window", self.window
        if window.last is not None and window.last > self.steps - 2:
            fix = f"give at most {self.steps - 2}: the last of {self.steps} steps injects no noise, or it would stay in the picture"
            raise ConfigError(f"{key}.last", f"is {window.last}", fix)
        there = len(self.candidates)
        if there < 1:
            what = f"is {window.first}, so no step of {self.steps} may inject noise"
            raise ConfigError(f"{key}.first", what, "give a smaller one, or more steps")
        if window.kind is not Window.all and window.size > there:
            raise ConfigError(f"{key}.size", f"is {window.size}, but {there} steps may inject noise", f"give at most {there}")

    @property
    def candidates(self) -> range:
        """Steps that may inject noise."""
        last = self.steps - 2 if self.window.last is None else self.window.last
        return range(self.window.first, last + 1)

    def noisy(self, seed: int, epoch: int) -> tuple[int, ...]:
        """Steps that do in this epoch, the same for all its pictures."""
        if self.dynamics is Dynamics.ode:
            return ()
        w = self.window
        return noisy_steps(w.kind, w.size, w.stay, self.candidates, random.Random(seed_of(seed, "window", epoch)), epoch)


@dataclass(kw_only=True, slots=True)
class Advantages:
    aggregate: Aggregate
    spread: Spread
    clip: float  # an advantage's greatest size, in standard deviations

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ConfigError(f"{KEY}.advantage.clip", f"is {self.clip}", "give a positive number of standard deviations")


@dataclass(kw_only=True, slots=True)
class StopRule:
    fall: dict[str, float] | None  # reward -> how far its mean over the samples may fall under its best
    kl: float | None  # the greatest mean squared distance from the reference, as the task measures it

    def __post_init__(self) -> None:
        for name, value in (self.fall or {}).items():
            at_least(f"{KEY}.stop.fall.{name}", value, 0)
        at_least(f"{KEY}.stop.kl", self.kl, 0)


@dataclass(kw_only=True, slots=True)
class RolloutSettings:
    """M = prompts_per_epoch, K = group_size. batch_size: of a chunk. updates: per pass over an epoch's pictures."""

    prompts_per_epoch: int
    group_size: int
    batch_size: int
    updates: int
    inner_epochs: int
    hold_out: bool
    sampler: Sampler
    advantage: Advantages
    reference: Reference
    reference_every: int
    stop: StopRule

    def __post_init__(self) -> None:
        for name in ("prompts_per_epoch", "batch_size", "updates", "inner_epochs", "reference_every"):
            at_least(f"{KEY}.{name}", getattr(self, name), 1)
        at_least(f"{KEY}.group_size", self.group_size, 2)

    @property
    def pictures(self) -> int:
        """N, of an epoch."""
        return self.prompts_per_epoch * self.group_size

    @property
    def updates_per_epoch(self) -> int:
        return self.updates * self.inner_epochs
