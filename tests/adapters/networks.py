"""Tiny random networks, adapters on them, and what tests of both share."""

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from transformers import BertConfig, BertModel

from flowrun.adapters import Config, attach
from flowrun.config import ConfigError
from flowrun.registry import checked

LORA = {
    "kind": "lora",
    "variant": "lora",
    "lora_base_model": ["transformer"],
    "targets": ["to_q", "to_v"],
    "rank": 4,
    "alpha": 8.0,
    "dropout": 0.0,
    "init_from": None,
    "merge_first": [],
    "export": [],
}
NONE = {
    "kind": "none",
    "variant": None,
    "lora_base_model": [],
    "targets": "auto",
    "rank": None,
    "alpha": None,
    "dropout": None,
    "init_from": None,
    "merge_first": [],
    "export": [],
}
FILE = "pytorch_lora_weights.safetensors"


def config(**changes):
    return checked("adapter", Config, LORA | changes)


def none(**changes):
    return checked("adapter", Config, NONE | changes)


def flux(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=8,
            guidance_embeds=False,
            axes_dims_rope=[4, 6, 6],
        )


def bert():
    return BertModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=11)
    )


@torch.no_grad()
def output(model):
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=g)

    return model(
        hidden_states=draw(2, 4, 4),
        encoder_hidden_states=draw(2, 3, 16),
        pooled_projections=draw(2, 8),
        timestep=torch.tensor([0.2, 0.7]),
        img_ids=torch.zeros(4, 3),
        txt_ids=torch.zeros(3, 3),
        return_dict=False,
    )[0]


def shake(parameters, seed=1):
    """Stands in for training: no adapter weight stays at its start."""
    g = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=g))


def lora_model(dtype=torch.float32, seed=0, **changes):
    model = flux().to(dtype)
    attach({"transformer": model}, [], config(**changes), {"transformer": ["to_q", "to_k"]}, seed)
    return model


def outlines():
    with torch.device("meta"):
        return {"transformer": flux()}


def refusal(act):
    with pytest.raises(ConfigError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plain_pipeline():
    """diffusers' own, with the same network and no adapter."""
    absent = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(**absent, transformer=flux())
