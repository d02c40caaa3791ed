"""LTX-2 (HaCohen et al. 2026, arXiv 2601.03233): text to video with sound."""

from __future__ import annotations

from flowrun.pipelines._ltx2 import LTX2


class TextToVideoWithSound(LTX2):
    pass
