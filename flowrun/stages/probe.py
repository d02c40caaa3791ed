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
from flowrun.stages.learner import Learner
from flowrun.stages.rescoring import Rescoring
from flowrun.stages.roller import Chunk, Roller

if TYPE_CHECKING:
    from flowrun.algorithms import Online

log = logging.getLogger(__name__)

NOTHING = torch.zeros(1)
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
    a walk ends with, with these accelerators and with none. nats: differences of the steps' log-likelihoods, [n]."""

    log_prob: Spread
    mean: Spread
    final: Spread
    nats: Tensor = NOTHING

    def figures(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}{name}_{which}": getattr(getattr(self, name), field)
                for name in ("log_prob", "mean", "final") for which, field in (("max", "greatest"), ("p99", "p99"))}  # fmt: skip


class Deviates(Exception):
    """Accelerators move what is compared by more than the algorithm may; the message says by how much."""


class Probe:
    """Draws the same pictures each time, and leaves everything as it was. bound: of final latents' differences, see `Acceleration`.
    verdict: once `check` has measured, what is compared between settings and how much of it is little, for result.json. lines: for
    the plan, of a coupled algorithm."""

    def __init__(self, roller: Roller, learner: Learner, rescoring: Rescoring | None, bound: float) -> None:
        self.roller, self.learner, self.rescoring, self.bound = roller, learner, rescoring, bound
        self.algorithm: Online = roller.algorithm
        self.verdict: dict[str, Any] = {}
        self.lines: list[str] = []
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
        floor = self.floor
        found = self.measure(faster) if self.shared or faster else floor
        log.info("probe: rollout and training differ by up to %.2g in log-probabilities and %.2g in means, of which rounding makes %.2g "
                 "and %.2g; accelerated walks end up to %.2g from others", found.log_prob.greatest, found.mean.greatest,
                 floor.log_prob.greatest, floor.mean.greatest, found.final.greatest)  # fmt: skip
        self.verdict = self._verdict(found)
        if self.algorithm.paradigm is Paradigm.coupled:
            self._judge(found)
        return {**found.figures("probe/"), **floor.figures("probe/floor_")}

    def _judge(self, found: Deviation) -> None:
        """Warns, and raises Deviates; an algorithm that rescores compares training with itself, and its rollouts may deviate."""
        error, warning = judged(found, self.floor, self.algorithm.clip)
        if error and self.rescoring is not None:
            error, warning = "", f"the rollout {error}; here that is weighed: {self.rescoring.told(found.nats)}"
        if errors := [text for text in self.roller.dist.gather(error) if text]:
            raise Deviates(errors[0])
        noise = f"rounding alone moves log-probabilities by up to {self.floor.log_prob.greatest:.2g}, likelihoods by up to "
        self.lines = [f"{noise}{float(self.floor.nats.abs().max()):.2g} nats", *([warning] if warning else [])]
        if warning:
            log.warning("probe: %s", warning)

    def _verdict(self, found: Deviation) -> dict[str, Any]:
        """Of all processes the greatest: of a coupled algorithm what log-probabilities differ by beyond rounding, of another one, or
        where the difference is weighed, what final latents do."""
        floor, coupled = self.floor, self.algorithm.paradigm is Paradigm.coupled and self.rescoring is None
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
        log_probs, means, nats = self._replayed(chunk) if self.algorithm.rereads_steps else ([], [], [])
        final = Spread.of([chunk.walked.clean - self.plain])
        return Deviation(Spread.of(log_probs), Spread.of(means), final, torch.cat(nats).cpu() if nats else NOTHING)

    def _replayed(self, chunk: Chunk) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Differences of each noisy step's log-probabilities and means, training's less the rollout's; of its likelihoods in nats."""
        sampler = self.algorithm.rollout.sampler
        log_probs, means, nats = [], [], []
        for walked, step, taken in self.learner.again(chunk):
            log_probs.append(walked.log_ratio(step, taken, sampler))
            means.append(taken.mean - walked.means[step])
            nats.append(log_probs[-1] * walked.nats(step, sampler))
        return log_probs, means, nats


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
