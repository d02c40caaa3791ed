"""The embedded pipeline with a small FLUX network on random conditions, and what a network is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowrun.flow.path import mix
from flowrun.pipelines import Pipeline
from flowrun.sampling import denoise
from tests.pipelines.families import CPU, assembled, normal

STEPS, SIZE = 6, (32, 32)


def flux(*overrides: str, blocks: tuple[int, int] = (1, 2), seed: int = 0, dtype: torch.dtype = torch.float32) -> Pipeline:
    """blocks: of two streams and of one."""
    names = ("num_layers", "num_single_layers")
    sizes = [f"model.components.transformer.{name}={count}" for name, count in zip(names, blocks, strict=True)]
    pipeline = assembled("emoji_tiny", *sizes, *overrides, seed=seed)
    pipeline.load(("transformer",), CPU, dtype)
    return pipeline


def conditions(rows: int, seed: int = 0, width: int = 384) -> dict[str, Tensor]:
    return {"prompt_embeds": normal(rows, 8, width, seed=seed), "pooled_prompt_embeds": normal(rows, width, seed=seed + 1)}


def noise(pipeline: Pipeline, rows: int) -> Tensor:
    return normal(rows, *pipeline.latent_shape(SIZE), seed=7)


def walked(pipeline: Pipeline, guidance: float = 1.0, rows: int = 2, steps: int = STEPS) -> Tensor:
    """Latents of a walk."""
    negative = conditions(rows, seed=5) if guidance != 1 else None
    return denoise(pipeline, conditions(rows), negative, noise(pipeline, rows), pipeline.schedule(steps, SIZE), guidance)


def loss(pipeline: Pipeline, rows: int = 2) -> Tensor:
    """Of velocities; 0-d, the same at each call."""
    drawn, sigma = noise(pipeline, rows), torch.linspace(0.3, 0.8, rows)
    x = mix(normal(*drawn.shape, seed=8), drawn, sigma)
    return pipeline.velocity(pipeline.begin(conditions(rows), sigma, drawn), x, sigma).square().mean()


def made_of(network: nn.Module) -> dict[str, Any]:
    """Parameters, keys, and the attributes and hooks of every module, by identity."""
    return {
        "parameters": [(name, id(p)) for name, p in network.named_parameters()],
        "keys": list(network.state_dict()),
        "attributes": [{name: _seen(value) for name, value in vars(module).items()} for module in network.modules()],
        "processors": [dict(vars(m.processor)) for m in network.modules() if hasattr(m, "processor")],
    }


def _seen(value: Any) -> Any:
    """Tables are looked into, all else is itself."""
    return {key: id(one) for key, one in value.items()} if isinstance(value, dict) else id(value)
