"""CLIP networks of transformers (Radford et al. 2021, arXiv 2103.00020), in fp32: pictures and texts as points on a sphere.

Legend: N pictures, D numbers of an embedding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer, CLIPVisionModelWithProjection

from flowrun.config import ConfigError, Failure
from flowrun.rewards._frames import to_pil
from flowrun.wording import first_line


def check_place(key: str, weights: str | None) -> None:
    """Raises ConfigError for what is neither a folder nor can be the id of one on the hub."""
    if weights is None or not (Path(weights).is_dir() or re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", weights)):
        raise ConfigError(key, f"is {weights!r}, which is no folder", "give one that save_pretrained wrote, or an id on the hub")


def loaded(cls: Any, weights: str) -> Any:
    """From a folder, or by its id on the hub. Raises Failure when that fails or the weights are not all there."""
    lacking: Sequence[str] = ()
    try:
        if not issubclass(cls, nn.Module):
            return cls.from_pretrained(weights)
        network, found = cls.from_pretrained(weights, output_loading_info=True, dtype=torch.float32)
        lacking = sorted(found["missing_keys"])
    except (OSError, ValueError, RuntimeError) as error:
        fix = "give a folder that save_pretrained wrote, or an id on the hub"
        raise Failure(f"the {cls.__name__} of {weights} cannot be loaded: {first_line(error)}", fix) from error
    if lacking:
        raise Failure(f"{weights} lacks {len(lacking)} tensors of a {cls.__name__}, e.g. {lacking[0]}", "give a whole one")
    return network.requires_grad_(False).eval()


class Seen:
    """Pictures alone. weights: of any CLIP, whose image processor stands beside it."""

    def __init__(self, weights: str, device: torch.device) -> None:
        self.network = loaded(CLIPVisionModelWithProjection, weights).to(device)
        self.processor = loaded(CLIPImageProcessor, weights)

    def embed(self, images: Tensor) -> Tensor:
        """images: [N, 3, H, W] in [0, 1]. [N, D], of length 1, on the network's device."""
        return normalize(self.network(pixels(self.processor, images, self.network.device)).image_embeds, dim=-1)


class Paired:
    """Pictures with texts. place: where tokenizer and image processor are."""

    def __init__(self, network: CLIPModel, place: str, device: torch.device) -> None:
        self.network = network.to(device)
        self.processor, self.tokenizer = loaded(CLIPImageProcessor, place), loaded(CLIPTokenizer, place)

    def cosine(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """images: [N, 3, H, W] in [0, 1], with a text each, cut to what the network takes. [N], on the CPU."""
        most = self.network.config.text_config.max_position_embeddings
        texts = self.tokenizer(list(prompts), padding=True, truncation=True, max_length=most, return_tensors="pt")
        device = self.network.device
        out = self.network(pixel_values=pixels(self.processor, images, device), **texts.to(device))
        return (normalize(out.image_embeds, dim=-1) * normalize(out.text_embeds, dim=-1)).sum(-1).cpu()


def pixels(processor: CLIPImageProcessor, images: Tensor, device: torch.device) -> Tensor:
    """[N, 3, h, w], scaled, cut and normalised as the processor says."""
    return processor(images=to_pil(images), return_tensors="pt")["pixel_values"].to(device)
