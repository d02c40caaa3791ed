"""FLUX.2 [klein] (Black Forest Labs 2026): FLUX.2 with Qwen3's states, told no guidance. The base models are guided by a
negative prompt, the distilled ones not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flowrun.pipelines._flux2 import NAMES, Flux2
from flowrun.pipelines._texts import turn


class Flux2Klein(Flux2):
    blocks = "Flux2KleinAutoBlocks"
    adapter_names = replace(NAMES, reader="Flux2KleinPipeline")

    def around(self, tokenizer: Any) -> int:
        return turn(tokenizer, enable_thinking=False)
