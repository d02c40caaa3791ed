"""A pipeline that nobody has saved: networks of given settings with weights drawn from the seed, letters as tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn
from transformers import Qwen2Tokenizer
from transformers.image_processing_base import ImageProcessingMixin
from transformers.processing_utils import ProcessorMixin

from flowrun.cache.key import digest
from flowrun.config import ConfigError
from flowrun.files import HashFile
from flowrun.graph import seed_of
from flowrun.modular import Names
from flowrun.pipelines._network import configuration
from flowrun.pipelines._processors import processor
from flowrun.pipelines._texts import readers_of
from flowrun.pipelines._tokenizers import tokenizer
from flowrun.spelling import suggest

KEY = "model.components"
VISION_MARKS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}


class RandomWeights:
    """settings: of each network and of the scheduler; a null one is left out. Raises ConfigError for what is wrong."""

    def __init__(self, names: Names, settings: Mapping[str, Any], seed: int) -> None:
        self.names, self.seed = names, seed
        known = [*names.networks, *(name for name in names.parts if not _is_tokenizer(name))]
        for name in settings:
            if name not in known:
                raise ConfigError(f"{KEY}.{name}", "is no component that takes settings", suggest(name, known))
        for name in known:
            if name not in settings:
                raise ConfigError(f"{KEY}.{name}", "is not given", "give its settings, or a folder as model.weights")
        self._given = {name: settings[name] for name in known}
        self._configs = {name: self._full(name) for name in names.networks if settings[name] is not None}

    def config(self, name: str) -> Mapping[str, Any] | None:
        """Complete settings of a network; None: left out."""
        return self._configs.get(name)

    def load(self, name: str) -> nn.Module:
        """Random weights: a function of seed and name."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "weights", name))
            return self._make(name)

    def outline(self, name: str) -> nn.Module:
        with torch.device("meta"):
            return self._make(name)

    def identity(self, name: str, hash_file: HashFile) -> bytes:
        plain = json.dumps(self._configs[name], sort_keys=True, default=str)
        return digest(self.names.networks[name].__name__, plain, "seed", self.seed, name)

    def part(self, name: str) -> Any:
        cls = self.names.parts[name]
        if _is_tokenizer(name):
            return tokenizer(cls)
        if issubclass(cls, ProcessorMixin):
            return processor(tokenizer(Qwen2Tokenizer), self._given[name], f"{KEY}.{name}")
        if issubclass(cls, ImageProcessingMixin):
            return _image_processor(cls, self._given[name], f"{KEY}.{name}")
        return cls(**configuration(cls, self._given[name], f"{KEY}.{name}"))

    def part_identity(self, name: str, hash_file: HashFile) -> bytes:
        part, settings = self.part(name), json.dumps(self._given.get(name), sort_keys=True)
        if isinstance(part, ImageProcessingMixin):
            return digest(name, part.to_json_string())
        words = getattr(part, "tokenizer", part)
        return digest(name, words.backend_tokenizer.to_str() if words.is_fast else words.get_vocab(), settings)

    def describe(self, name: str) -> str:
        return f"{self.names.networks[name].__name__}, random weights, seed {self.seed}"

    def _full(self, name: str) -> dict[str, Any]:
        cls, given, key = self.names.networks[name], dict(self._given[name]), f"{KEY}.{name}"
        if issubclass(cls, ModelMixin):
            return configuration(cls, given, key)
        configuration(cls.config_class, given, key)  # for its checks: the class itself derives more than it is given
        return cls.config_class(**(self._with_vocabulary(name, given) if name.startswith("text_encoder") else given)).to_dict()

    def _with_vocabulary(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of a text encoder, with what it must have in common with its tokenizer."""
        (reader,) = [part for part in readers_of(name) if part in self.names.parts]
        words = getattr(self.part(reader), "tokenizer", self.part(reader))
        known = {"vocab_size": len(words), "pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id,
                 "eos_token_id": words.eos_token_id}  # fmt: skip
        if "text_config" not in given:
            return {**given, **known}
        there = words.get_vocab()
        marks = {f"{kind}_token_id": there[mark] for kind, mark in VISION_MARKS.items() if mark in there}
        return {**given, "text_config": {**given["text_config"], **known}, **marks}

    def _make(self, name: str) -> nn.Module:
        cls, config = self.names.networks[name], self._configs[name]
        network = cls(**config) if issubclass(cls, ModelMixin) else cls(cls.config_class(**config))
        for parameter, value in network.named_parameters():
            if parameter.endswith("pad_token"):  # Z-Image's are left as the memory was
                nn.init.normal_(value, std=0.02)
        for name, value in network.named_buffers():  # of LTX-2's VAEs, where others have settings
            if name in ("latents_mean", "latents_std"):
                nn.init.uniform_(value, 0.5, 1.5)
        return network


def _image_processor(cls: type, given: Mapping[str, Any], key: str) -> Any:
    """Raises ConfigError for a setting that it does not have."""
    known = cls.valid_kwargs.__annotations__
    for name in given:
        if name not in known:
            raise ConfigError(f"{key}.{name}", f"is no setting of {cls.__name__}", suggest(name, known))
    return cls(**given)


def _is_tokenizer(name: str) -> bool:
    return name.startswith("tokenizer")
