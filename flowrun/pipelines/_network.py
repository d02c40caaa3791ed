"""A diffusers network as a component: from scratch by a seed, or from a folder that `save_pretrained` made."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin

from flowrun.cache.key import digest
from flowrun.config import ConfigError
from flowrun.files import HashFile
from flowrun.graph import seed_of
from flowrun.pipelines import Component
from flowrun.spelling import suggest


@dataclass(frozen=True, kw_only=True)
class Network:
    """folder: where the weights lie; None: random ones, drawn from (seed, name). configuration: complete plain data."""

    cls: type[ModelMixin]
    name: str
    configuration: Mapping[str, Any]
    folder: Path | None
    seed: int

    def component(self) -> Component:
        origin = f"random weights, seed {self.seed}" if self.folder is None else f"weights from {self.folder}"
        return Component(name=self.name, load=self.load, outline=self.outline, configure=lambda: self.configuration,
                         identity=self.identity, describe=f"{self.cls.__name__}, {origin}")  # fmt: skip

    def load(self) -> ModelMixin:
        """Raises ConfigError when the folder's weights are damaged or are not this network's, to the last tensor."""
        if self.folder is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(self.seed, "weights", self.name))
                return self.cls(**self.configuration)
        try:
            network, found = self.cls.from_pretrained(self.folder, local_files_only=True, output_loading_info=True)
        except Exception as error:  # the libraries raise many types for a damaged file; all mean the same to the user
            raise ConfigError("model.weights", f"{self.folder} cannot be loaded: {error}", "save them again") from error
        odd = sorted({*found["missing_keys"], *found["unexpected_keys"]})
        if odd:
            what = f"the tensors in {self.folder} are not this network's: {', '.join(odd[:3])} ({len(odd)} differ)"
            raise ConfigError("model.weights", what, "give weights of the network in model.components")
        return network

    def outline(self) -> ModelMixin:
        with torch.device("meta"):
            return self.cls(**self.configuration)

    def identity(self, hash_file: HashFile) -> bytes:
        plain = json.dumps(self.configuration, sort_keys=True)
        if self.folder is None:
            return digest(self.cls.__name__, plain, "seed", self.seed, self.name)
        files = sorted(path for path in self.folder.iterdir() if path.suffix == ".safetensors")
        return digest(self.cls.__name__, plain, *(hash_file(path) for path in files))


def configuration(cls: type[ModelMixin], given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The class's own settings with `given` put in, plain data. Raises ConfigError for unknown names, wrong types."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    several = {p.name for p in parameters if "tuple" in str(p.annotation).lower()}  # one number, or one for each level
    known = {p.name: list(p.default) if isinstance(p.default, tuple) else p.default for p in parameters}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{key}.{name}", f"is no setting of {cls.__name__}", suggest(name, known))
        default = known[name]
        if default is not None and type(value) is not type(default) and not (type(value) is list and name in several):
            raise ConfigError(f"{key}.{name}", f"is {value!r}", f"a value of type {type(default).__name__} is needed")
    return {**known, **given}


def find_weights(folder: str | None, name: str, config: Mapping[str, Any], key: str) -> Path | None:
    """The component's folder in `folder`: itself, or within a pipeline's folder, or within a run's directory.

    Raises ConfigError when there is none, or when its saved configuration is not `config`."""
    if folder is None:
        return None
    root = Path(folder).expanduser().absolute()
    places = (root, root / name, root / "model" / name)
    place = next((place for place in places if (place / "config.json").is_file()), None)
    if place is None:
        fix = "give a folder made by save_pretrained, a run's directory, or null for random weights"
        raise ConfigError("model.weights", f"{root} holds no {name}", fix)
    saved = json.loads((place / "config.json").read_text(encoding="utf-8"))
    for setting, value in config.items():
        if setting in saved and saved[setting] != value:
            what = f"is {value!r}, but the weights in {place} were made with {saved[setting]!r}"
            raise ConfigError(f"{key}.{setting}", what, "set it to that, or give other weights")
    return place
