"""Wan 2.2 TI2V, 5B (Wan team 2025), from text: one transformer, a VAE of 16x16x4 pixels, a time for each token."""

from __future__ import annotations

from flowrun.pipelines._wan_tokens import TokenTimes


class Wan22Small(TokenTimes):
    pass
