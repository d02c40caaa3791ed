"""LTX-2's captions: the states of all of Gemma 3's layers, and two connectors that make of them what the video and what
its sound are told.

Legend: B captions, L tokens, D width of the text encoder, N its layers and the embeddings before them.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.modular_pipelines.ltx2.encoders import _get_gemma_prompt_embeds
from diffusers.modular_pipelines.modular_pipeline import ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from torch import Tensor
from transformers import Gemma3ForConditionalGeneration, GemmaTokenizer

SIDE = "left"  # of a caption on which it is filled up


class OnePrompt(ModularPipelineBlocks):
    """Theirs encodes a negative prompt with each prompt."""

    model_name = "ltx2"
    expected_components = [ComponentSpec("text_encoder", Gemma3ForConditionalGeneration), ComponentSpec("tokenizer", GemmaTokenizer)]
    inputs = [InputParam.template("prompt"), InputParam.template("max_sequence_length", default=1024)]
    intermediate_outputs = [OutputParam("text_states", type_hint=Tensor), OutputParam("text_mask", type_hint=Tensor)]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """text_states: [B, L, D N]; text_mask: [B, L], 1 where a token is the caption's."""
        block = self.get_block_state(state)
        prompts = [block.prompt] if isinstance(block.prompt, str) else block.prompt
        encoder = components.text_encoder
        block.text_states, block.text_mask = _get_gemma_prompt_embeds(
            components, prompts, block.max_sequence_length, encoder.device, encoder.dtype
        )
        self.set_block_state(state, block)
        return components, state


class OneConnection(ModularPipelineBlocks):
    """Theirs joins the states of a prompt and of a negative one."""

    model_name = "ltx2"
    expected_components = [ComponentSpec("connectors", LTX2TextConnectors)]
    inputs = [InputParam("text_states", type_hint=Tensor, required=True), InputParam("text_mask", type_hint=Tensor, required=True)]
    intermediate_outputs = [OutputParam(name, type_hint=Tensor) for name in ("prompt_embeds", "audio_prompt_embeds", "prompt_mask")]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """prompt_embeds, audio_prompt_embeds: [B, L, width of a connector]; prompt_mask: [B, L]."""
        block = self.get_block_state(state)
        block.prompt_embeds, block.audio_prompt_embeds, block.prompt_mask = components.connectors(
            block.text_states, block.text_mask, padding_side=SIDE
        )
        self.set_block_state(state, block)
        return components, state
