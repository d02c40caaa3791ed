"""Wan 2.1 text to video, 1.3B and 14B (Wan team 2025, arXiv 2503.20314)."""

from __future__ import annotations

from flowrun.pipelines._wan import Wan


class WanTextToVideo(Wan):
    pass
