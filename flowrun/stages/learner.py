"""Updates from a scored epoch: micro-batches in an order of the epoch's own, each giving its losses one after another.

Every micro-batch has random numbers of its own, keyed by (seed, epoch, pass, its place among those of all processes).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrun.algorithms import Lesson, Online, StepOut
from flowrun.config import Failure
from flowrun.dealing import Deal
from flowrun.dist import Dist
from flowrun.flow.path import wide
from flowrun.flow.policy import Transition
from flowrun.graph import seed_of
from flowrun.graph.draws import seed_networks
from flowrun.pipelines import Pipeline
from flowrun.policies import Policies, Standing
from flowrun.rollout import Walked
from flowrun.stages.reading import read
from flowrun.stages.roller import Chunk, Epoch
from flowrun.stages.updates import Updates

GREATEST = "_max"  # ends the names of metrics of which the greatest counts, not the mean


@dataclass
class Learner:
    """reference, old: contexts in which these policies' weights stand in the model."""

    pipeline: Pipeline
    algorithm: Online
    updates: Updates
    deal: Deal
    dist: Dist
    seed: int
    guidance: float
    reference: Standing
    old: Standing

    def update(self, step: int, epoch: Epoch, turn: int, number: int, advantages: Tensor, valid: Tensor) -> dict[str, float]:
        """Update number `step` of the run, `number` of pass `turn` over the epoch. advantages, valid: [N], of all its pictures.

        Returns means and greatest values of the losses and metrics, gradient norm and rate. Raises Failure when loss or
        gradient is not finite, by all processes; the weights are then as before."""
        shuffle = random.Random(seed_of(self.seed, "pass", epoch.number, turn))
        micros, rate = self.deal.passes(number, self.dist.rank, shuffle), self.updates.rate
        terms, found = self.algorithm.terms(epoch.steps), []
        for place, numbers in enumerate(micros):
            key = seed_of(self.seed, "learn", epoch.number, turn, number, place * self.dist.world + self.dist.rank)
            seed_networks(key)
            chunk = next(chunk for chunk in epoch.chunks if numbers[0] in chunk.numbers)
            drawn = torch.Generator().manual_seed(key)
            losses = self._losses(chunk, chunk.places(numbers), advantages[numbers], valid[numbers], drawn)
            for term, loss in enumerate(losses):
                with self.updates.syncing(place == len(micros) - 1 and term == terms - 1):
                    found.append(self._backward(loss, 1 / (len(micros) * terms)))
        metrics = self._whole(read(found))
        if not math.isfinite(metrics["loss"]):
            what = f"epoch {epoch.number + 1}, update {step + 1}: the loss is {metrics['loss']}"
            raise Failure(what, self.updates.remedy(), by_all=True)
        return {**metrics, "grad_norm": self.updates.update(step), "lr": rate}

    def batch(self, chunk: Chunk, places: Sequence[int]) -> tuple[Walked, Policies]:
        """Some of a chunk's pictures, as training asks for them."""
        walked = chunk.walked.take(places)
        conditions, negative = (_taken(part, places) for part in (chunk.conditions, chunk.negative))
        return walked, Policies(self.pipeline, conditions, negative, walked.noise, self.guidance, self.reference, self.old)

    def again(self, chunk: Chunk) -> Iterator[tuple[Walked, int, Transition]]:
        """Each noisy step of a chunk as training computes it, micro-batch by micro-batch: (the walks of its pictures, the step, its
        distribution without gradients)."""
        for start in range(0, len(chunk.numbers), self.deal.micro):
            walked, policies = self.batch(chunk, list(range(start, start + self.deal.micro)))
            with self.dist.autocast():
                policies.begin(walked.sigmas[:-1])
            for step in walked.steps:
                # with gradients, since kernels without them may round differently
                with torch.enable_grad(), self.dist.autocast(), self.updates.syncing(last=False):
                    velocity = policies.trained(wide(walked.states[step]), walked.sigmas[step]).detach()
                yield walked, step, walked.again(step, velocity, self.algorithm.rollout.sampler)

    def trial(self, chunk: Chunk) -> Tensor:
        """The first loss of a chunk's first micro-batch, its pictures good and bad in turns; the same each time. 0-d, fp32."""
        places = list(range(self.deal.micro))
        advantages, valid = torch.tensor([1.0, -0.5] * len(places))[: len(places)], torch.ones(len(places), dtype=torch.bool)
        losses = self._losses(chunk, places, advantages, valid, torch.Generator().manual_seed(0))
        with self.dist.autocast():
            return losses[0]().loss

    def _losses(self, chunk: Chunk, places: Sequence[int], advantages: Tensor, valid: Tensor, generator: torch.Generator) -> list:
        """advantages, valid: [B], of these pictures."""
        walked, policies = self.batch(chunk, places)
        lesson = Lesson(walked, *(values.to(walked.clean.device) for values in (advantages, valid)))
        with self.dist.autocast():
            return self.algorithm.losses(lesson, policies, generator)

    def _backward(self, loss: object, share: float) -> dict[str, Tensor]:
        with self.dist.autocast():
            out: StepOut = loss()
        self.dist.backward(out.loss * share)
        return {"loss": out.loss.detach(), **out.metrics}

    def _whole(self, found: Sequence[dict[str, float]]) -> dict[str, float]:
        """Over the losses of all processes, which have equally many."""
        everything = [metrics for part in self.dist.gather(list(found)) for metrics in part]
        names = everything[0]
        return {name: (max if name.endswith(GREATEST) else _mean)([metrics[name] for metrics in everything]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _taken(part: dict[str, Tensor] | None, places: Sequence[int]) -> dict[str, Tensor] | None:
    return None if part is None else {name: value[places] for name, value in part.items()}


