"""Rows of the memory table: a recipe, what its two stages take of a card, and what that figure is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flowrun.compose import CONF
from flowrun.config import ConfigError, Run
from flowrun.frozen.layers import in_full
from flowrun.memory.conditions import conditions
from flowrun.memory.count import Live
from flowrun.memory.estimate import Estimate, Step
from flowrun.memory.fake import faked
from flowrun.memory.published import SETTINGS
from flowrun.pipelines import Shape, held_in

HEADROOM = 0.2  # of a card, left for what is not counted
RECIPE = re.compile(r"(?P<model>\w+)_lora_(?P<card>\d+)gb")  # names of the experiments that are listed
COLUMNS = ("run", "frozen weights", "rows x pixels", "weights", "gradients", "optimizer", "kept for the backward pass",
           "train stage, peak", "cache stage, peak", "figures are")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a run takes of the device's memory. held: how its frozen weights are held."""

    name: str
    held: str
    rows: int
    shape: Shape
    train: Estimate
    cache: int

    def fits(self, card_gb: int) -> bool:
        """Both stages, with room to spare. card_gb: as cards are sold, 2^30 bytes a GB."""
        return max(self.train.peak, self.cache) <= (1 - HEADROOM) * card_gb * 2**30

    def cells(self) -> list[str]:
        """As COLUMNS has them, in GB of 10^9 bytes."""
        t, pixels = self.train, "x".join(map(str, self.shape))
        sizes = (t.weights, t.gradients, t.optimizer, t.kept, t.peak, self.cache)
        return [self.name, self.held, f"{self.rows} x {pixels}", *(f"{size / 1e9:.2f}" for size in sizes), "estimate"]


def recipes() -> dict[str, int]:
    """Experiment -> GB of the card that it is for, as its name says."""
    names = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
    return {name: int(found["card"]) for name in names if (found := RECIPE.fullmatch(name))}


def row(name: str, run: Run) -> Row:
    """Raises ConfigError for a run that is not estimated."""
    option, shape, settings = run.model["name"], _shape(run), {}
    if option in SETTINGS and run.model["weights"] is not None and not run.model["components"]:
        settings = SETTINGS[option]
        run = replace(run, model={**run.model, "weights": None, "components": settings})
    step, rows = Step(run, shape), run.train.batch_size
    cache = encoding(step, settings)
    train = step.estimate(conditions(step.pipeline, run.model["pipeline"], rows), run.train.gradient_checkpointing)
    held = [f"{component} {how.value}" for component, how in run.memory.weights.items()]
    return Row(name, ", ".join(held) or run.model["dtype"], rows, shape, train, cache)


def encoding(step: Step, settings: dict[str, dict[str, Any]]) -> int:
    """The cache stage's peak: weights of all that is not called by the loss, and what the VAE makes of one row.

    settings: of text encoders, where the pipeline's own have the vocabulary of a random tokenizer."""
    pipeline, weights = step.pipeline, 0
    for name, component in pipeline.components().items():
        if name not in step.networks:
            published = settings.get(name) if name.startswith("text_encoder") else None
            outline = component.outline() if published is None else _outline(pipeline.names.networks[name], published)
            holding = pipeline.holdings.get(name)
            weights += in_full(outline, step.dtype) if holding is None else holding.bytes(outline, step.dtype)
    return weights + _vae_working(step)


def _vae_working(step: Step) -> int:
    """The most that exists at one time while one row is encoded."""
    pipeline = step.pipeline
    vae = pipeline.components()["vae"].outline()
    for path, tensor in (*vae.named_parameters(), *vae.named_buffers()):
        tensor.data = tensor.data.to(held_in(vae, path, tensor.dtype, step.dtype))
    faked(vae)
    *frames, height, width = step.shape
    pixels = torch.zeros(1, *frames, 3, height, width, dtype=step.dtype)
    with torch.no_grad(), Live([*vae.parameters(), *vae.buffers(), pixels]) as live:
        pipeline.moments(vae, pixels)
    return live.most


def _outline(cls: type, settings: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return cls(cls.config_class(**settings))


def _shape(run: Run) -> Shape:
    """Of the rows, as the data section asks for them. Raises ConfigError where that depends on the rows."""
    geometry = run.data.get("geometry", {})
    if geometry.get("mode") not in (None, "fixed") or geometry.get("size") is None:
        raise ConfigError("data.geometry.size", "is not given", "memory is estimated for one size of rows: give it")
    frames = run.data.get("frames")
    return (*([frames["most"]] if frames else []), *geometry["size"])


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
