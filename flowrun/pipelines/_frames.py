"""Shapes of videos whose VAE takes the first frame alone and then t at a time.

    f = (F - 1) / t + 1

Legend: C channels, f h w latent frames, height and width, F H W frames, height and width in pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrun.config import ConfigError

if TYPE_CHECKING:
    from flowrun.pipelines import Shape


class FirstAlone:
    """Before `DiffusersPipeline` among the bases of a family."""

    reduction: int
    frame_reduction: int  # t

    def places(self, shape: Shape) -> tuple[int, int, int]:
        """(F, H, W) -> (f, h, w). Raises ConfigError for what does not divide."""
        if len(shape) != 3:
            raise ConfigError("data", "rows are pictures, and this model takes videos", "give it videos, data=video")
        (frames, *size), step = shape, self.frame_reduction
        if (frames - 1) % step:
            below = (frames - 1) // step * step + 1
            what = f"a video of {frames} frames does not divide into its first and {step} at a time"
            raise ConfigError("data", what, f"choose 1 + {step} n frames, such as {below} or {below + step}")
        return (frames - 1) // step + 1, *self.tiled(size)

    def frames(self, places: Shape) -> int:
        """(f, h, w) -> F."""
        return (places[0] - 1) * self.frame_reduction + 1

    def pixel_shape(self, latents: Shape) -> Shape:
        return self.frames(latents[1:]), *(self.reduction * side for side in latents[2:])
