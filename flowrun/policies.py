"""The velocities that an online algorithm compares: of the trained weights, of the reference's, of those that sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flowrun.feature_cache import FeatureCache
from flowrun.guided import Guided
from flowrun.pipelines import Pipeline

Standing = Callable[[], AbstractContextManager[None]]  # other weights stand in the model within the block


class Policies:
    """Of one batch. What is asked is what sampling asked: the same preparation, the same rows in one call."""

    def __init__(self, pipeline: Pipeline, conditions: Mapping[str, Tensor], negative: Mapping[str, Tensor] | None,
                 noise: Tensor, guidance: float, reference: Standing, old: Standing) -> None:  # fmt: skip
        self._make = lambda sigmas: Guided(pipeline, conditions, negative, noise, sigmas, guidance, FeatureCache())
        self._reference, self._old = reference, old

    def begin(self, sigmas: Tensor) -> None:
        self._ask = self._make(sigmas)

    def trained(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self._ask(x, sigma)

    def reference(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self._under(self._reference, x, sigma)

    def old(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self._under(self._old, x, sigma)

    def _under(self, standing: Standing, x: Tensor, sigma: Tensor) -> Tensor:
        with torch.no_grad(), standing():
            return self._ask(x, sigma)
