"""Accelerators measured: a chunk of the first epoch by the very path of rollouts, and the same steps by that of training.

A walk is sampled with all accelerators of the run, and its noisy steps are computed once more as training will, in its batches and
with the shared ones alone. What differs is measured against the same with no accelerator at all, the floor, which rounding in
batches of another size makes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrun.accelerators import Accelerator, applied, rollout_applied
from flowrun.algorithms import Paradigm
from flowrun.config import ConfigError
from flowrun.flow.path import wide
from flowrun.stages.learner import Learner
from flowrun.stages.roller import Chunk, Roller

if TYPE_CHECKING:
    from flowrun.algorithms import Online

log = logging.getLogger(__name__)

TENTH = 0.1  # of the clip range: more is worth a warning


@dataclass(frozen=True)
class Spread:
    """Greatest value and 99th percentile of what was measured; 0 where nothing was."""

    greatest: float
    p99: float

    @staticmethod
    def of(values: Sequence[Tensor]) -> Spread:
        if not values:
            return Spread(0.0, 0.0)
        flat = torch.cat([value.detach().double().abs().flatten().cpu() for value in values])
        kept = flat if len(flat) < 1 << 22 else flat[:: len(flat) >> 22]  # quantile takes no more
        return Spread(float(flat.max()), float(torch.quantile(kept, 0.99)))


@dataclass(frozen=True)
class Deviation:
    """|difference| of the log-probabilities and means of noisy steps, by way of rollout and by way of training; of the latents that
    a walk ends with, with these accelerators and with none."""

    log_prob: Spread
    mean: Spread
    final: Spread

    def figures(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}{name}_{which}": getattr(getattr(self, name), field)
                for name in ("log_prob", "mean", "final") for which, field in (("max", "greatest"), ("p99", "p99"))}  # fmt: skip


class Deviates(Exception):
    """Accelerators move what is compared by more than the algorithm may; the message says by how much."""


class Probe:
    """Draws the same pictures each time, and leaves everything as it was. bound: of final latents' differences, see `Acceleration`.
    verdict: once `check` has measured, what is compared between settings and how much of it is little, for result.json."""

    def __init__(self, roller: Roller, learner: Learner, bound: float) -> None:
        self.roller, self.learner, self.bound = roller, learner, bound
        self.algorithm: Online = roller.algorithm
        self.verdict: dict[str, Any] = {}
        self.floor = self.shared = self.plain = None

    def around(self, work: Callable[[], dict[str, Any]], shared: Sequence[Accelerator], faster: Sequence[Accelerator]) -> dict[str, Any]:
        """What `work` returns, which applies the shared accelerators and calls `check`. Raises ConfigError for an accelerator with
        which the algorithm may not learn, by name."""
        self.shared, self.floor = shared, self.measure(())
        try:
            return work()
        except Deviates as found:  # the shared accelerators are off again
            fix = "leave it out, widen the clip, or set acceleration.probe=false"
            raise ConfigError("acceleration", f"{self._culprit(faster)} {found}", fix) from found

    def check(self, faster: Sequence[Accelerator]) -> dict[str, float]:
        """What the accelerators at work and those of rollouts change: for trackers. Raises Deviates."""
        floor, dist = self.floor, self.roller.dist
        found = self.measure(faster) if self.shared or faster else floor
        log.info("probe: rollout and training differ by up to %.2g in log-probabilities and %.2g in means, of which rounding makes %.2g "
                 "and %.2g; accelerated walks end up to %.2g from others", found.log_prob.greatest, found.mean.greatest,
                 floor.log_prob.greatest, floor.mean.greatest, found.final.greatest)  # fmt: skip
        self.verdict = self._verdict(found)
        if self.algorithm.paradigm is Paradigm.coupled:
            error, warning = judged(found, floor, self.algorithm.clip)
            if errors := [text for text in dist.gather(error) if text]:
                raise Deviates(errors[0])
            if warning:
                log.warning("probe: %s", warning)
        return {**found.figures("probe/"), **floor.figures("probe/floor_")}

    def _verdict(self, found: Deviation) -> dict[str, Any]:
        """Of all processes the greatest: of a coupled algorithm what log-probabilities differ by beyond rounding, of another one what
        final latents do."""
        floor, coupled = self.floor, self.algorithm.paradigm is Paradigm.coupled
        excess = Spread(*(max(0.0, getattr(found.log_prob, name) - getattr(floor.log_prob, name)) for name in ("greatest", "p99")))
        spreads = self.roller.dist.gather(excess if coupled else found.final)
        clip = {"clip_range": self.algorithm.clip} if coupled else {}
        return {
            "deviation_of": "log-probabilities" if coupled else "final latents",
            "deviation_max": max(spread.greatest for spread in spreads),
            "deviation_p99": max(spread.p99 for spread in spreads),
            "deviation_bound": TENTH * self.algorithm.clip if coupled else self.bound,
            **clip,
        }

    def _culprit(self, faster: Sequence[Accelerator]) -> str:
        """The accelerator whose absence brings most, by name; each is left out in turn."""
        left = {}
        for one in (*self.shared, *faster):
            others, others_faster = ([other for other in part if other is not one] for part in (self.shared, faster))
            with applied(others, self.roller.pipeline):
                left[one.called()] = self.measure(others_faster).log_prob.greatest
        return min(left, key=left.get)

    def measure(self, faster: Sequence[Accelerator]) -> Deviation:
        """With the shared accelerators that are at work. faster: those of rollouts."""
        with torch.no_grad(), rollout_applied(faster, self.roller.pipeline):
            chunk = self.roller.first()
        if self.plain is None:  # the first one is the floor
            self.plain = chunk.walked.clean
        log_probs, means = self._replayed(chunk) if self.algorithm.rereads_steps else ([], [])
        return Deviation(Spread.of(log_probs), Spread.of(means), Spread.of([chunk.walked.clean - self.plain]))

    def _replayed(self, chunk: Chunk) -> tuple[list[Tensor], list[Tensor]]:
        """Differences of each noisy step's log-probabilities and means."""
        s, micro = self.algorithm.rollout.sampler, self.roller.deal.micro
        log_probs, means = [], []
        for start in range(0, len(chunk.numbers), micro):
            places = list(range(start, start + micro))
            walked, policies = self.learner.batch(chunk, places)
            policies.begin(walked.sigmas[:-1])
            for step in walked.steps:
                with torch.enable_grad(), self.roller.dist.autocast():
                    velocity = policies.trained(wide(walked.states[step]), walked.sigmas[step])
                taken = walked.again(step, velocity.detach(), s)
                log_probs.append(walked.log_ratio(step, taken, s))
                means.append(taken.mean - walked.means[step])
        return log_probs, means


def judged(found: Deviation, floor: Deviation, clip: float) -> tuple[str, str]:
    """(error, warning) of a coupled algorithm whose ratio may move by `clip`; empty where there is none."""
    excess, noise = found.log_prob.greatest - floor.log_prob.greatest, floor.log_prob.greatest
    if excess > clip:
        return f"moves log-probabilities by {excess:.2g} more than rounding does, the clip leaves the ratio {clip:g}", ""
    if noise > clip:
        return "", (f"rounding alone moves log-probabilities by {noise:.2g}, more than the clip's {clip:g}, which clips noise; a range "
                    f"of {10 * noise:.1g} or more would not, nor would precision=fp32 and equal batches")  # fmt: skip
    if excess > TENTH * clip:
        return "", f"log-probabilities move by {excess:.2g} more than rounding does, more than a tenth of the clip's {clip:g}"
    return "", ""
