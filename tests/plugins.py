"""Plug-ins that tests name as `tests.plugins:Class`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrun.graph import Unit
from flowrun.pipelines.emoji import EmojiPipeline

Scope = dict[str, Any]


class Jittered(EmojiPipeline):
    """The emoji pipeline with a unit that draws: it adds noise to the cached target latents, anew each epoch."""

    random = "per_epoch"

    def units(self) -> tuple[Unit, ...]:
        jitter = Unit(
            name="jitter",
            input_params=("target_latents",),
            output_params=("target_latents",),
            process=_jitter,
            random=self.random,
        )
        return (*super().units(), jitter)


class FrozenJitter(Jittered):
    """The same with one draw for ever."""

    random = "frozen"


def _jitter(ctx: Any, target_latents: Tensor) -> dict[str, Tensor]:
    noise = torch.randn(target_latents.shape, generator=ctx.generator)
    return {"target_latents": target_latents + 0.1 * noise}


class Undeclared(EmojiPipeline):
    """The emoji pipeline with a unit at its end that does not say what it reads and writes."""

    def units(self) -> tuple[Unit, ...]:
        return (*super().units(), Unit(name="undeclared", take_over=True, process=_brighten))


class UndeclaredLive(Jittered):
    """The same behind a draw per epoch, which keeps it from being cached."""

    def units(self) -> tuple[Unit, ...]:
        return (*super().units(), Unit(name="undeclared", take_over=True, process=_brighten))


def _brighten(ctx: Any, shared: Scope, posi: Scope, nega: Scope) -> tuple[Scope, Scope, Scope]:
    """Adds a thousandth of the picture's mean to the latents; a prompt alone has neither."""
    if "image" not in shared:
        return shared, posi, nega
    return {**shared, "target_latents": shared["target_latents"] + shared["image"].float().mean() / 1000}, posi, nega
