"""How beautiful people find a picture, about 1 to 10: linear layers on a CLIP embedding, the LAION aesthetic predictor
(github.com/christophschuhmann/improved-aesthetic-predictor), whose layers have no activations between them.

Compared with the same layers in torch on tiny random networks; the published weights have not been run here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from flowrun.config import ConfigError, Failure
from flowrun.data import Row, Source
from flowrun.rewards import Reward
from flowrun.rewards._clip import Seen, check_place
from flowrun.rewards._frames import per_frame


class Aesthetic(Reward):
    @dataclass(kw_only=True, slots=True)
    class Config:
        weights: str
        head: str | None

    def check(self, key: str, source: Source | None) -> None:
        check_place(f"{key}.weights", self.config.weights)
        if self.config.head is None or not Path(self.config.head).is_file():
            what = "is null" if self.config.head is None else f"{self.config.head} is no file"
            fix = "give sac+logos+ava1-l14-linearMSE.pth of github.com/christophschuhmann/improved-aesthetic-predictor"
            raise ConfigError(f"{key}.head", what, fix)

    def prepare(self, device: torch.device, source: Source | None) -> None:
        self._clip = Seen(self.config.weights, device)
        self._layers = [(weight.to(device), bias.to(device)) for weight, bias in layers(Path(self.config.head))]
        wide, needs = self._clip.network.config.projection_dim, self._layers[0][0].shape[1]
        if wide != needs:
            what = f"{self.config.head} reads {needs} numbers, {self.config.weights} gives {wide}"
            raise Failure(what, "take the CLIP that it was trained on")

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        return per_frame(self._beauty, images, prompts)

    def _beauty(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        x = self._clip.embed(images)                                         # [N, D]
        for weight, bias in self._layers:
            x = linear(x, weight, bias)
        return x[:, 0].cpu()                                                 # [N]


def layers(file: Path) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of the linear layers, in the order of their numbers. Raises Failure."""
    try:
        state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
        numbers = sorted(int(found[1]) for name in state if (found := re.fullmatch(r"layers\.(\d+)\.weight", name)))
        found = [(state[f"layers.{n}.weight"].float(), state[f"layers.{n}.bias"].float()) for n in numbers]
    except Exception as error:  # torch and safetensors raise many types for a file that is not theirs
        raise Failure(f"{file} cannot be read: {error}", "download it again") from error
    if not found or found[-1][0].shape[0] != 1:
        raise Failure(f"{file} has no linear layers, layers.N.weight, that end in one number", "give an aesthetic predictor's file")
    return found
