"""The networks behind their wrappers, and what was set on their modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from diffusers import ModelMixin
from torch import nn

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline


def base(network: nn.Module) -> nn.Module:
    """diffusers' network inside any wrapper that shares work or carries an adapter; the network itself where there is none."""
    return next((module for module in network.modules() if isinstance(module, ModelMixin)), network)


def outlines(pipeline: Pipeline) -> dict[str, nn.Module]:
    """Denoiser -> its network without weights, on the meta device."""
    components = pipeline.components()
    return {name: base(components[name].outline()) for name in pipeline.denoisers}


def loaded(pipeline: Pipeline) -> dict[str, nn.Module]:
    """Denoiser -> its loaded network."""
    return {name: base(pipeline.models[name]) for name in pipeline.denoisers}


@contextmanager
def attributes_restored(owners: Sequence[object], names: Sequence[str]) -> Iterator[None]:
    """Afterwards each owner itself has these attributes as before: the same objects, or none."""
    before = [(vars(owner), {name: vars(owner)[name] for name in names if name in vars(owner)}) for owner in owners]
    try:
        yield
    finally:
        for own, kept in before:
            for name in names:
                own.pop(name, None)
            own.update(kept)
