"""FLUX.1 [dev] and [schnell] (Black Forest Labs 2024): text to image."""

from __future__ import annotations

from flowrun.pipelines._flux1 import Flux1


class Flux(Flux1):
    blocks = "FluxAutoBlocks"
