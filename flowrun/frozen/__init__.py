"""How the weights of frozen components are held: quantised, cast when they are called, or waiting in the CPU's memory.

All of it is done by diffusers' own quantisers and hooks. A trained component's own weights are always held in full.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from flowrun.adapters.config import Config, Variant
from flowrun.config import ConfigError, Held, Memory
from flowrun.frozen.cast import Cast
from flowrun.frozen.layers import in_full
from flowrun.frozen.offload import Offloaded
from flowrun.frozen.quantized import LIBRARIES, Quantized, check_installed
from flowrun.graph import Unit, UnitGraph
from flowrun.pipelines import Holding
from flowrun.spelling import suggest

KEY = "memory.weights"
# DoRA reads the base's weights, the products their shape: what peft cannot find where they are held so.
UNFIT = {Variant.dora: (Held.bnb_int8, Held.fp8_cast), Variant.lokr: (Held.bnb_nf4,), Variant.loha: (Held.bnb_nf4,)}


def holdings(memory: Memory, components: Collection[str], trainable: Sequence[str]) -> dict[str, Holding]:
    """Component -> how it is held, for those that are named. trainable: what is trained as it is, without an adapter.

    Needs no library. Raises ConfigError for a name that is none, or one of which all is trained."""
    for name, held in memory.weights.items():
        if name not in components:
            raise ConfigError(f"{KEY}.{name}", "is no component of the pipeline", suggest(name, components))
        if name in {trained.split(".")[0] for trained in trainable}:
            what = f"is {held.value}, but {name} is in task.trainable_models, and only weights held in full can be trained"
            raise ConfigError(f"{KEY}.{name}", what, "train it through an adapter, adapter=lora, or take it out of here")
    return {name: _holding(held) for name, held in memory.weights.items()}


def _holding(held: Held) -> Holding:
    if held is Held.fp8_cast:
        return Cast()
    return Offloaded() if held is Held.offload else Quantized(held)


def check_machine(memory: Memory) -> None:
    """Libraries and devices that the settings ask for are there. Raises ConfigError."""
    for name, held in memory.weights.items():
        key = f"{KEY}.{name}"
        if held is Held.offload and not torch.accelerator.is_available():
            raise ConfigError(key, "is offload, but this machine has no GPU: all weights are in the CPU's memory", "leave it out")
        if (package := LIBRARIES.get(held)) is not None:
            check_installed(key, held, package)


def check_adapter(memory: Memory, adapter: Config) -> None:
    """peft has the adapter's layer for a base that is held so. Raises ConfigError."""
    for name in adapter.lora_base_model:
        held = memory.weights.get(name)
        if held in UNFIT.get(adapter.variant, ()):
            what = f"is {adapter.variant.value}, and peft cannot read the weights of {name} that {KEY} holds as {held.value}"
            raise ConfigError("adapter.variant", what, "use lora, or torchao_int8")


def check_backward(
    held: Mapping[str, Holding], networks: Collection[str], units: Sequence[Unit], trained: Collection[str]
) -> None:
    """No gradient passes through what is moved away after it was called. networks: those that the loss calls itself.

    Raises ConfigError."""
    passed = {*networks, *(model for i in UnitGraph(units).gradient_units(trained) for model in units[i].onload_model_names)}
    for name, holding in held.items():
        if isinstance(holding, Offloaded) and name in {model.partition(".")[0] for model in passed}:
            what = f"is offload, but gradients pass through {name}, and the backward pass would look for its weights in vain"
            raise ConfigError(f"{KEY}.{name}", what, "offload encoders that are frozen, and quantise this one, e.g. bnb_nf4")


def told(held: Mapping[str, Holding], outlines: Mapping[str, nn.Module], dtype: torch.dtype) -> list[str]:
    """A line for each component: what its weights take on the device, and in full. outlines: networks on the meta device."""
    lines = []
    for name, holding in held.items():
        full, own = in_full(outlines[name], dtype), holding.bytes(outlines[name], dtype)
        lines.append(f"{name}: {holding.describe}, {gb(own)} instead of {gb(full)}: saves {gb(full - own)}")
    return lines


def gb(count: int) -> str:
    """As people read it, 10^9 bytes a GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"
