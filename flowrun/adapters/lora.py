"""Low-rank adapters with peft's layers, on a frozen weight W [out, in]; A [r, in] random, B [out, r] zero at the start.

lora    W + alpha / r B A                                  Hu et al. 2021, arXiv 2106.09685
rslora  W + alpha / sqrt(r) B A                            Kalajdzievski 2023, arXiv 2312.03732
dora    m (W + alpha / r B A) / |W + alpha / r B A|        Liu et al. 2024, arXiv 2402.09353

DoRA's norm is taken over the inputs of each output, m [out] starts as |W|, and the norm counts as a constant in the
gradient (its section 4.3). All is kept in fp32 on any base: an update of 1e-4 of a weight is lost in bf16.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import PeftAdapterMixin
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE, LoraBaseMixin
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn import Module

from flowrun.adapters.config import Config, Variant
from flowrun.adapters.saved import LOADED_AS, Fitting, fitting
from flowrun.adapters.targets import resolve
from flowrun.config import ConfigError
from flowrun.graph import seed_of

NAME = "default"  # of the adapter within the model; not part of saved keys


def check(outlines: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]]) -> list[str]:
    """What `add` would refuse, on networks without weights; they have adapters then. Returns warnings."""
    _insert(outlines, config, lora_targets, seed=0)
    if config.init_from is None or _saved(outlines, config).scale_known:
        return []
    return [f"{config.init_from} does not record its scale; adapter.alpha={config.alpha:g} and "
            f"adapter.variant={config.variant.value} are used"]


def add(models: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]], seed: int) -> None:
    """Put an adapter on each model; only the adapters train. Same seed, same start, on every device."""
    _insert(models, config, lora_targets, seed)
    for model in models.values():
        cast_training_params(model, torch.float32)
        if config.variant is Variant.dora:
            _measure(model)
        model.train()
    if config.init_from is not None:
        for name, weights in _saved(models, config).tensors.items():
            set_peft_model_state_dict(models[name], weights, adapter_name=NAME)


def _insert(models: Mapping[str, Module], config: Config, lora_targets: Mapping[str, Sequence[str]], seed: int) -> None:
    targets = resolve(models, config, lora_targets)
    for name, model in models.items():
        layout = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout,
                            target_modules=targets[name], use_rslora=config.variant is Variant.rslora,
                            use_dora=config.variant is Variant.dora)
        with torch.random.fork_rng(devices=[]):  # peft draws A from the global CPU generator
            torch.default_generator.manual_seed(seed_of(seed, "lora", name))
            _inject(model, layout, name)


def _inject(model: Module, layout: LoraConfig, name: str) -> None:
    try:
        if isinstance(model, PeftAdapterMixin):
            model.add_adapter(layout, adapter_name=NAME)
        else:  # text encoders, and the few diffusers networks without the mixin
            inject_adapter_in_model(layout, model, NAME)
    except ValueError as error:
        reason = textwrap.shorten(str(error), 120, placeholder=" ...")  # peft prints whole networks
        raise ConfigError("adapter.targets", f"{name}: {reason}", "name linear or convolution layers") from error


def _measure(model: Module) -> None:
    """DoRA's magnitudes again, from the weights in fp32: in bf16 they are off by up to 1/256, and so is the output."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and NAME in layer.lora_A:  # embeddings, which are looked up, have others
            layer.lora_magnitude_vector[NAME].update_layer(
                base_layer=layer.get_base_layer(), lora_A=layer.lora_A[NAME].weight, lora_B=layer.lora_B[NAME].weight,
                scaling=layer.scaling[NAME])


def _saved(models: Mapping[str, Module], config: Config) -> Fitting:
    own = {name: get_peft_model_state_dict(model, adapter_name=NAME) for name, model in models.items()}
    return fitting(own, Path(config.init_from), config)


def save(directory: Path, models: Mapping[str, Module]) -> list[Path]:
    """Write what diffusers' `load_lora_weights` takes. It loads one transformer at a time: the second one's adapter lies in a
    folder of its name, for `load_into_transformer_2=True`, under the name of the first. Returns the files and folders."""
    first = {name: model for name, model in models.items() if name not in LOADED_AS}
    saved = [_write(directory, first)] if first else []
    for name in models.keys() - first.keys():
        (directory / name).mkdir()
        saved.append(_write(directory / name, {LOADED_AS[name]: models[name]}).parent)
    return saved


def _write(directory: Path, models: Mapping[str, Module]) -> Path:
    """Write `pytorch_lora_weights.safetensors`: keys `<component>.<layer>.lora_A.weight`, DoRA's magnitudes as
    `<component>.<layer>.lora_magnitude_vector`, and the layout (rank, alpha, variant) as metadata, without which a loader
    takes alpha for r and rsLoRA for LoRA."""
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {}
    for name, model in models.items():
        tensors |= LoraBaseMixin.pack_weights(get_peft_model_state_dict(model, adapter_name=NAME), name)
        settings = model.peft_config[NAME].to_dict()
        # Sorted: the order of a set is another one in each process.
        layout |= {f"{name}.{key}": sorted(value) if isinstance(value, set) else value
                   for key, value in settings.items()}
    LoraBaseMixin.write_lora_layers(state_dict=tensors, save_directory=str(directory), is_main_process=True,
                                    weight_name=LORA_WEIGHT_NAME_SAFE, save_function=None, safe_serialization=True,
                                    lora_adapter_metadata=layout)
    return directory / LORA_WEIGHT_NAME_SAFE
