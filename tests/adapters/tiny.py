"""Adapters that have learned something on the tiny networks of the real families, and what plain diffusers makes of them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from diffusers import DiffusionPipeline
from networks import LORA, shake
from torch import Tensor
from torch.nn import Module

from flowrun.adapters import Config, attach, check, trained_parameters
from flowrun.registry import checked
from tests.pipelines.families import SIZE, encoded, loaded, normal, oracle


def settings(family: str, **changes: Any) -> Config:
    """An adapter with alpha three times the rank, on the denoiser's layers that the family lists."""
    own = {"lora_base_model": [loaded(family).denoiser], "targets": "auto", "alpha": 12.0}
    return checked("adapter", Config, LORA | own | changes)


def networks(family: str, config: Config) -> dict[str, Module]:
    """Copies of those that carry the adapter."""
    return {name: copy.deepcopy(loaded(family).models[name]) for name in config.lora_base_model}


def checks(family: str, config: Config) -> list[str]:
    """What is known before weights are loaded."""
    pipeline = loaded(family)
    outlines = {name: pipeline.components()[name].outline() for name in config.lora_base_model}
    return check(outlines, [], config, pipeline.lora_targets, pipeline.adapter_names)


def adapted(family: str, config: Config) -> dict[str, Module]:
    """Copies with the adapter as training starts with it."""
    models, pipeline = networks(family, config), loaded(family)
    attach(models, [], config, pipeline.lora_targets, 0, pipeline.adapter_names)
    return models


def trained(family: str, config: Config, seed: int = 1) -> dict[str, Module]:
    models = adapted(family, config)
    shake(trained_parameters(models), seed)
    return {name: model.eval() for name, model in models.items()}


def answer(family: str, models: dict[str, Module]) -> Tensor:
    """The velocity for a caption, with these networks in place of the family's."""
    pipeline = copy.copy(loaded(family))
    pipeline.models = {**pipeline.models, **{name: model.eval() for name, model in models.items()}}
    told = encoded(pipeline, ["a red apple"]) if set(models) - {pipeline.denoiser} else _encoded(family)
    noise, sigma = normal(1, *pipeline.latent_shape(SIZE)), torch.tensor([0.5])
    with torch.no_grad():
        return pipeline.velocity(pipeline.begin(told, sigma, noise), noise, sigma)


@cache
def _encoded(family: str) -> dict[str, Tensor]:
    return encoded(loaded(family), ["a red apple"])


def plain(family: str, models: dict[str, Module]) -> DiffusionPipeline:
    """diffusers' own pipeline with these networks and nothing else."""
    whole = oracle(family).whole
    return type(whole)(**{**dict.fromkeys(whole.components), **models})
