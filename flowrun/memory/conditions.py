"""What the cache gives a training step beside its target, by shape alone, for captions of the greatest length."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrun.config import ConfigError
from flowrun.pipelines._diffusers import DiffusersPipeline

CLIP = 77  # tokens that a CLIP encoder gives
# pipeline -> the denoiser's setting that is the width of a token's state, and tokens beside max_sequence_length
TEXT = {
    "sdxl": ("cross_attention_dim", CLIP),
    "sd3": ("joint_attention_dim", CLIP),
    "flux": ("joint_attention_dim", 0),
    "flux2_klein": ("joint_attention_dim", 0),
    "qwen_image": ("joint_attention_dim", 0),
    "z_image": ("cap_feat_dim", 0),
    "wan": ("text_dim", 0),
}
MASKS = {"prompt_embeds_mask": torch.int64, "prompt_mask": torch.uint8}  # which tokens are a caption's


def conditions(pipeline: DiffusersPipeline, kind: str, rows: int) -> dict[str, Tensor]:
    """name -> [rows, ...]; of captions of several lengths, all but the last one have the greatest. kind: model.pipeline.

    Raises ConfigError for a family that is not listed."""
    if kind not in TEXT:
        raise ConfigError("model.pipeline", f"memory is not estimated for {kind}", f"it is for {', '.join(TEXT)}")
    settings = pipeline.configs[pipeline.denoiser]
    width, beside = TEXT[kind]
    length = beside + getattr(pipeline.config, "max_sequence_length", 0)
    found = {"prompt_embeds": torch.zeros(rows, length, settings[width])}  # [B, L, C]
    for name in set(pipeline.conditions) - set(found):
        if name == "pooled_prompt_embeds":
            found[name] = torch.zeros(rows, _pooled(settings, kind))  # [B, C]
        else:
            found[name] = torch.ones(rows, length, dtype=MASKS[name])  # [B, L]
            found[name][1:, length // 2 :][-1:] = 0
    return found


def _pooled(settings: dict, kind: str) -> int:
    """Width of the pooled state. SDXL's is told beside six numbers on the picture's size."""
    if kind != "sdxl":
        return settings["pooled_projection_dim"]
    return settings["projection_class_embeddings_input_dim"] - 6 * settings["addition_time_embed_dim"]
