"""FLUX.2 [dev] (Black Forest Labs 2025): Mistral's states; distilled from guided samples and told their guidance."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

from flowrun.pipelines._flux2 import Flux2


class Flux2Dev(Flux2):
    blocks = "Flux2AutoBlocks"

    def correct(self, workflow: SequentialPipelineBlocks) -> None:
        workflow.sub_blocks["text_encoder"].DEFAULT_SYSTEM_MESSAGE = SYSTEM_MESSAGE  # theirs lacks its line break

    def around(self, tokenizer: Any) -> int:
        turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in (("system", SYSTEM_MESSAGE), ("user", ""))]
        return len(tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=True, return_dict=True)["input_ids"])
