"""Whether the words that the prompt quotes stand in the picture: 1 - d / length, read by RapidOCR.

d is the least edit distance between the quoted text and any part of what was read, so 0 when it stands there among other
words, and the text's length when nothing of it does. Case and blanks do not count. `a shop with the sign "OPEN"` -> "open".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flowrun.data import Row, Source
from flowrun.rewards import Reward
from flowrun.rewards._frames import per_frame, to_pil

QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|(?<!\w)'([^']+)'(?!\w)|‘([^’]+)’")


class Ocr(Reward):
    packages = {"rapidocr_onnxruntime": "pip install 'flowrun[ocr]'"}

    def prepare(self, device: torch.device, source: Source | None) -> None:
        from rapidocr_onnxruntime import RapidOCR  # its networks come with the package and run on the CPU

        self._ocr = RapidOCR()

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        """Raises ValueError for a prompt that quotes nothing."""
        for prompt in prompts:
            quoted(prompt)
        return per_frame(self._legible, images, prompts)

    def _legible(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pictures = zip(to_pil(images), map(quoted, prompts), strict=True)
        return torch.tensor([1 - distance(text, self._read(np.asarray(picture))) / len(text) for picture, text in pictures])

    def _read(self, pixels: np.ndarray) -> str:
        """pixels: uint8 [H, W, 3], RGB."""
        found, _ = self._ocr(pixels[:, :, ::-1])  # it takes blue, green, red
        return plain("".join(text for _, text, _ in found or ()))


def quoted(prompt: str) -> str:
    """The quoted parts of a prompt, in small letters without blanks. Raises ValueError when there is none."""
    text = plain("".join(part for match in QUOTED.findall(prompt) for part in match))
    if not text:
        raise ValueError(f"the prompt {prompt!r} quotes no text")
    return text


def plain(text: str) -> str:
    return "".join(text.casefold().split())


def distance(text: str, read: str) -> int:
    """Least number of letters to add, drop or change between `text` and a part of `read` (Sellers 1980)."""
    costs = [0] * (len(read) + 1)  # of the first letters of `text` to a part that ends here
    for length, letter in enumerate(text, start=1):
        before, costs = costs, [length]
        for at, other in enumerate(read, start=1):
            costs.append(min(before[at - 1] + (letter != other), before[at] + 1, costs[-1] + 1))
    return min(costs)
