"""Sampling an epoch: groups of pictures under the policy that samples, handed to the rewards as they come.

Legend: B pictures of a chunk, C (f) h w latent channels, frames, height and width, H W pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrun.algorithms import Online
from flowrun.algorithms._negative import negative_of
from flowrun.batches import Visit
from flowrun.dealing import Deal, prompts_of
from flowrun.dist import Dist
from flowrun.feature_cache import FeatureCache
from flowrun.feed import Feed
from flowrun.guided import Guided
from flowrun.pipelines import Pipeline
from flowrun.pipelines._precision import DTYPES
from flowrun.rollout import Keys, Sample, Walked, walk
from flowrun.rollout_settings import RolloutSettings
from flowrun.scoring import Scoring


@dataclass(frozen=True)
class Chunk:
    """Pictures sampled together. numbers: theirs in the epoch. conditions, negative: name -> [B, ...]; negative: with guidance."""

    numbers: range
    conditions: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None
    walked: Walked

    def places(self, numbers: Sequence[int]) -> list[int]:
        return [number - self.numbers.start for number in numbers]


@dataclass(frozen=True)
class Epoch:
    """One process's share of an epoch. samples: of all processes, in order. steps: those that injected noise. shown: the first
    pictures of this process, [B, (F,) 3, H, W] in [0, 1]."""

    number: int
    samples: Sequence[Sample]
    steps: tuple[int, ...]
    chunks: Sequence[Chunk]
    shown: Tensor
    seconds: float


@dataclass
class Roller:
    """rows: numbers of those among the feed's that are sampled."""

    pipeline: Pipeline
    algorithm: Online
    feed: Feed
    rows: Sequence[int]
    settings: RolloutSettings
    deal: Deal
    dist: Dist
    seed: int

    def samples(self, epoch: int) -> list[Sample]:
        """All of an epoch: the copies of a prompt one after another."""
        chosen = prompts_of(epoch, self.settings.prompts_per_epoch, len(self.rows), self.seed)
        return [Sample(group=group, row=self.rows[place], copy=copy)
                for group, place in enumerate(chosen) for copy in range(self.settings.group_size)]  # fmt: skip

    def roll(self, number: int, sampling: Callable[[], AbstractContextManager[None]], scoring: Scoring,
             go_on: Callable[[], bool]) -> Epoch | None:  # fmt: skip
        """Sample this process's chunks. sampling: the policy that samples stands in the model within. go_on: asked after each
        chunk by all processes; False: the epoch is given up, None."""
        began, samples = time.perf_counter(), self.samples(number)
        steps, chunks, shown = self.settings.sampler.noisy(self.seed, number), [], None
        for numbers in self.deal.chunks(self.dist.rank):
            mine = [samples[n] for n in numbers]
            with torch.no_grad(), sampling():
                chunk = self._chunk(number, numbers, mine, steps)
                images = self._images(chunk.walked.clean)
            rows = [self.feed.rows[sample.row] for sample in mine]
            scoring.submit(images, [row.prompt for row in rows], rows, [sample.group for sample in mine])
            chunks.append(chunk)
            shown = images if shown is None else shown
            if not go_on():
                return None
        return Epoch(number, samples, steps, chunks, shown, time.perf_counter() - began)

    def first(self) -> Chunk:
        """This process's first chunk of the first epoch, with the means of its noisy steps, by the weights as they are."""
        numbers, samples = self.deal.chunks(self.dist.rank)[0], self.samples(0)
        return self._chunk(0, numbers, [samples[n] for n in numbers], self.settings.sampler.noisy(self.seed, 0), keep_means=True)

    def _chunk(self, epoch: int, numbers: range, samples: Sequence[Sample], steps: Sequence[int], keep_means: bool = False) -> Chunk:
        settings, rows = self.settings.sampler, [self.feed.rows[sample.row] for sample in samples]
        batch = self.feed.batch([Visit(sample.row, epoch) for sample in samples])
        negative = negative_of(self.pipeline, batch) if settings.guidance != 1 else None
        conditions = {name: batch[name] for name in self.pipeline.conditions}
        keys = Keys(self.seed, epoch, [row.id for row in rows], [sample.copy for sample in samples])
        shape = rows[0].shape
        noise = torch.stack([self.pipeline.noise(shape, g) for g in keys.generators("noise")]).to(self.dist.device)
        sigmas = self.pipeline.schedule(settings.steps, shape).to(self.dist.device)           # [T + 1]
        cache = FeatureCache(*(self.pipeline.models[name] for name in self.pipeline.denoisers))
        with self.dist.autocast(), cache.walk(settings.steps):
            guided = Guided(self.pipeline, conditions, negative, noise, sigmas[:-1], settings.guidance, cache)
            walked = walk(guided, self.pipeline.start(noise, sigmas), sigmas, settings, steps, keys, DTYPES[settings.store],
                          self.algorithm.rereads_steps, keep_means)  # fmt: skip
        return Chunk(numbers, conditions, negative, walked)

    def _images(self, clean: Tensor) -> Tensor:
        """[B, (F,) 3, H, W] in [0, 1], fp32, on the CPU."""
        with self.dist.autocast():
            return (self.pipeline.decode(clean).float().cpu() + 1) / 2
