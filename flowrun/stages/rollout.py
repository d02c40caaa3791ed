"""Stage rollout: sample -> score -> advantages -> updates, epoch after epoch, until the updates asked for are done.

A run that was stopped, or killed, goes on from its newest complete checkpoint, at the beginning of an epoch; its curves then
equal the unbroken ones bit for bit.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrun import grids
from flowrun.accelerators import Accelerator, report, rollout_applied
from flowrun.checkpoint import Checkpoint
from flowrun.config import Stopped
from flowrun.disk import saving
from flowrun.files import write_atomic
from flowrun.flow.advantage import Advantages, advantages
from flowrun.optim.kept import Kept
from flowrun.plan import section
from flowrun.progress import Progress, peak_memory_gb
from flowrun.rewards import Chosen
from flowrun.rollout_settings import Reference, RolloutSettings
from flowrun.scoring import Scoring
from flowrun.stages.evaluation import PREFIX, Evaluation
from flowrun.stages.learner import GREATEST, Learner
from flowrun.stages.pace import Pace
from flowrun.stages.probe import Probe
from flowrun.stages.rescoring import Rescoring
from flowrun.stages.roller import Epoch, Roller
from flowrun.stages.work import Work
from flowrun.stop import Stop, how_to_go_on

log = logging.getLogger(__name__)

START = "start"  # kept weights: as the run began, which loading the model gives again
OLD, SNAPSHOT, GOOD = "old", "snapshot", "good"  # and those that a checkpoint holds
FLOOR = 1e-6  # of a standard deviation, as a share of the rewards' size: fp32's rounding
FIRST = "ratio_off_first"


@dataclass(kw_only=True)
class Learning(Work):
    """faster: accelerators of the rollout slot. probe: measures all accelerators first, if it is there. rescoring: of an algorithm
    that rescores. totals: seconds by phase, since this start."""

    settings: RolloutSettings
    roller: Roller
    learner: Learner
    kept: Kept
    rewards: Mapping[str, Chosen]
    evaluation: Evaluation
    faster: Sequence[Accelerator]
    probe: Probe | None
    rescoring: Rescoring | None
    totals: Counter = field(default_factory=Counter)
    pace: Pace = field(default_factory=Pace)  # of epochs
    sampling_pace: Pace = field(default_factory=Pace)  # of their sampling
    _warned: bool = False  # of a ratio that is not 1

    def run(self) -> dict[str, Any]:
        if self.probe is None:
            return super().run()
        return self.probe.around(super().run, self.accelerators, self.faster)

    def work(self) -> dict[str, Any]:
        began, per_epoch, updates = time.monotonic(), self.settings.updates_per_epoch, self.updates
        done, metrics, every = self.start, {}, updates.run.train
        first = self._probed() if self.probe is not None else {}
        if not self.preview.path(done).exists():
            first |= self._look(done)
        if self.trackers and first and done == 0:
            self.trackers.log(0, first)
        bar = Progress("rollout", updates.steps // per_epoch, "epoch", done // per_epoch)
        with Stop() as stop, bar, Scoring(self.rewards, self.settings.group_size) as scoring:
            while done < updates.steps and not self.evaluation.over:
                if (metrics := self._epoch(done // per_epoch, scoring, stop)) is None:
                    self._stop(done)
                before, done = done, done + per_epoch
                stopping = updates.dist.any(stop.asked)
                metrics |= self._look(done, metrics.get("kl", 0.0)) if self._due(before, done, self.preview.sample.every) else {}
                if stopping or self._due(before, done, every.checkpoint_every):
                    self._checkpoint(done)
                if self.trackers and self._due(before, done, every.log_every):
                    self.trackers.log(done, {**metrics, "epoch": done / per_epoch, "memory_gb": peak_memory_gb()})
                bar.advance(lambda metrics=metrics: _told(metrics))
                if stopping and done < updates.steps:
                    self._stop(done)
        if self.evaluation.over:
            self._go_back()
        return self._result(done, metrics, time.monotonic() - began)

    def _probed(self) -> dict[str, float]:
        """What the probe finds; the saved plan gets what it says of rounding. Raises Deviates."""
        found, plan = self.probe.check(self.faster), self.folder / "plan.txt"  # of a command's run; others have none
        if self.trackers and self.probe.lines:
            with saving(self.folder, plan.name):
                write_atomic(plan, (plan.read_bytes() if plan.exists() else b"") + f"{section('probe', self.probe.lines)}\n".encode())
        return found

    def trial(self) -> Tensor:
        with torch.no_grad():
            chunk = self.roller.first()
        return self.learner.trial(chunk)

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint. Raises ConfigError when it is of other parameters."""
        self.updates.load(checkpoint)
        for name in (OLD, SNAPSHOT, GOOD):
            if f"kept_{name}" in checkpoint.tensors:
                self.kept.load(name, checkpoint.tensors[f"kept_{name}"])
        self.evaluation.load(checkpoint.plain["evaluation"])

    def _epoch(self, number: int, scoring: Scoring, stop: Stop) -> dict[str, float] | None:
        """None when it was given up while sampling, before anything had changed."""
        if self.settings.reference is Reference.snapshot and number % self.settings.reference_every == 0:
            self.kept.keep(SNAPSHOT)
        dist = self.updates.dist
        with rollout_applied(self.faster, self.updates.pipeline):
            epoch = self.roller.roll(number, self._sampling, scoring, lambda: not dist.any(stop.asked))
        if epoch is None:
            return None
        sampled = time.perf_counter()
        epoch, weighed = self.rescoring.rescored(epoch) if self.rescoring is not None else (epoch, {})
        rescored = time.perf_counter()
        scores = self._gathered(epoch, dist.each(scoring.result))
        advantage = self.settings.advantage
        given = advantages(scores, {name: chosen.weight for name, chosen in self.rewards.items()},
                           torch.tensor([s.group for s in epoch.samples]), advantage.aggregate, advantage.spread, FLOOR)  # fmt: skip
        scored = time.perf_counter()
        metrics = self._learn(epoch, given.values.clamp(-advantage.clip, advantage.clip), given.valid)
        if self.roller.algorithm.keeps_old:
            self.kept.blend(OLD, self.roller.algorithm.old_decay(number))
        spent = {"rollout": epoch.seconds, "reward": scored - rescored, "update": time.perf_counter() - scored}
        spent |= {"rescoring": rescored - sampled} if self.rescoring is not None else {}
        self.totals.update(spent)
        self.pace.add(sum(spent.values()))
        self.sampling_pace.add(epoch.seconds)
        self._show(epoch, scores)
        return {**_described(given), **weighed, **metrics, **report(self.faster),
                **{f"seconds/{phase}": value for phase, value in spent.items()},
                "rollout_share": epoch.seconds / sum(spent.values()), "pictures": float(len(epoch.samples))}  # fmt: skip

    def _sampling(self) -> AbstractContextManager[None]:
        return self.learner.old() if self.roller.algorithm.keeps_old else nullcontext()

    def _gathered(self, epoch: Epoch, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every process's scores in the order of the epoch's pictures: name -> [N], fp32."""
        numbers = [n for chunk in epoch.chunks for n in chunk.numbers]
        found = {name: torch.full((len(epoch.samples),), math.nan) for name in own}
        for places, scores in self.updates.dist.gather((numbers, dict(own))):
            for name, values in scores.items():
                found[name][places] = values
        return found

    def _learn(self, epoch: Epoch, values: Tensor, valid: Tensor) -> dict[str, float]:
        """All updates of an epoch: means of their metrics, and the ratio's distance from 1 before the first one."""
        found, settings = [], self.settings
        for turn in range(settings.inner_epochs):
            for number in range(settings.updates):
                step = epoch.number * settings.updates_per_epoch + turn * settings.updates + number
                found.append(self.learner.update(step, epoch, turn, number, values, valid))
        metrics = {name: (max if name.endswith(GREATEST) else _mean)([one[name] for one in found]) for name in found[0]}
        if "ratio_off_max" in metrics:
            metrics[FIRST] = found[0]["ratio_off_max"]
            self._warn(metrics[FIRST])
        return metrics

    def _warn(self, off: float) -> None:
        """Before an epoch's first update the ratio is 1, but for rounding."""
        clip, deal = self.roller.algorithm.clip, self.roller.deal
        if off > 0.1 * clip and not self._warned:
            self._warned = True
            log.warning("the ratio is off by up to %.2g before the epoch's first update, where it is 1 but for rounding, and "
                        "%g is what the clip leaves it: sampling in batches of %d and training in batches of %d round differently in %s; "
                        "use equal batches, precision=fp32, or a wider clip",
                        off, clip, deal.chunk, deal.micro, self.updates.run.precision.value)  # fmt: skip

    def _look(self, step: int, kl: float = 0.0) -> dict[str, float]:
        """Draw the fixed prompts from the fixed noises, score and keep them. Returns the scores' means by name."""
        found = self.updates.dist.on_main(lambda: self._drawn(step)) if self.preview.wanted else {}
        if self.evaluation.judge(found, kl) and (self.settings.stop.fall or self.settings.stop.kl is not None):
            with self.updates.averaged():
                self.kept.keep(GOOD)
        return found

    def _drawn(self, step: int) -> dict[str, float]:
        drawn = self.preview.draw(self.updates)
        self.trackers.pictures(step, self.preview.save(step, drawn))
        return self.evaluation.scores(drawn)

    def _go_back(self) -> None:
        log.warning("the stop rule ends the run: %s", self.evaluation.over)
        if GOOD in self.kept:
            self.kept.restore(GOOD)
            self.updates.ema = None  # these are averages, if there are any
            log.info("the weights saved are those of the last samples within the rule")

    def _show(self, epoch: Epoch, scores: Mapping[str, Tensor]) -> None:
        """The first pictures of an epoch as a grid, each with its rewards, as often as samples are drawn."""
        before, per_epoch = epoch.number * self.settings.updates_per_epoch, self.settings.updates_per_epoch
        if not self.trackers or not (epoch.number == 0 or self._due(before, before + per_epoch, self.preview.sample.every)):
            return
        rows = [self.roller.feed.rows[sample.row] for sample in epoch.samples[: len(epoch.shown)]]
        captions = [f"{row.prompt}: {', '.join(f'{float(values[i]):.2f}' for values in scores.values())}" for i, row in enumerate(rows)]
        images = [grids.to_image(grids.film_strip(image * 2 - 1)) for image in epoch.shown]
        grids.save_sheet(self.folder / "rollouts" / f"epoch-{epoch.number + 1:06d}.png", images, captions)

    def _due(self, before: int, done: int, every: int) -> bool:
        """Whether a multiple of `every` updates lies in an epoch that led from `before` to `done`, or nothing comes after it."""
        return done // every > before // every or done >= self.updates.steps or bool(self.evaluation.over)

    def _checkpoint(self, step: int) -> None:
        tensors, plain = self.updates.state()
        kept = {f"kept_{name}": copies for name, copies in self.kept.state().items() if name in (OLD, SNAPSHOT, GOOD)}
        self.checkpoint(step, {**tensors, **kept}, {**plain, "evaluation": self.evaluation.state()})

    def _stop(self, step: int) -> None:
        if self.updates.saved != step or step == 0:
            self._checkpoint(step)
        per_epoch = self.settings.updates_per_epoch
        what = f"stopped after epoch {step // per_epoch} of {self.updates.steps // per_epoch}, which is saved"
        raise Stopped(f"{what}; {how_to_go_on()}")

    def _result(self, done: int, metrics: Mapping[str, float], seconds: float) -> dict[str, Any]:
        per_epoch, walks = self.settings.updates_per_epoch, len(self.roller.deal.chunks(self.roller.dist.rank))
        return {
            "stage": "rollout",
            "paradigm": self.roller.algorithm.paradigm.value,
            "steps": done,
            "stopped_by": self.evaluation.over,
            "epochs": done // per_epoch,
            "pictures": self.settings.pictures * (done // per_epoch),
            **self._weighted(metrics),
            **{name: value for name, value in metrics.items() if name.startswith(("reward/", "samples/"))},
            **{f"samples/best/{name}": value for name, value in self.evaluation.best.items()},
            "seconds": seconds,
            **{f"seconds/{phase}": value for phase, value in self.totals.items()},
            **self.pace.figures("epoch"),
            "s_per_rollout_step": self.sampling_pace.each / (walks * self.settings.sampler.steps),
            **(self.probe.verdict if self.probe is not None else {}),
            **report(self.faster),
            "memory_gb": peak_memory_gb(),
            "weights": self.save(),
        }

    def _weighted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The rewards by their weights as one figure each: of the last epoch's pictures, and of the samples."""
        sums = {"reward": "reward/", "samples_reward": PREFIX}
        return {name: sum(chosen.weight * metrics[prefix + one] for one, chosen in self.rewards.items())
                for name, prefix in sums.items() if all(prefix + one in metrics for one in self.rewards)}  # fmt: skip


def _described(given: Advantages) -> dict[str, float]:
    return {
        **{f"reward/{name}": mean for name, mean in given.means.items()},
        **{f"reward/{name}/group_std": std for name, std in given.stds.items()},
        "dead_groups": given.dead / max(1, given.groups),
        "failed_pictures": float(given.failed),
    }


def _told(metrics: Mapping[str, float]) -> str:
    rewards = [f"{name.removeprefix('reward/')} {value:.4f}" for name, value in metrics.items()
               if name.startswith("reward/") and not name.endswith("/group_std")]  # fmt: skip
    more = [f"{name} {metrics[name]:.3g}" for name in ("weight/ess", "ratio_off_max", "clip_fraction", "kl") if name in metrics]
    return ", ".join([*rewards, *more, f"loss {metrics['loss']:.4g}"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
