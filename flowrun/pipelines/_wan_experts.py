"""Wan 2.2 A14B: two experts, one for the noise levels from the boundary up, one for those below it.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrun.config import ConfigError
from flowrun.pipelines import _diffusers
from flowrun.pipelines._diffusers import TIME_UNITS
from flowrun.pipelines._saved import SavedWeights
from flowrun.pipelines._wan import LORA_LAYERS, Prepared, Wan


class TwoExperts(Wan):
    """Before `Wan` or a kind of it among the bases of a family. Which expert is trained is known by its name."""

    denoisers = ("transformer", "transformer_2")  # of the high levels, of the low ones
    lora_targets = {"transformer": LORA_LAYERS, "transformer_2": LORA_LAYERS}

    @dataclass(kw_only=True, slots=True)
    class Config(_diffusers.Config):
        boundary_ratio: float | None  # the noise level from which the first expert is asked; null: as saved
        guidance_2: float | None      # classifier-free guidance of the second; null: sample.guidance

        def __post_init__(self) -> None:
            _diffusers.Config.__post_init__(self)
            if self.boundary_ratio is not None and not 0 < self.boundary_ratio < 1:
                raise ConfigError("model.boundary_ratio", f"is {self.boundary_ratio}", "a noise level between the ends lies in (0, 1)")
            if self.weights is None and self.boundary_ratio is None:
                raise ConfigError("model.boundary_ratio", "is null and nothing was saved", "give a noise level, e.g. 0.875")

    def check_kind(self, index: Mapping[str, Any]) -> None:
        super().check_kind(index)
        if self.config.boundary_ratio not in (None, index["boundary_ratio"]):
            what = f"is {self.config.boundary_ratio}, but {self.config.weights} was made with {index['boundary_ratio']}"
            raise ConfigError("model.boundary_ratio", what, "set it to null")

    @cached_property
    def boundary(self) -> float:
        return self.weights.index["boundary_ratio"] if isinstance(self.weights, SavedWeights) else self.config.boundary_ratio

    @property
    def trained_range(self) -> tuple[float, float]:
        """The range of the one expert that is trained; the whole where both are, or where an encoder is trained too."""
        trained = {name.split(".")[0] for name in self.trained}
        if trained == {self.denoisers[0]}:
            return self._edges[1], 1.0
        return (0.0, self._edges[0]) if trained == {self.denoisers[1]} else (0.0, 1.0)

    def called(self, least: float, greatest: float) -> tuple[str, ...]:
        least_is_high, greatest_is_high = self.is_high(torch.tensor([least, greatest])).tolist()
        asked = greatest_is_high, not least_is_high
        return tuple(name for name, is_asked in zip(self.denoisers, asked, strict=True) if is_asked)

    def is_high(self, sigma: Tensor) -> Tensor:
        """Whether the first expert is asked at these noise levels, as diffusers' pipeline decides it."""
        return sigma * TIME_UNITS >= self.boundary * TIME_UNITS

    def guidance_at(self, sigma: Tensor, guidance: float) -> float:
        return guidance if self.config.guidance_2 is None or self.is_high(sigma) else self.config.guidance_2

    def velocity(self, prepared: Prepared, x: Tensor, sigma: Tensor) -> Tensor:
        """Each row from its own expert."""
        high, out = self.is_high(sigma), torch.zeros(x.shape, device=x.device)  # [B]
        for name, rows in zip(self.denoisers, (high, ~high), strict=True):
            if rows.all():
                return self.predicted(self.models[name], prepared, x, sigma * TIME_UNITS)
            if rows.any():
                own = {condition: value[rows] for condition, value in prepared.items()}
                out[rows] = self.predicted(self.models[name], own, x[rows], sigma[rows] * TIME_UNITS)
        return out

    @cached_property
    def _edges(self) -> tuple[float, float]:
        """The greatest number of fp32 below the boundary, and the next one, at which the first expert is asked."""
        near = torch.tensor(self.boundary, dtype=torch.float32)
        while self.is_high(near):
            near = near.nextafter(torch.zeros(()))
        while not self.is_high(above := near.nextafter(torch.ones(()))):
            near = above
        return float(near), float(above)
