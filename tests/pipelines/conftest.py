"""The embedded pipeline with a small transformer; the text encoder is loaded once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowrun.pipelines.emoji import EmojiPipeline
from flowrun.registry import PIPELINES

TRANSFORMER = {
    "patch_size": 1, "in_channels": 192, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 384, "pooled_projection_dim": 384, "guidance_embeds": False,
    "axes_dims_rope": [4, 6, 6],
}  # fmt: skip


def make_pipeline(seed: int = 0, transformer: dict[str, Any] | None = None, **changes: Any) -> EmojiPipeline:
    node = {
        "components": {"transformer": {**TRANSFORMER, **(transformer or {})}}, "weights": None, "text_tokens": 8,
        "latents": {"patch": 8, "mean": 0.4, "std": 0.75}, "scheduler": {"shift": 1.0}, **changes,
    }  # fmt: skip
    return EmojiPipeline(PIPELINES.build("model", EmojiPipeline, node), seed)


@pytest.fixture(scope="session")
def make() -> Callable[..., EmojiPipeline]:
    return make_pipeline


@pytest.fixture(scope="session")
def loaded() -> EmojiPipeline:
    """Both components loaded; tests do not change it."""
    pipeline = make_pipeline()
    pipeline.load(("text_encoder", "transformer"), torch.device("cpu"), torch.float32)
    return pipeline
