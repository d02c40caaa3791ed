"""Tiny pipelines of the real families, and diffusers' own pipelines of the same weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch.nn.utils.rnn import pad_sequence

from flowrun.compose import compose
from flowrun.config import Model
from flowrun.flow.path import mix
from flowrun.graph import Draws, Executor, State, UnitGraph
from flowrun.pipelines._diffusers import DiffusersPipeline
from flowrun.registry import PIPELINES
from tests.pipelines.oracles import ORACLES, Editing, Oracle

CPU, SIZE = torch.device("cpu"), (64, 64)
FAMILIES = tuple(ORACLES)
EDITORS = tuple(family for family, cls in ORACLES.items() if issubclass(cls, Editing))
FROM_TEXT = tuple(family for family in FAMILIES if family not in EDITORS)
ALIKE = ("flux2", "flux2_klein", "z_image", "sdxl", "flux_kontext", "flux2_edit", "flux2_klein_edit", "qwen_image_edit")  # to save time


def each(families: Iterable[str], alike: Collection[str] = ALIKE) -> pytest.MarkDecorator:
    """Each family in turn; those that are like another one in the long run of the tests only."""
    return pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f in alike else ()) for f in families])


PROMPTS = ["a red apple", "a very small cat on top of a large house", ""]


def make(family: str, *overrides: str, seed: int = 0) -> DiffusersPipeline:
    """The family's tiny option, without weights."""
    return assembled(f"{family}_tiny", *overrides, seed=seed)


def assembled(option: str, *overrides: str, seed: int = 0) -> DiffusersPipeline:
    """A model option's pipeline, without weights."""
    run = compose([f"model={option}", *overrides])
    cls = PIPELINES.find(run.model["pipeline"], "model.pipeline")
    return cls(PIPELINES.build("model", cls, run.model, beside=Model), seed)


@cache
def loaded(family: str) -> DiffusersPipeline:
    """With all weights; tests do not change it."""
    pipeline = make(family)
    pipeline.load(pipeline.components(), CPU, torch.float32)
    return pipeline


@cache
def oracle(family: str) -> Oracle:
    return ORACLES[family](loaded(family))


def theirs(family: str) -> DiffusionPipeline:
    """Diffusers' pipeline of the same networks, tokenizers and scheduler settings."""
    return oracle(family).whole


def seen(pipeline: DiffusersPipeline, row: int, size: tuple[int, int] = SIZE) -> dict[str, torch.Tensor]:
    """The condition pictures of a row, for families that see any: name -> uint8 [3, H, W]."""
    return {name: picture(100 + 10 * row + number, size) for number, name in enumerate(pipeline.pictures)}


def encoded(pipeline: DiffusersPipeline, prompts: list[str], size: tuple[int, int] = SIZE, first: int = 0) -> dict[str, torch.Tensor]:
    """The conditions of each prompt, encoded alone, beside the pictures of row `first`, ...: name -> [B, ...]."""
    units = pipeline.units()
    units = [units[i] for i in sorted(UnitGraph(units).needed_for([("shared", name) for name in pipeline.conditions]))]
    executor = Executor(units, pipeline.models)
    jobs = [(State(shared={"prompt": p, **seen(pipeline, row, size)}), Draws(0, p, 0), {}) for row, p in enumerate(prompts, first)]
    states = executor.run_batch(jobs)
    return {
        name: pad_sequence([state.shared[name] for state in states], batch_first=True)
        if name in pipeline.ragged
        else torch.stack([state.shared[name] for state in states])
        for name in pipeline.conditions
    }


def run_unit(pipeline: DiffusersPipeline, name: str, draws: Draws, **inputs: Any) -> dict[str, Any]:
    """What one unit leaves in the shared scope."""
    units = pipeline.units()
    (place,) = [i for i, unit in enumerate(units) if unit.name == name]
    state = State(shared=dict(inputs))
    Executor(units, pipeline.models).run_unit(place, state, draws)
    return state.shared


def learn(pipeline: DiffusersPipeline, batch: dict[str, torch.Tensor], shape: tuple[int, ...]) -> None:
    """Train the denoiser on one row, one noise and one level until its loss has fallen by ten times; fails when it does not."""
    pipeline.load((pipeline.denoiser,), CPU, torch.float32)
    network = pipeline.models[pipeline.denoiser].requires_grad_(True)
    clean, noise = (normal(1, *pipeline.latent_shape(shape), seed=seed) for seed in (1, 2))
    sigma = torch.tensor([0.6])
    x = mix(clean, noise, sigma)
    optimizer, curve = torch.optim.AdamW(network.parameters(), lr=1e-2), []
    for _ in range(150):
        loss = (pipeline.velocity(pipeline.begin(batch, sigma, noise), x, sigma) - (noise - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
        if curve[-1] < curve[0] / 10:
            return
    pytest.fail(f"from {curve[0]} to {curve[-1]}")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def picture(seed: int = 0, size: tuple[int, int] = SIZE) -> torch.Tensor:
    return torch.randint(0, 256, (3, *size), generator=torch.Generator().manual_seed(seed)).byte()
