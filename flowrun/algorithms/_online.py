"""Algorithms that learn from rollouts: pictures sampled by the model itself, scored, and turned into losses.

Legend: B pictures, C (f) h w latent channels, frames, height and width, T noise levels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from flowrun.algorithms._algorithm import Algorithm, StepOut
from flowrun.algorithms._negative import negative_conditions, negative_units
from flowrun.flow.importance import Weighting
from flowrun.graph import Unit
from flowrun.paradigm import Rereads
from flowrun.rollout import Walked
from flowrun.rollout_settings import RolloutSettings

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline


class Policies(Protocol):
    """Velocities of one batch with the guidance it was sampled with: x [B, C, (f,) h, w], sigma 0-d -> the shape of x, fp32."""

    def begin(self, sigmas: Tensor) -> None:
        """Prepare the batch for the levels that will be asked for, [T]. Comes before the others."""

    def trained(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Of the weights as they are now, with gradients."""

    def reference(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Of `rollout.reference`, without gradients. Ask it before `trained`: weights are swapped in place meanwhile."""

    def old(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Of the weights that sampled, without gradients. Ask it before `trained`."""


@dataclass(frozen=True)
class Lesson:
    """Pictures and what they are worth. advantages: [B], fp32, 0 on average. valid: [B] bool; others failed and do not count."""

    walked: Walked
    advantages: Tensor
    valid: Tensor


class Online(Algorithm):
    """Subclasses say in `rereads` what of a walk `losses` takes, and in `keeps_old` whether it asks the old policy; those with
    `rescores` get walks whose log-probabilities are those of training (`Walked.rescored`)."""

    keeps_old: ClassVar[bool] = False
    levels_by: ClassVar[str] = "rollout.sampler.steps"  # settings on which `levels` depend, for messages

    def __init__(self, config: Algorithm.Config, rollout: RolloutSettings) -> None:
        """Raises ConfigError for a sampler that the algorithm cannot learn from."""
        super().__init__(config)
        self.rollout = rollout

    def check(self, schedule: Tensor) -> None:
        """schedule: the levels of a walk, [T + 1]. Raises ConfigError when the algorithm cannot learn from it."""

    def levels(self, schedule: Tensor) -> Tensor:
        """Noise levels at which losses may ask for the trained velocity, or their ends: [n], of walks along `schedule`, [T + 1]."""
        return schedule[:-1]

    @property
    def rereads_steps(self) -> bool:
        """Whether states and log-probabilities of the noisy steps are kept."""
        return self.rereads is Rereads.states or self.rereads.stepwise

    @property
    def clip(self) -> float:
        """How far a ratio of log_probs may move from 1, to the nearer side. Of coupled algorithms."""
        raise NotImplementedError(f"{type(self).__name__} is coupled and does not say how far its ratio may move: clip")

    @property
    def weighting(self) -> Weighting:
        """How a step counts by what it was drawn with. Of those with `rescores`."""
        raise NotImplementedError(f"{type(self).__name__} rescores and does not say how it weighs: weighting")

    @property
    @abstractmethod
    def asks_reference(self) -> bool:
        """Whether a loss compares with the reference policy."""

    @abstractmethod
    def terms(self, epoch_steps: Sequence[int]) -> int:
        """How many losses a batch gives. epoch_steps: of its walks' steps those that injected noise."""

    @abstractmethod
    def losses(self, lesson: Lesson, policies: Policies, generator: torch.Generator) -> list[Callable[[], StepOut]]:
        """Losses of a batch, each computed when it is called: their mean is the batch's. Call them in order, and each one's
        backward before the next. All randomness is drawn from `generator`."""

    def old_decay(self, epoch: int) -> float:
        """How much of itself the old policy keeps after the epoch: old <- d old + (1 - d) trained. Of `keeps_old` alone."""
        return 0.0

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        guided = self.rollout.sampler.guidance != 1
        return (*pipeline.conditions, *(negative_conditions(pipeline) if guided else ()))

    def units(self, pipeline: Pipeline) -> tuple[Unit, ...]:
        return negative_units(pipeline) if self.rollout.sampler.guidance != 1 else ()


def masked(per_row: Tensor, valid: Tensor) -> Tensor:
    """Values of rows that failed become 0; the mean over all rows then leaves the others' share as it was. [B]"""
    return torch.where(valid, per_row, 0.0)


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """< (a - b)^2 > of each row: [B, ...] -> [B]."""
    return (a - b).square().flatten(1).mean(1)
