"""Accelerators at work: in list order in, in reverse order out, also after an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from flowrun.accelerators._accelerator import Accelerator

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline


@contextmanager
def applied(accelerators: Sequence[Accelerator], pipeline: Pipeline) -> Iterator[None]:
    """Around everything that the networks do: those of the shared slot."""
    with ExitStack() as undo:
        for accelerator in accelerators:
            undo.callback(accelerator.setup(pipeline))
        yield


@contextmanager
def rollout_applied(accelerators: Sequence[Accelerator], pipeline: Pipeline) -> Iterator[None]:
    """Around all denoising of one epoch: those of the rollout slot."""
    with ExitStack() as entered:
        for accelerator in accelerators:
            entered.enter_context(accelerator.rollout_context(pipeline))
        yield


def report(accelerators: Sequence[Accelerator]) -> dict[str, float]:
    """For trackers: `<accelerator>/<what>` -> figure."""
    return {f"{a.called()}/{what}": value for a in accelerators for what, value in a.report().items()}
