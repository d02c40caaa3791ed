"""How good finished pictures are, as one number each: what online reinforcement learning raises. One file per reward.

A new reward is one module here with one subclass of `Reward`, and one option file in conf/reward.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrun.config import ConfigError
from flowrun.data import Row, Source
from flowrun.registry import REWARDS, common


class Unscored(Exception):
    """Raised by `Reward.score`: none of these samples has a score, and asking for each alone would change nothing."""


class Reward(ABC):
    """Subclasses bring a nested `Config` and implement `score`; `prepare` where there are weights to load.

    groupwise: `score` is given all samples of one group at once. packages: what is imported late, and how to get it.
    """

    groupwise: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = {}

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The reward's own fields; an empty one for none."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, key: str, source: Source | None) -> None:
        """Raise ConfigError for settings that cannot work. key: the reward's section; source: the run's data, None without a run."""

    def prepare(self, device: torch.device, source: Source | None) -> None:
        """Load weights, once, after all checks and before the first `score`."""

    @abstractmethod
    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        """[B] fp32, NaN for samples that cannot be scored. images: [B, 3, H, W], of videos [B, F, 3, H, W], fp32 in [0, 1] on
        the CPU; with a prompt and a row of the data each. Called from one thread, without gradients.

        What it raises costs the samples concerned, not the run: each is asked for alone, `Unscored` aside."""


@dataclass(kw_only=True, slots=True)
class Common:
    """What stands beside each reward's own fields. weight: 0 only measures."""

    kind: str
    weight: float
    batch_size: int


@dataclass(frozen=True)
class Chosen:
    """A reward of a run. weight: its share in the advantage, 0 for none; batch_size: samples that it is given at once."""

    reward: Reward
    weight: float
    batch_size: int


def choose(settings: Any, source: Source | None) -> dict[str, Chosen]:
    """The chosen rewards by name, checked; loads no weights. settings: the section `reward`; source: the run's data.

    Raises ConfigError."""
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError("reward", f"is {settings!r}, not a mapping of options", "choose options with 'reward=[NAME,...]'")
    found = {name: _one(f"reward.{name}", node, source) for name, node in (settings or {}).items()}
    if found and not any(chosen.weight for chosen in found.values()):
        weights = ", ".join(f"reward.{name}.weight" for name in found)
        raise ConfigError(weights, "every weight is 0, which only measures", "give one of them a weight")
    return found


def _one(key: str, node: Any, source: Source | None) -> Chosen:
    beside = common(key, Common, node)
    if beside.batch_size < 1:
        raise ConfigError(f"{key}.batch_size", f"is {beside.batch_size}", "must be at least 1")
    if not math.isfinite(beside.weight):
        raise ConfigError(f"{key}.weight", f"is {beside.weight}", "give a finite number")
    cls = REWARDS.find(beside.kind, f"{key}.kind")
    for package, how in cls.packages.items():
        if find_spec(package) is None:
            raise ConfigError(f"{key}.kind", f"{beside.kind} needs the package {package}, which is not installed", how)
    reward = cls(REWARDS.build(key, cls, node, beside=Common))
    reward.check(key, source)
    return Chosen(reward, beside.weight, beside.batch_size)
