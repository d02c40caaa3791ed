"""Human preference score v2 (Wu et al. 2023, arXiv 2306.09341): the cosine of a CLIP ViT-H/14 trained on people's choices.

Its weights are OpenCLIP's, read here into transformers' CLIP: the package hpsv2 pins pytest and an old protobuf, and its
wheel lacks the vocabulary that it reads. Compared with OpenCLIP's layers in plain torch on tiny random networks; the
published weights have not been run here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from flowrun.config import Failure
from flowrun.data import Row, Source
from flowrun.rewards import Reward
from flowrun.rewards._clip import Paired, check_place, loaded
from flowrun.rewards._frames import per_frame
from flowrun.wording import first_line

NAMES = (  # OpenCLIP's name of a tensor -> that of transformers
    (r"visual\.class_embedding", "vision_model.embeddings.class_embedding"),
    (r"visual\.conv1\.weight", "vision_model.embeddings.patch_embedding.weight"),
    (r"visual\.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    (r"visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"visual\.proj", "visual_projection.weight"),
    (r"visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"token_embedding\.weight", "text_model.embeddings.token_embedding.weight"),
    (r"positional_embedding", "text_model.embeddings.position_embedding.weight"),
    (r"ln_final\.", "text_model.final_layer_norm."),
    (r"text_projection", "text_projection.weight"),
    (r"transformer\.resblocks\.", "text_model.encoder.layers."),
)
INSIDE = ((".ln_1.", ".layer_norm1."), (".ln_2.", ".layer_norm2."), (".attn.", ".self_attn."), (".mlp.c_fc.", ".mlp.fc1."),
          (".mlp.c_proj.", ".mlp.fc2."))  # fmt: skip
TRANSPOSED = ("visual.proj", "text_projection")  # OpenCLIP multiplies from the right


class HpsV2(Reward):
    @dataclass(kw_only=True, slots=True)
    class Config:
        weights: str
        file: str
        clip: str

    def check(self, key: str, source: Source | None) -> None:
        check_place(f"{key}.weights", self.config.weights)
        check_place(f"{key}.clip", self.config.clip)

    def prepare(self, device: torch.device, source: Source | None) -> None:
        network = CLIPModel(loaded(CLIPConfig, self.config.clip)).requires_grad_(False).eval()
        file = _file(self.config.weights, self.config.file)
        try:
            network.load_state_dict(from_openclip(torch.load(file, map_location="cpu", weights_only=True)["state_dict"]))
        except Exception as error:  # torch raises many types for a file that is not its own
            raise Failure(f"{file} does not fit {self.config.clip}: {error}", "download it again") from error
        self._clip = Paired(network, self.config.clip, device)

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        return per_frame(self._clip.cosine, images, prompts)


def from_openclip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An OpenCLIP model's tensors under the names of transformers' CLIPModel, in fp32."""
    found = {}
    for name, tensor in state.items():
        tensor = tensor.float().T if name in TRANSPOSED else tensor.float()
        new = _renamed(name)
        if ".in_proj_" in new:  # query, key and value in one
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                found[new.replace(".in_proj_", f".{part}_proj.")] = piece
        else:
            found[new] = tensor
    return found


def _renamed(name: str) -> str:
    for pattern, new in NAMES:
        if match := re.match(pattern, name):
            name = new + name[match.end() :]
            break
    for old, new in INSIDE:
        name = name.replace(old, new)
    return name


def _file(weights: str, file: str) -> Path:
    if Path(weights).is_dir():
        return Path(weights) / file
    try:
        return Path(hf_hub_download(weights, file))
    except OSError as error:
        raise Failure(f"{file} of {weights} cannot be had: {first_line(error)}", "give a folder that holds it") from error
