"""How long a step of training, or an epoch of rollouts, takes: without the first one, and what came before them all."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from statistics import median


@dataclass
class Pace:
    """Seconds since this start, which is when it is made. Before the first step or epoch ends networks are compiled, kernels
    chosen, memory taken and accelerators probed: that is the warm-up. The first one counts only where it is alone."""

    began: float = field(default_factory=time.perf_counter)
    warm: float = 0.0
    seconds: array[float] = field(default_factory=lambda: array("d"))  # of each

    def add(self, seconds: float) -> None:
        """One has ended, after so many seconds."""
        if not self.seconds:
            self.warm = time.perf_counter() - self.began
        self.seconds.append(seconds)

    @property
    def each(self) -> float:
        """Median seconds of one, since other work on the machine slows down a few; 0 when there was none."""
        return median(self.seconds[1:] or self.seconds or [0.0])

    def figures(self, unit: str) -> dict[str, float]:
        """For result.json. warmup_s: until the first one ended, beyond what another one takes."""
        return {f"s_per_{unit}": self.each, "warmup_s": max(0.0, self.warm - self.each)}
