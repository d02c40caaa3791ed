"""What algorithms have in common, and those that learn from data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flowrun.graph import Unit
from flowrun.paradigm import Paradigm, Rereads

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline


@dataclass
class StepOut:
    """loss: 0-d, fp32, the mean of `per_row`. per_row: [B], fp32, detached. metrics: name -> 0-d row mean, detached."""

    loss: Tensor
    per_row: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Algorithm(ABC):
    """Subclasses of `Supervised`, or of `Online`, set `paradigm` and bring a nested `Config`; also `reads` and
    `units` where the loss needs more than they say."""

    paradigm: ClassVar[Paradigm]
    rereads: ClassVar[Rereads] = Rereads.nothing
    rescores: ClassVar[bool] = False  # whether old log-probabilities are computed once more, by the exact path of training

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The algorithm's fields of the task section: no defaults, numbers live in conf/."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def reads(self, pipeline: Pipeline) -> tuple[str, ...]:
        """Shared names that `loss` finds in its batch: written by units, or given by the data."""
        return (*pipeline.conditions, pipeline.target)

    def networks(self, pipeline: Pipeline) -> tuple[str, ...]:
        """Those of the pipeline's denoisers that `loss` calls."""
        return pipeline.denoisers

    def units(self, pipeline: Pipeline) -> tuple[Unit, ...]:
        """Further computations per row that the loss needs, after the pipeline's own."""
        return ()

    def variants(self) -> list[dict[str, Any]]:
        """How a row's inputs may be changed before its units run, the unchanged row first; each is cached once."""
        return [{}]

    def choose(self, seed: int, row_id: str, epoch: int) -> int:
        """Index into `variants()` for one visit of one row: a function of its arguments alone."""
        return 0


class Supervised(Algorithm):
    """Learns from data: a batch of rows gives one loss."""

    @abstractmethod
    def loss(self, pipeline: Pipeline, batch: Mapping[str, Tensor], generator: torch.Generator) -> StepOut:
        """Loss of one batch. `batch` holds [B, ...] tensors under the names that `reads` gives.

        All randomness is drawn from `generator`, on the generator's own device, and moved: with a CPU generator a run
        sees the same noise on every device, at the price of copying one latent per row."""
