"""Adapter files of any form, read under peft's names: component -> its part of the adapter.

diffusers  pytorch_lora_weights.safetensors: `<component>.<layer>.lora_A.weight`, the layout as metadata or not at all
peft       a folder with adapter_model.safetensors and adapter_config.json, for one component; or peft/<component>/ of a run
others     what the family's pipeline in diffusers understands: `lora_unet_...` with `.alpha`, `diffusion_model. ...`
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowrun.adapters.config import Variant
from flowrun.adapters.layouts import MARKS
from flowrun.config import ConfigError

LOADED_AS = {"transformer_2": "transformer"}  # components whose adapter diffusers loads, when it is told to, as if it were another's
RESULT = "model"  # the folder in a run's directory that holds it
MAGNITUDE = ".lora_magnitude_vector"  # end of the names of DoRA's magnitudes
FOREIGN = re.compile(r"^(diffusion_model\.|lora_unet_|lora_transformer_|lora_te\d?_|lycoris_|text_encoders\.)|\.lora_down\.|\.alpha$")
LAYER = re.compile(r"\.(lora_|lokr_|hada_)")  # before it stands the layer's name
KINDS = ("LORA", "LOKR", "LOHA")  # as peft calls them
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """One component's adapter. tensors: under peft's names. layout: peft's settings, where the file records them.

    scale: of B A in a file without a layout that nevertheless says it; None: it does not."""

    tensors: Weights
    layout: Mapping[str, Any]
    scale: float | None

    @property
    def variants(self) -> list[Variant]:
        """What the file is known to hold; LoRA and rsLoRA look alike without a layout."""
        marked = [variant for variant, mark in MARKS.items() if any(mark in key for key in self.tensors)]
        rslora = [Variant.rslora] if self.layout.get("use_rslora") else []
        dora = [Variant.dora] if any(key.endswith(MAGNITUDE) for key in self.tensors) else []
        return marked or [*rslora, *dora] or [Variant.lora]

    @property
    def recorded(self) -> bool:
        return self.alpha is not None

    @property
    def alpha(self) -> float | None:
        """As the layout says."""
        return self.layout.get("lora_alpha", self.layout.get("alpha"))

    @property
    def ranks(self) -> dict[str, int]:
        """Layer -> r, as the tensors' shapes tell it; of LoKr's whole matrices they do not."""
        ends = {"lora_A.weight": 0, "lora_embedding_A": 0, "lokr_w2_b": 0, "hada_w1_b": 0}
        return {layer_of(key): value.shape[ends[end]] for key, value in self.tensors.items()
                for end in ends if key.endswith(f".{end}")}  # fmt: skip


def layer_of(key: str) -> str:
    """The layer that a weight of an adapter belongs to."""
    return LAYER.split(key)[0]


def places(path: Path, alone: str | None) -> dict[str, Path]:
    """File -> the component it is for, "" when it names them itself. alone: the one to take for a file that names none.

    Raises ConfigError when there is no such file."""
    if path.name == SAFETENSORS_WEIGHTS_NAME and (path.parent / CONFIG_NAME).is_file():
        path = path.parent
    if (path / CONFIG_NAME).is_file():
        return {_component_of(path, alone): path / SAFETENSORS_WEIGHTS_NAME}
    apart = {name: path / name / LORA_WEIGHT_NAME_SAFE for name in LOADED_AS if (path / name / LORA_WEIGHT_NAME_SAFE).is_file()}
    if (path / LORA_WEIGHT_NAME_SAFE).is_file():
        return {"": path / LORA_WEIGHT_NAME_SAFE, **apart}
    if apart:
        return apart
    root = path if path.name == "peft" else path / "peft"
    if found := sorted(folder for folder in root.glob("*") if (folder / CONFIG_NAME).is_file()):
        return {folder.name: folder / SAFETENSORS_WEIGHTS_NAME for folder in found}
    if (path / RESULT).is_dir():
        raise ConfigError("adapter.init_from", f"{path} holds no adapter itself", f"give a run's result, {path / RESULT}")
    if path.is_dir():
        path = path / LORA_WEIGHT_NAME_SAFE
    if not path.is_file():
        raise ConfigError("adapter.init_from", f"there is no file {path}", f"give a directory with {LORA_WEIGHT_NAME_SAFE} or "
                          f"{CONFIG_NAME}, or a safetensors file")
    return {"": path}


def read(path: Path, components: Sequence[str], alone: str | None, reader: str | None, unet: Any) -> dict[str, Part]:
    """components: what the weights may be of. alone: the one to take for weights that name none. reader: diffusers'
    pipeline class for files that others wrote. unet: its configuration, which their names may depend on.

    Raises ConfigError for a file that is none, or in a form that is not understood."""
    parts: dict[str, Part] = {}
    for component, file in places(path, alone).items():
        if component in LOADED_AS and component not in components and file.name == LORA_WEIGHT_NAME_SAFE:
            continue  # it is not asked for
        tensors, metadata = _tensors(file)
        if component and file.name == SAFETENSORS_WEIGHTS_NAME:
            parts[component] = Part({_plain(key): value for key, value in tensors.items()}, _settings(file.parent / CONFIG_NAME), None)
            continue
        scale = None
        if any(map(FOREIGN.search, tensors)):
            tensors, scale = converted(tensors, file, reader, unet)
        elif LORA_ADAPTER_METADATA_KEY in metadata:
            metadata = json.loads(metadata[LORA_ADAPTER_METADATA_KEY])
        tensors = {_plain(key): value for key, value in tensors.items()}
        if (other := component or alone) in LOADED_AS:
            tensors, metadata = (_renamed(named, LOADED_AS[other], other) for named in (tensors, metadata))
        parts |= _parts(tensors, metadata, components, alone, scale, path)
    return parts


def _renamed(named: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """The names of one component's weights or settings as another's."""
    return {f"{new}.{key.removeprefix(f'{old}.')}" if key.startswith(f"{old}.") else key: value for key, value in named.items()}


def _settings(file: Path) -> dict[str, Any]:
    """peft's, of an adapter that is one of our variants."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        kind = found["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        what = f"{file} is not peft's ({type(error).__name__}: {error})"
        raise ConfigError("adapter.init_from", what, "save the adapter again") from error
    if kind not in KINDS:
        raise ConfigError("adapter.init_from", f"{file} is of an adapter called {kind}", f"give one of {', '.join(KINDS)}")
    return found


