"""What every accelerator is: two markers, checked when its class is defined, and a way there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from flowrun.paradigm import Rereads

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline

SLOTS = {"both": "shared", "rollout": "rollout"}  # stage -> the slot for it
SAFETIES = ("lossless", "lossy")
Undo = Callable[[], None]


class Accelerator:
    """A reversible change that makes a pipeline faster.

    stage `both`: `setup` changes the networks for rollout and training alike, until it is undone. stage `rollout`:
    `rollout_context` stands around the sampling of one epoch and is left before anything is trained.
    safety `lossless`: rollout and training compute the same; `lossy`: they differ, if only in last bits.

    After the undo, or outside the context, every network is as it was: the same parameters, keys of state_dict, hooks,
    attributes and outputs. rereads: what the run's algorithm takes from its rollouts."""

    stage: ClassVar[str]
    safety: ClassVar[str]
    before: ClassVar[tuple[str, ...]] = ()  # names of accelerators that come later in the same slot, where both are chosen
    after: ClassVar[tuple[str, ...]] = ()  # earlier
    conflicts: ClassVar[tuple[str, ...]] = ()  # that cannot be in the same run
    rest: ClassVar[str | None] = None  # field of Config that takes the settings which Config has no field for

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The accelerator's settings: no defaults, numbers live in conf/."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_class(cls)

    def __init__(self, config: Any, rereads: Rereads = Rereads.nothing) -> None:
        self.config, self.rereads = config, rereads

    @classmethod
    def called(cls) -> str:
        """Its name in `before`, `after`, `conflicts` and in messages: its file's, or its class's outside flowrun."""
        own = cls.__module__.startswith("flowrun.accelerators.")
        return cls.__module__.rpartition(".")[2] if own else cls.__name__

    @classmethod
    def key(cls) -> str:
        """Of its settings, for messages."""
        return f"acceleration.{SLOTS[cls.stage]}.{cls.called()}"

    def check(self, pipeline: Pipeline) -> list[str]:
        """Before any weight is loaded: lines for the plan, what is done to each component.

        Raises ConfigError for what this pipeline or this machine cannot do."""
        return []

    def setup(self, pipeline: Pipeline) -> Undo:
        """Change the loaded networks; returns the way back. Of stage `both`. Raises ConfigError, with nothing changed."""
        raise NotImplementedError(f"{type(self).__name__} is of stage {self.stage} and has no setup")

    def prove(self, pipeline: Pipeline, loss: Callable[[], Tensor]) -> None:
        """After `setup`, before training. loss: computes that of the first batch, 0-d, with gradients; always the same.

        Raises ConfigError when the network may not be trained so."""

    def rollout_context(self, pipeline: Pipeline) -> AbstractContextManager[Any]:
        """Around all denoising of one epoch. Of stage `rollout`. Raises ConfigError before anything is changed."""
        raise NotImplementedError(f"{type(self).__name__} is of stage {self.stage} and has no rollout_context")

    def report(self) -> Mapping[str, float]:
        """What it did, for trackers: since `setup`, or in the last `rollout_context`."""
        return {}


def _check_class(cls: type[Accelerator]) -> None:
    for marker, values in (("stage", tuple(SLOTS)), ("safety", SAFETIES)):
        found = getattr(cls, marker, None)
        if found not in values:
            raise TypeError(f"{cls.__name__}.{marker} is {found!r}; it must be one of {', '.join(values)}")
    for marker in ("before", "after", "conflicts"):
        found = getattr(cls, marker)
        if not isinstance(found, tuple) or not all(isinstance(name, str) for name in found):
            raise TypeError(f"{cls.__name__}.{marker} is {found!r}; it must be a tuple of names")
    if not is_dataclass(cls.Config):
        raise TypeError(f"{cls.__name__}.Config must be a dataclass")
