"""How well a picture fits its prompt: the cosine between their CLIP embeddings (Hessel et al. 2021, arXiv 2104.08718).

PickScore (Kirstain et al. 2023, arXiv 2305.01569) is a CLIP whose cosine, times its own scale, predicts what people prefer.
Compared with transformers alone on tiny random networks; the published weights have not been run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import CLIPModel

from flowrun.data import Row, Source
from flowrun.rewards import Reward
from flowrun.rewards._clip import Paired, check_place, loaded
from flowrun.rewards._frames import per_frame


class Clip(Reward):
    @dataclass(kw_only=True, slots=True)
    class Config:
        weights: str
        processor: str | None
        scaled: bool

    def check(self, key: str, source: Source | None) -> None:
        check_place(f"{key}.weights", self.config.weights)
        check_place(f"{key}.processor", self.config.processor or self.config.weights)

    def prepare(self, device: torch.device, source: Source | None) -> None:
        self._clip = Paired(loaded(CLIPModel, self.config.weights), self.config.processor or self.config.weights, device)

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        cosine = per_frame(self._clip.cosine, images, prompts)                       # [B]
        return cosine * self._clip.network.logit_scale.exp().cpu() if self.config.scaled else cosine
