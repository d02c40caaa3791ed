"""Does a form of export say the same when diffusers reads it back? Tried with random weights, before training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from flowrun.adapters import export
from flowrun.adapters.config import Config, Form, Variant
from flowrun.adapters.files import converted, layer_of
from flowrun.adapters.lora import NAME, carriers, weights_of
from flowrun.config import ConfigError
from flowrun.pipelines import AdapterNames

CLOSE = 1e-4  # of the largest entry: factors are multiplied in another order


def prove(outlines: Mapping[str, Module], config: Config, names: AdapterNames | None) -> None:
    """outlines: networks without weights that carry the adapter. Raises ConfigError for a form that is not read back."""
    for form in config.export:
        export.refuse(form, config, names)
        if form in export.FILES:
            _prove(outlines, form, config, names)


def _prove(outlines: Mapping[str, Module], form: Form, config: Config, names: AdapterNames) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: {key: torch.randn(value.shape, generator=generator) for key, value in weights_of(model).items()}
               for name, model in outlines.items()}  # fmt: skip
    made = export.foreign(outlines, weights, form, config, names)
    unet = dict(outlines["unet"].config) if "unet" in outlines else None
    try:
        back, scale = converted(made, Path(export.FILES[form]), names.reader, unet)
    except ConfigError as error:
        raise ConfigError("adapter.export", f"{form.value}: {error.what}", "use peft, or other adapter.targets") from error
    for name, model in outlines.items():
        read = {key.removeprefix(f"{name}."): value for key, value in back.items() if key.startswith(f"{name}.")}
        if not hasattr(model, "text_model"):  # which diffusers' loader takes off where the network has none
            read = {key.removeprefix("text_model."): value for key, value in read.items()}
        for layer, carrier in carriers(model).items():
            want = carrier.scaling[NAME] * _product(weights[name], layer, config.variant)
            if not _is(read, layer, config.variant, want, scale):
                raise ConfigError("adapter.export", f"{form.value}: diffusers' {names.reader} does not read back the adapter of "
                                  f"{name}.{layer}", "use peft, or adapter.targets without it")


def _is(read: Mapping[str, Tensor], layer: str, variant: Variant, want: Tensor, scale: float) -> bool:
    if not any(layer_of(key) == layer for key in read):
        return False
    found = scale * _product(read, layer, variant)
    return found.shape == want.shape and bool((found - want).abs().max() <= CLOSE * want.abs().max())


def _product(weights: Mapping[str, Tensor], layer: str, variant: Variant) -> Tensor:
    """What the adapter does to some inputs, without its scale: B A x, or (W1 kron W2) x = W1 X W2^T."""
    generator = torch.Generator().manual_seed(1)
    if variant is Variant.lokr:
        w = {end: weights.get(f"{layer}.lokr_{end}") for end in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")}
        w1 = w["w1"] if w["w1"] is not None else w["w1_a"] @ w["w1_b"]
        w2 = (w["w2"] if w["w2"] is not None else w["w2_a"] @ w["w2_b"]).flatten(1)
        return w1 @ torch.randn(w1.shape[1], w2.shape[1], generator=generator) @ w2.T
    a, b = weights[f"{layer}.lora_A.weight"].flatten(1), weights[f"{layer}.lora_B.weight"].flatten(1)
    return b @ (a @ torch.randn(a.shape[1], 2, generator=generator))