def _component_of(folder: Path, alone: str | None) -> str:
    if folder.parent.name == "peft":
        return folder.name
    if alone is None:
        raise ConfigError("adapter.init_from", f"{folder} does not say which component it is for, and several carry an adapter",
                          "put each in a folder peft/COMPONENT, or use one component")
    return alone


def _parts(tensors: Weights, metadata: Mapping[str, Any], components: Sequence[str], alone: str | None, scale: float | None,
           path: Path) -> dict[str, Part]:
    if alone and not any(key.startswith(f"{name}.") for key in tensors for name in components):
        tensors = {f"{alone}.{key}": value for key, value in tensors.items()}
    names = dict.fromkeys(key.partition(".")[0] for key in tensors)
    if not tensors or not all(map(LAYER.search, tensors)):
        odd = next((key for key in tensors if not LAYER.search(key)), "nothing")
        raise ConfigError("adapter.init_from", f"{path} holds {odd}, which is no adapter's", "give an adapter's file")
    return {name: Part({key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")},
                       {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")},
                       scale) for name in names}  # fmt: skip


def converted(tensors: Weights, file: Path, reader: str | None, unet: Any) -> tuple[Weights, float]:
    """Other trainers' names -> diffusers', and the scale of B A; scales that differ from layer to layer go into B."""
    if reader is None:
        raise ConfigError("adapter.init_from", f"{file} has another trainer's names ({min(tensors)}), which diffusers reads for "
                          "other model families only", "give it as diffusers or peft save it")
    if odd := [key for key in tensors if "dora_scale" in key]:
        raise ConfigError("adapter.init_from", f"{file} is a DoRA of another trainer ({odd[0]}), whose magnitudes diffusers leaves "
                          "out", "give it as diffusers or peft save it")
    tensors, scale = _unscaled(tensors)
    extra = {"unet_config": SimpleNamespace(**unet)} if unet is not None else {}
    try:
        found = getattr(diffusers, reader).lora_state_dict(tensors, **extra)
        found = found[0] if isinstance(found, tuple) else found
        if odd := [key for key in found if FOREIGN.search(key)]:
            raise ValueError(f"it does not know {min(odd)}")
    except Exception as error:  # diffusers' converters raise many types for names that they do not know
        what = f"diffusers cannot read {file} for {reader} ({' '.join(str(error).split())[:160] or type(error).__name__})"
        raise ConfigError("adapter.init_from", what, "give it as diffusers or peft save it") from error
    if any(".lora" in key or "_lora" in key for key in found) and not any(".lora_A" in key for key in found):
        found = _old_names(found)
    return found, scale


def _unscaled(tensors: Weights) -> tuple[Weights, float]:
    """Weights that count as they are, and the scale all have in common, 1 when they have none. alpha says 1 then."""
    alphas = {key.removesuffix(".alpha"): value.item() for key, value in tensors.items() if key.endswith(".alpha")}
    downs = {layer: next((tensors[f"{layer}.{end}.weight"] for end in ("lora_down", "lora_A") if f"{layer}.{end}.weight" in tensors),
                         None) for layer in alphas}  # fmt: skip
    scales = {layer: alphas[layer] / len(down) for layer, down in downs.items() if down is not None}
    layers = {layer_of(key) for key in tensors if not key.endswith(".alpha")}
    common = {round(scales.get(layer, 1.0), 6) for layer in layers}
    changed = dict(tensors)
    for layer, scale in scales.items():
        if f"{layer}.lora_down.weight" in tensors:
            changed[f"{layer}.alpha"] = torch.tensor(float(len(downs[layer])))
        else:  # not every reader knows it beside these names
            del changed[f"{layer}.alpha"]
        for up in (f"{layer}.lora_up.weight", f"{layer}.lora_B.weight"):
            if up in tensors and len(common) > 1:
                changed[up] = tensors[up] * scale
    return changed, next(iter(scales.values())) if len(common) == 1 and scales else 1.0


def _old_names(tensors: Weights) -> Weights:
    """Of diffusers before it used peft, as it still makes them of kohya's."""
    unet = {key: value for key, value in tensors.items() if key.startswith("unet.")}
    texts = {key: value for key, value in tensors.items() if key not in unet}
    return (convert_unet_state_dict_to_peft(unet) if unet else {}) | (convert_state_dict_to_peft(texts) if texts else {})


def _tensors(file: Path) -> tuple[Weights, dict[str, Any]]:
    try:
        with safe_open(file, "pt") as handle:
            return {key: handle.get_tensor(key) for key in handle.keys()}, handle.metadata() or {}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ConfigError("adapter.init_from", f"{file} is no safetensors file ({error})", "give an adapter saved by "
                          "flowrun, diffusers or peft") from error


def _plain(key: str) -> str:
    """Without wrappers' prefixes and adapters' names."""
    key = re.sub(r"(^|\.)(base_model\.model|module)\.", r"\1", key)
    key = re.sub(rf"{re.escape(MAGNITUDE)}(\.\w+)?\.weight$", MAGNITUDE, key)
    key = re.sub(r"\.((?:lokr|hada)_\w+)\.\w+$", r".\1", key)
    return re.sub(r"\.(lora_[AB])\.\w+\.(weight|bias)$", r".\1.\2", key)
