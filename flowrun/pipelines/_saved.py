"""A diffusers pipeline that was saved: a folder made by `save_pretrained`, or a repository of the Hugging Face hub.

Configurations and tokenizers are read at once; a network's weights when they are loaded, or named by their content.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn

from flowrun.cache.key import digest
from flowrun.cache.sources import MODEL_FILES, folder_identity
from flowrun.config import ConfigError
from flowrun.files import HashFile
from flowrun.modular import Names

log = logging.getLogger(__name__)

INDEX = "model_index.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ADDRESS = re.compile(rf"://huggingface\.co/({HUB_ID.pattern})")
SMALL = ["*.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja"]  # configurations and tokenizers
HALVES = ["*.fp16*", "*.non_ema*"]  # further copies of the same weights
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # widest first
CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json")


class SavedWeights:
    """weights: a folder or a hub id. without: components to leave out. optional: those that may be missing.

    Raises ConfigError for what is no such pipeline, or cannot be reached."""

    def __init__(self, names: Names, weights: str, without: Collection[str], optional: Collection[str]) -> None:
        self.names = names
        folder = Path(weights).expanduser().absolute()
        self.hub_id = None if folder.is_dir() else weights
        if self.hub_id is not None:
            if folder.is_file() or not HUB_ID.fullmatch(weights):
                raise _no_folder(weights, folder)
            folder = _download(weights, SMALL)
        self.folder = folder
        self.index = self._read_index()
        wanted = {**names.networks, **names.parts}
        self._absent = {n for n in wanted if n in optional and (n in without or self._entry(n) is None)}
        for name, cls in wanted.items():
            if name not in self._absent:
                self._check(name, cls)
        self._configs = {n: json.loads((folder / n / "config.json").read_text(encoding="utf-8"))
                         for n in names.networks if n not in self._absent}  # fmt: skip

    def config(self, name: str) -> Mapping[str, Any] | None:
        """A network's saved settings; None: left out."""
        return self._configs.get(name)

    def load(self, name: str) -> nn.Module:
        """In the precision of its files. Raises ConfigError when they are damaged or lack a tensor."""
        cls, folder = self.names.networks[name], self._with_weights(name)
        try:
            dtype = {"torch_dtype": _saved_dtype(folder)} if issubclass(cls, ModelMixin) else {"dtype": "auto"}
            network, found = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True, **dtype)
        except Exception as error:  # the libraries raise many types for a damaged file; all mean the same to the user
            raise ConfigError("model.weights", f"{folder} cannot be loaded: {error}", "save or download them again") from error
        if missing := sorted(found["missing_keys"]):
            what = f"{folder} has no {', '.join(missing[:3])} ({len(missing)} tensors are missing)"
            raise ConfigError("model.weights", what, "save or download them again")
        if more := sorted(found["unexpected_keys"]):
            log.warning("%s has tensors that the network does not use: %s (%d such)", folder, ", ".join(more[:3]), len(more))
        return network

    def outline(self, name: str) -> nn.Module:
        cls, config = self.names.networks[name], self._configs[name]
        with torch.device("meta"):
            return cls.from_config(config) if issubclass(cls, ModelMixin) else cls(cls.config_class.from_dict(config))

    def identity(self, name: str, hash_file: HashFile) -> bytes:
        return folder_identity(self._with_weights(name), hash_file)

    def part(self, name: str) -> Any:
        """Raises ConfigError for a processor that needs a package which is not installed."""
        try:
            return self.names.parts[name].from_pretrained(self.folder / name, local_files_only=True)
        except ImportError as error:
            lacking = "torchvision" if "torchvision" in str(error).lower() else " ".join(str(error).split())
            what = f"the {name} in {self.hub_id or self.folder} needs {lacking}, which is not installed"
            raise ConfigError("model.weights", what, "install the build that fits your torch: pip install torchvision") from error

    def part_identity(self, name: str, hash_file: HashFile) -> bytes:
        files = sorted(path for path in (self.folder / name).iterdir() if path.suffix in MODEL_FILES)
        return digest(name, [[path.name, hash_file(path)] for path in files])

    def describe(self, name: str) -> str:
        return f"{self.names.networks[name].__name__} from {self.hub_id or self.folder}"

    def _read_index(self) -> Mapping[str, Any]:
        file = self.folder / INDEX
        if not file.is_file():
            fix = f"give one that a diffusers pipeline's save_pretrained made: it holds {INDEX}"
            raise ConfigError("model.weights", f"{self.hub_id or self.folder} is no diffusers pipeline", fix)
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError("model.weights", f"{file} is damaged: {error}", "save or download it again") from error

    def _entry(self, name: str) -> str | None:
        """Class of a component by the index."""
        return (self.index.get(name) or [None, None])[1]

    def _check(self, name: str, cls: type) -> None:
        """That the component is there and is what the family's code calls."""
        place, found = self.hub_id or self.folder, self._entry(name)
        if found is None or not any((self.folder / name / file).is_file() for file in CONFIGS):
            kind = self.index.get("_class_name", "pipeline")
            raise ConfigError("model.weights", f"{place}, a {kind}, has no {name}", f"it must have a {cls.__name__} there")
        anything = cls.__name__.startswith("Auto")  # AutoProcessor: whatever the folder says
        if not anything and _kind(found) != _kind(cls.__name__):
            what = f"{place} has a {found} as {name}, this model a {cls.__name__}"
            raise ConfigError("model.weights", what, "choose the model option of that family")
        if name in self.names.networks and self.hub_id is None:
            self._check_weights(name)

    def _check_weights(self, name: str) -> None:
        if not any(path.suffix in (".safetensors", ".bin") for path in (self.folder / name).iterdir()):
            fix = "copy the whole folder, or give the hub id"
            raise ConfigError("model.weights", f"{self.folder / name} holds no weights", fix)

    def _with_weights(self, name: str) -> Path:
        if self.hub_id is not None:
            _download(self.hub_id, [f"{name}/*"])
        return self.folder / name


