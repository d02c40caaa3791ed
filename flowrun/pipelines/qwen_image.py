"""Qwen-Image (Qwen team 2025, arXiv 2508.02324): text to image."""

from __future__ import annotations

from flowrun.pipelines import AdapterNames, _diffusers
from flowrun.pipelines._qwen import Qwen


class QwenImage(Qwen):
    Config = _diffusers.Config
    blocks = "QwenImageAutoBlocks"
    rewrites = {"text_encoder": ()}
    tokens = {"tokenizer": "max_sequence_length"}
    adapter_names = AdapterNames(reader="QwenImagePipeline", comfyui={"transformer": "diffusion_model."},
                                 kohya={"transformer": "lora_unet_"})  # fmt: skip
