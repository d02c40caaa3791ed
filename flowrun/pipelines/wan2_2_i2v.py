"""Wan 2.2 image to video, A14B (Wan team 2025): two experts, the first frame's latents beside x, no image encoder."""

from __future__ import annotations

from flowrun.pipelines._wan_experts import TwoExperts
from flowrun.pipelines._wan_image import FromImage


class Wan22ImageToVideo(TwoExperts, FromImage):
    blocks = "Wan22Image2VideoBlocks"