def _no_folder(weights: str, folder: Path) -> ConfigError:
    """What stands there instead of one, or of a hub id."""
    fix = "give a folder made by a diffusers pipeline's save_pretrained, or a hub id, e.g. owner/name"
    if address := ADDRESS.search(weights):
        return ConfigError("model.weights", f"{weights} is an address", f"give the hub id alone, {address[1]}")
    return ConfigError("model.weights", f"{folder} is one file" if folder.is_file() else f"there is no folder {folder}", fix)


def _kind(name: str) -> str:
    """Of a class, whatever it computes with."""
    return name.removesuffix("Fast").removesuffix("Pil")


def _download(hub_id: str, patterns: list[str]) -> Path:
    """The repository's local copy, with at least these files. Raises ConfigError saying what to do by hand."""
    where = f"hf download {hub_id} --local-dir DIR, where there is a network, and give model.weights=DIR"
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=HALVES))
    except GatedRepoError as error:
        fix = f"accept its licence at https://huggingface.co/{hub_id} and log in with `hf auth login`, or there run: {where}"
        raise ConfigError("model.weights", f"{hub_id} is gated and you have no access", fix) from error
    except RepositoryNotFoundError as error:
        what = f"the hub has no repository {hub_id}, or not for you"
        raise ConfigError("model.weights", what, "check the name, `hf auth login`, or give a folder") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError("model.weights", f"{hub_id} is not on this machine and the hub is out of reach", where) from error


def _saved_dtype(folder: Path) -> torch.dtype | None:
    """The widest of the tensors in the first file that has numbers; None when there are no safetensors."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                found = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise ValueError(f"{file.name}: {error}") from error
        if widest := [dtype for name, dtype in DTYPES.items() if name in found]:
            return widest[0]
    return None
