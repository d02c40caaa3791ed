"""Forms in which an adapter is saved. Each but peft's is one that diffusers reads back; `prove` tries it before training.

diffusers  pytorch_lora_weights.safetensors: `<component>.<layer>.lora_A.weight`, DoRA's magnitudes as
           `<component>.<layer>.lora_magnitude_vector`, and the layout (rank, alpha, variant) as metadata, without which a
           loader takes alpha for r and rsLoRA for LoRA
peft       peft/<component>/adapter_model.safetensors and adapter_config.json: `PeftModel.from_pretrained(network, folder)`
comfyui    lora_comfyui.safetensors: names as ComfyUI calls the layers, the scale within B (of LoKr: within W1)
kohya      lora_kohya.safetensors: names with _ for dots, `lora_down`, `lora_up`, and s r as `alpha`

Some programs hold several layers as one, below one another: it then has A = [A1; A2; ...] and B = diag(B1, B2, ...).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE, LoraBaseMixin
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad

from flowrun.adapters.config import Config, Form, Variant
from flowrun.adapters.files import LOADED_AS, layer_of
from flowrun.adapters.lora import NAME, carriers, weights_of
from flowrun.config import ConfigError
from flowrun.pipelines import AdapterNames
from flowrun.pipelines._adapter_names import flat

FILES = {Form.comfyui: "lora_comfyui.safetensors", Form.kohya: "lora_kohya.safetensors"}
A, B = ".lora_A.weight", ".lora_B.weight"
Weights = dict[str, Tensor]


def save(directory: Path, models: Mapping[str, Module], form: Form, config: Config, names: AdapterNames | None) -> list[Path]:
    """Write the adapter in one form. Returns the file, or the folders, made. Raises ConfigError where there is no such form."""
    if form is Form.diffusers:
        return _diffusers_files(directory, models)
    if form is Form.peft:
        return [_peft(directory, name, model) for name, model in models.items()]
    weights = {name: {key: value.detach().float().cpu() for key, value in weights_of(model).items()} for name, model in models.items()}
    save_file(foreign(models, weights, form, config, names), directory / FILES[form])
    return [directory / FILES[form]]


def foreign(models: Mapping[str, Module], weights: Mapping[str, Weights], form: Form, config: Config,
            names: AdapterNames | None) -> Weights:
    """The tensors of a file that other programs read. models: with the adapter. weights: component -> its adapter's, on the CPU.

    Raises ConfigError for a layer that has no name there."""
    prefixes = _prefixes(form, config, names)
    found: Weights = {}
    for name, model in models.items():
        if config.variant is Variant.lokr:
            found |= _lokr(weights[name], _scales(model), prefixes[name])
        else:
            ends = ("lora_down", "lora_up") if form is Form.kohya else names.ends
            for layer, (a, b, scale) in _joined(model, weights[name], names, form).items():
                start = flat(prefixes[name], layer)
                found |= {f"{start}.{ends[0]}.weight": a, f"{start}.{ends[1]}.weight": b if form is Form.kohya else scale * b}
                if form is Form.kohya:
                    found[f"{start}.alpha"] = torch.tensor(scale * len(a))
    return {key: value.contiguous() for key, value in found.items()}


def refuse(form: Form, config: Config, names: AdapterNames | None) -> None:
    """Raises ConfigError for a form that this variant, model or component does not have at all."""
    if (why := _why_not(form, config, names)) is not None:
        forms = ", ".join(other.value for other in possible(config, names))
        raise ConfigError("adapter.export", f"{form.value}: {why}", f"what there is: {forms}")
    if form in FILES or (form is not config.own_form and form is Form.diffusers):
        for name in config.lora_base_model:
            if name not in _prefixes(form, config, names):
                raise _nameless(form, f"{name} has no name there that diffusers reads")


def possible(config: Config, names: AdapterNames | None) -> list[Form]:
    """Forms of this variant and model, which particular layers may still lack."""
    return [form for form in Form if _why_not(form, config, names) is None]


def _why_not(form: Form, config: Config, names: AdapterNames | None) -> str | None:
    variant = config.variant.value
    if form is Form.peft:
        return None
    if config.variant is Variant.loha:
        return f"diffusers reads no {variant}"
    if form is Form.diffusers:
        return None if config.own_form is form or (names and names.lokr) else f"this model's load_lora_weights reads no {variant}"
    if config.variant is Variant.dora:
        return "diffusers does not read dora's magnitudes from there"
    if config.variant is Variant.lokr and form is Form.kohya:
        return f"diffusers reads no {variant} from there"
    return None if _prefixes(form, config, names) else f"diffusers reads no {variant} of this model from there"


def _prefixes(form: Form, config: Config, names: AdapterNames | None) -> Mapping[str, str]:
    if names is None:
        return {}
    return names.lokr if config.variant is Variant.lokr else getattr(names, form.value)


def _nameless(form: Form, what: str) -> ConfigError:
    return ConfigError("adapter.export", f"{form.value}: {what}", "use other forms, or other adapter.targets and components")


def _joined(model: Module, weights: Weights, names: AdapterNames, form: Form) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Name there -> A, B, s."""
    scales, layers = _scales(model), sorted({layer_of(key) for key in weights})
    for layer in layers:
        if weights.keys() & {f"{layer}{A}", f"{layer}{B}"} != {f"{layer}{A}", f"{layer}{B}"}:
            raise _nameless(form, f"{layer} is no linear layer or convolution")
    try:
        grouped = names.grouped(layers)
    except KeyError as error:
        raise _nameless(form, f"{error.args[0]} has no name there that diffusers reads") from error
    found = {}
    for name, members in grouped.items():
        if len(members) == 1:
            found[name] = (weights[members[0] + A], weights[members[0] + B], scales[members[0]])
            continue
        scale = next(scales[layer] for layer in members if layer in scales)
        pairs = [_pair(model, weights, layer, members, scales.get(layer, scale) / scale) for layer in members]
        a, b = torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs))
        if names.width(name) not in (None, len(b)):
            what = f"{', '.join(members)} are {len(b)} wide together, and diffusers reads them {names.width(name)} wide alone"
            raise _nameless(form, what)
        found[name] = (a, b, scale)
    return found


