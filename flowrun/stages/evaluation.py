"""What the rewards say of the fixed prompts, drawn from fixed noises without noise on the way; and the rule that ends a run by it.

These prompts may be kept out of the rollouts (rollout.hold_out), and among the rewards may be some that are measured only: where
they fall while the trained ones rise, the model learns to please and not to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flowrun.rewards import Chosen
from flowrun.rollout_settings import StopRule
from flowrun.sampling import Picture
from flowrun.scoring import score_drawn

PREFIX = "samples/"  # before a reward's name, in metrics


@dataclass
class Evaluation:
    """best: greatest mean so far by reward. over: why the run ends, empty while it goes on."""

    rewards: Mapping[str, Chosen]
    rule: StopRule
    best: dict[str, float] = field(default_factory=dict)
    over: str = ""

    def scores(self, drawn: Sequence[Picture]) -> dict[str, float]:
        """Means by reward over those that could be scored; groupwise ones are given all pictures of one prompt."""
        images = torch.stack([(picture.image + 1) / 2 for picture in drawn])  # [N, (F,) 3, H, W]
        found = score_drawn(self.rewards, images, [picture.prompt for picture in drawn])
        return {f"{PREFIX}{name}": float(values.nanmean()) for name, values in found.items()}

    def judge(self, found: Mapping[str, float], kl: float = 0.0) -> bool:
        """Whether the run may go on with these means, `over` says why not. kl: the epoch's distance from the reference."""
        for key, mean in found.items():
            name = key.removeprefix(PREFIX)
            self.best[name] = max(self.best.get(name, -math.inf), mean)
            most = (self.rule.fall or {}).get(name)
            if most is not None and not mean >= self.best[name] - most:
                self.over = f"{name} of the samples fell from {self.best[name]:.4g} to {mean:.4g}, by more than {most:g}"
        if self.rule.kl is not None and not kl <= self.rule.kl:
            self.over = f"the distance from the reference is {kl:.3g}, more than {self.rule.kl:g}"
        return not self.over

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "over": self.over}

    def load(self, state: Mapping[str, Any]) -> None:
        self.best, self.over = dict(state["best"]), state["over"]
