"""How long a step of training, or an epoch of rollouts, takes: without the first one, and what came before them all."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Pace:
    """Seconds since this start, which is when it is made. Before the first step or epoch ends networks are compiled, kernels
    chosen, memory taken and accelerators probed: that is the warm-up. The first one counts only where it is alone."""

    began: float = field(default_factory=time.perf_counter)
    warm: float = 0.0
    first: float = 0.0
    others: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """One has ended, after so many seconds."""
        if self.count == 0:
            self.first, self.warm = seconds, time.perf_counter() - self.began
        else:
            self.others += seconds
        self.count += 1

    @property
    def each(self) -> float:
        """Mean seconds of one; 0 when there was none."""
        return self.others / (self.count - 1) if self.count > 1 else self.first

    def figures(self, unit: str) -> dict[str, float]:
        """For result.json. warmup_s: until the first one ended, beyond what another one takes."""
        return {f"s_per_{unit}": self.each, "warmup_s": max(0.0, self.warm - self.each)}
