"""Pictures one by one, for rewards that look at one at a time: a video's score is the mean of its frames'."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PIL import Image
from torch import Tensor

from flowrun.data._picture import from_tensor


def per_frame(score: Callable[[Tensor, list[str]], Tensor], images: Tensor, prompts: Sequence[str]) -> Tensor:
    """`score` of pictures [N, 3, H, W] with N prompts, averaged over the frames of each video. [B]."""
    if images.ndim == 4:
        return score(images, list(prompts))
    scores = score(images.flatten(0, 1), [prompt for prompt in prompts for _ in range(images.shape[1])])
    return scores.reshape(len(images), -1).mean(1)


def to_pil(images: Tensor) -> list[Image.Image]:
    """[N, 3, H, W] in [0, 1], to the nearest of 256 values."""
    return [from_tensor(pixels) for pixels in (images.clamp(0, 1) * 255).round().byte()]
