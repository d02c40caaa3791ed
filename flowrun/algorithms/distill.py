"""Direct distillation: the student's whole walk from a noise ends where the teacher's ended from the same noise.

    x_0 = noise,  x_k+1 = x_k + (sigma_k+1 - sigma_k) v(x_k, sigma_k),  k = 0 .. N-1
    v = velocity, or with guidance g:  v = v_empty + g (v_caption - v_empty)
    loss = mean over rows of  < (x_N - target)^2 >

The pairing of noise and target is the method: with a noise that the target does not depend on, the minimiser is the
mean of all targets, a blur.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrun.algorithms import Paradigm, StepOut, Supervised
from flowrun.algorithms._negative import negative_conditions, negative_of, negative_units
from flowrun.config import ConfigError
from flowrun.feature_cache import FeatureCache
from flowrun.flow.path import wide
from flowrun.flow.step import solve
from flowrun.graph import Unit
from flowrun.guided import Guided

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline

PAIRS = ("teacher_noise", "teacher_latents")  # what data that a teacher made give


class Noise(Enum):
    """paired: the noise that the target was made from, given by the data. frozen: one for ever for each row.

    per_epoch: a fresh one each time, which teaches the mean of the targets."""

    paired = "paired"
    frozen = "frozen"
    per_epoch = "per_epoch"


class Distill(Supervised):
    paradigm = Paradigm.distillation

    @dataclass(kw_only=True, slots=True)
    class Config:
        steps: int      # N, solver steps of the student, all with gradient
        guidance: float  # g of the student's walk; 1: none
        noise: Noise    # where a walk begins: paired | frozen | per_epoch

        def __post_init__(self) -> None:
            if self.steps < 1:
                raise ConfigError("task.steps", f"is {self.steps}", "give at least 1 solver step")

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        negative = negative_conditions(pipeline) if self.config.guidance != 1 else ()
        ends = PAIRS if self.config.noise is Noise.paired else ("noise", pipeline.target)
        return (*pipeline.conditions, *negative, *ends)

    def units(self, pipeline: Pipeline) -> tuple[Unit, ...]:
        negative = negative_units(pipeline) if self.config.guidance != 1 else ()
        if self.config.noise is Noise.paired:
            return negative
        target = pipeline.target

        def noise(ctx: Any, **inputs: Tensor) -> dict[str, Tensor]:
            return {"noise": torch.randn(inputs[target].shape, generator=ctx.generator)}  # [C, h, w]

        return (*negative, Unit(name="noise", input_params=(target,), output_params=("noise",), process=noise,
                                random=self.config.noise.value, version=1))  # fmt: skip

    def loss(self, pipeline: Pipeline, batch: Mapping[str, Tensor], generator: torch.Generator) -> StepOut:
        start, end = self.reads(pipeline)[-2:]
        noise, target = wide(batch[start]), wide(batch[end])                          # [B, ...]
        shape = pipeline.pixel_shape(noise.shape[1:])
        sigmas = pipeline.schedule(self.config.steps, shape).to(noise.device)         # [N + 1], as in sampling
        negative = negative_of(pipeline, batch) if self.config.guidance != 1 else None
        velocity = Guided(pipeline, batch, negative, noise, sigmas[:-1], self.config.guidance, FeatureCache())
        x = solve(velocity, pipeline.start(noise, sigmas), sigmas)                    # [B, ...]
        squares = pipeline.weigh((x - target).square())
        error = squares.mean(tuple(range(1, squares.ndim)))                           # [B]
        return StepOut(error.mean(), error.detach(), {})
