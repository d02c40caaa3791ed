"""How much an average of weights keeps of itself at its t-th update: average <- d(t) average + (1 - d(t)) weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from flowrun.config import ConfigError


class Kind(Enum):
    """constant: d. power: min(d, (1 + t) / (10 + t)). linear: d min(1, t / length). piecewise_linear: 0 while t <= flat, then
    min((t - flat) ramp, d). cosine: from 0 to d over `length` along a cosine. warmup_cosine: the same after `flat` at 0."""

    constant = "constant"
    power = "power"
    linear = "linear"
    piecewise_linear = "piecewise_linear"
    cosine = "cosine"
    warmup_cosine = "warmup_cosine"


READ = {  # what each kind is made of beside d
    Kind.constant: (), Kind.power: (), Kind.linear: ("length",), Kind.piecewise_linear: ("flat", "ramp"),
    Kind.cosine: ("length",), Kind.warmup_cosine: ("flat", "length"),
}  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Decay:
    """Stands in the configuration as task.old. Raises ConfigError."""

    kind: Kind
    decay: float         # d, in [0, 1); 0: the average is the weights
    length: int | None   # updates until d is reached; of linear, cosine and warmup_cosine
    flat: int | None     # updates at 0; of piecewise_linear and warmup_cosine
    ramp: float | None   # rise per update; of piecewise_linear

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError("task.old.decay", f"is {self.decay}", "lies in [0, 1); 0 keeps nothing of what was")
        for name in ("length", "flat", "ramp"):
            value, read = getattr(self, name), name in READ[self.kind]
            if read and (value is None or not value >= (0 if name == "flat" else 1e-12)):
                raise ConfigError(f"task.old.{name}", f"is {value}", f"decay kind {self.kind.value} needs it, positive")
            if not read and value is not None:
                raise ConfigError(f"task.old.{name}", f"is {value}, but kind {self.kind.value} does not read it", "set it to null")

    def at(self, t: int) -> float:
        """d(t), t from 0."""
        if self.kind is Kind.constant:
            return self.decay
        if self.kind is Kind.power:
            return min(self.decay, (1 + t) / (10 + t))
        if self.kind is Kind.linear:
            return self.decay * min(1.0, t / self.length)
        if self.kind is Kind.piecewise_linear:
            return 0.0 if t <= self.flat else min((t - self.flat) * self.ramp, self.decay)
        after = t - (self.flat if self.kind is Kind.warmup_cosine else 0)
        return self.decay * (1 - math.cos(math.pi * min(1.0, max(0.0, after / self.length)))) / 2