def _pair(model: Module, weights: Weights, layer: str, members: list[str], factor: float) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] of one of several layers, r of the largest; zeros for one without an adapter."""
    shapes = [weights[member + A].shape for member in members if member + A in weights]
    rank, inputs = max(shape[0] for shape in shapes), shapes[0][1]
    if layer + A not in weights:
        return torch.zeros(rank, inputs), torch.zeros(model.get_submodule(layer).out_features, rank)
    a, b = weights[layer + A], weights[layer + B]
    return pad(a, (0, 0, 0, rank - len(a))), factor * pad(b, (0, rank - len(a)))


def _lokr(weights: Weights, scales: Mapping[str, float], prefix: str) -> Weights:
    first = {layer: next(f"{layer}.{end}" for end in ("lokr_w1", "lokr_w1_a") if f"{layer}.{end}" in weights) for layer in scales}
    scaled = {key: scales[layer_of(key)] * value if key == first[layer_of(key)] else value for key, value in weights.items()}
    return {f"{flat(prefix, layer_of(key))}{key.removeprefix(layer_of(key))}": value for key, value in scaled.items()}


def _scales(model: Module) -> dict[str, float]:
    return {layer: carrier.scaling[NAME] for layer, carrier in carriers(model).items()}


def _diffusers_files(directory: Path, models: Mapping[str, Module]) -> list[Path]:
    """diffusers loads one transformer at a time: the second one's adapter lies in a folder of its name, for
    `load_into_transformer_2=True`, under the name of the first."""
    first = {name: model for name, model in models.items() if name not in LOADED_AS}
    saved = [_diffusers(directory, first)] if first else []
    for name in models.keys() - first.keys():
        (directory / name).mkdir()
        saved.append(_diffusers(directory / name, {LOADED_AS[name]: models[name]}).parent)
    return saved


def _diffusers(directory: Path, models: Mapping[str, Module]) -> Path:
    tensors: Weights = {}
    layout: dict[str, Any] = {}
    for name, model in models.items():
        tensors |= LoraBaseMixin.pack_weights(weights_of(model), name)
        layout |= {f"{name}.{key}": value for key, value in _settings(model).items()}
    LoraBaseMixin.write_lora_layers(state_dict=tensors, save_directory=str(directory), is_main_process=True,
                                    weight_name=LORA_WEIGHT_NAME_SAFE, save_function=None, safe_serialization=True,
                                    lora_adapter_metadata=layout)
    return directory / LORA_WEIGHT_NAME_SAFE


def _peft(directory: Path, name: str, model: Module) -> Path:
    folder = directory / "peft" / name
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{key}": value.detach().cpu().contiguous() for key, value in weights_of(model).items()}
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, {"format": "pt"})
    settings = _settings(model) | {"inference_mode": True}
    (folder / CONFIG_NAME).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def _settings(model: Module) -> dict[str, Any]:
    """peft's, as plain data. Sorted: the order of a set is another one in each process."""
    return {key: sorted(value) if isinstance(value, set) else value for key, value in model.peft_config[NAME].to_dict().items()}
