"""Wan 2.2 text to video, A14B (Wan team 2025): Wan 2.1 with two experts."""

from __future__ import annotations

from flowrun.pipelines._wan_experts import TwoExperts


class Wan22TextToVideo(TwoExperts):
    blocks = "Wan22Blocks"
