"""Pictures scored by all rewards while sampling goes on: a thread per reward, since most of the work is outside Python.

    with Scoring(chosen, group_size=8) as scoring:
        for images, prompts, rows, groups in rollout:
            scoring.submit(images, prompts, rows, groups)
        rewards = scoring.result()                    # name -> [N], in the order of submission

A reward is given `batch_size` samples at once, or, if it is groupwise, all of one group. When it raises, each sample of
the batch is asked for alone; those that fail again have no score, NaN, and are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from flowrun.config import Failure, UserError
from flowrun.data import Row
from flowrun.rewards import Chosen, Unscored

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Sample:
    place: int  # in the order of submission
    image: Tensor  # [(F,) 3, H, W]
    prompt: str
    row: Row


class Scoring:
    """Close it, or use it in a `with`. After `result`, `seconds` and `failures` are each reward's over those samples."""

    def __init__(self, rewards: Mapping[str, Chosen], group_size: int) -> None:
        """rewards: prepared ones. group_size: samples in each group."""
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, int] = {}
        self._workers = {name: _Worker(name, chosen, group_size) for name, chosen in rewards.items()}
        self._count = 0

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row], groups: Sequence[int]) -> None:
        """Returns at once. images: [B, 3, H, W] or [B, F, 3, H, W], fp32 in [0, 1] on the CPU, not to be changed until `result`;
        groups: an integer per sample, equal within a group and nowhere else. Shapes may differ from one call to the next.

        Raises ValueError for images of another kind."""
        if (images.dtype, images.device.type, images.requires_grad) != (torch.float32, "cpu", False) or images.ndim not in (4, 5):
            raise ValueError(f"images are {images.dtype} {list(images.shape)} on {images.device}; give fp32 pictures on the CPU")
        for image, prompt, row, group in zip(images, prompts, rows, groups, strict=True):
            sample = _Sample(self._count, image, prompt, row)
            self._count += 1
            for worker in self._workers.values():
                worker.add(sample, int(group))

    def result(self) -> dict[str, Tensor]:
        """Waits for what was submitted since the last call: name -> [N] fp32, NaN where scoring failed.

        Raises Failure when a reward failed for every sample, and ValueError when a groupwise one got part of a group."""
        count, self._count = self._count, 0
        scores = {name: worker.finish(count) for name, worker in self._workers.items()}
        self.seconds = {name: worker.seconds for name, worker in self._workers.items()}
        self.failures = {name: int(score.isnan().sum()) for name, score in scores.items()}
        for name, failed in self.failures.items():
            if count and failed == count:
                reason = self._workers[name].reason or "it gave numbers that are not finite"
                raise Failure(f"the reward {name} failed for all {count} samples: {reason}", f"mend it, or leave out reward.{name}")
        return scores

    def close(self) -> None:
        """Waits for what is being scored; what is not begun is dropped."""
        for worker in self._workers.values():
            worker.close()


def score_drawn(rewards: Mapping[str, Chosen], images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    """Of pictures [N, (F,) 3, H, W] in [0, 1] that are of no row, each drawn from a prompt; those of one prompt are a group, and
    all groups of one size: name -> [N] fp32, as of `Scoring.result`."""
    groups = [prompts.index(prompt) for prompt in prompts]
    rows = [Row(id=f"prompt/{prompt}", prompt=prompt, size=tuple(images.shape[-2:])) for prompt in prompts]
    with Scoring(rewards, groups.count(groups[0])) as scoring:
        scoring.submit(images, prompts, rows, groups)
        return scoring.result()


class _Worker:
    """One reward and its thread. reason: why it first failed. seconds: spent on what `finish` last returned."""

    def __init__(self, name: str, chosen: Chosen, group_size: int) -> None:
        self.reason = ""
        self.seconds = 0.0
        self._name, self._reward = name, chosen.reward
        self._full = group_size if chosen.reward.groupwise else chosen.batch_size
        self._waiting: dict[Hashable, list[_Sample]] = {}  # by group, or by shape
        self._begun: list[tuple[list[int], Future[tuple[Tensor, float]]]] = []  # places of a batch, its scores and seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"reward-{name}")

    def add(self, sample: _Sample, group: int) -> None:
        key = group if self._reward.groupwise else sample.image.shape
        self._waiting.setdefault(key, []).append(sample)
        if len(self._waiting[key]) == self._full:
            self._begin(self._waiting.pop(key))

    def finish(self, count: int) -> Tensor:
        """[count]."""
        if self._reward.groupwise and self._waiting:
            group, samples = next(iter(self._waiting.items()))
            raise ValueError(f"reward {self._name}: group {group} has {len(samples)} samples and not {self._full}")
        for batch in self._waiting.values():
            self._begin(batch)
        self._waiting.clear()
        self.seconds, scores = 0.0, torch.full([count], torch.nan)
        for places, future in self._begun:
            scores[places], seconds = future.result()
            self.seconds += seconds
        self._begun.clear()
        return scores

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, batch: list[_Sample]) -> None:
        self._begun.append(([sample.place for sample in batch], self._thread.submit(self._timed, batch)))

    def _timed(self, batch: list[_Sample]) -> tuple[Tensor, float]:
        begun = time.perf_counter()
        with torch.no_grad():  # a thread's own setting
            return self._scores(batch), time.perf_counter() - begun

    def _scores(self, batch: list[_Sample]) -> Tensor:
        """[n], NaN for those that failed. A UserError, which says what is wrong with the settings, ends the run."""
        try:
            return self._asked(batch)
        except UserError:
            raise
        except Exception as error:
            self._say(error, len(batch))
            if self._reward.groupwise or len(batch) == 1 or isinstance(error, Unscored):
                return torch.full([len(batch)], torch.nan)
        return torch.cat([self._scores([sample]) for sample in batch])

    def _asked(self, batch: list[_Sample]) -> Tensor:
        images = torch.stack([sample.image for sample in batch])             # [n, (F,) 3, H, W]
        scores = self._reward.score(images, [sample.prompt for sample in batch], [sample.row for sample in batch])
        if scores.shape != (len(batch),):
            raise ValueError(f"its scores are {list(scores.shape)} for {len(batch)} samples")
        scores = scores.to("cpu", torch.float32)
        return torch.where(scores.isfinite(), scores, torch.nan)

    def _say(self, error: Exception, count: int) -> None:
        if not self.reason:
            self.reason = f"{type(error).__name__}: {error}"
            log.warning("reward %s failed on %d samples (%s); what has no score counts for nothing, and further failures are counted only",
                        self._name, count, self.reason)  # fmt: skip
