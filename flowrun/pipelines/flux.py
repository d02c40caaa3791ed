"""FLUX.1 [dev] and [schnell] (Black Forest Labs 2024): text to image."""

from __future__ import annotations

from flowrun.pipelines import AdapterNames
from flowrun.pipelines._flux1 import Flux1

# ComfyUI and kohya hold attention's inputs as one layer, and call blocks as the first release did. diffusers takes the
# joint layers of single blocks apart at the published width alone.
NAMES = AdapterNames(
    reader="FluxPipeline", comfyui={"transformer": "diffusion_model."}, kohya={"transformer": "lora_unet_"},
    ends=("lora_down", "lora_up"), widths={"single_blocks.{}.linear1": 3 * 3072 + 12288},
    renamed={
        "double_blocks.{}.img_attn.qkv": [f"transformer_blocks.{{}}.attn.to_{x}" for x in "qkv"],
        "double_blocks.{}.img_attn.proj": ["transformer_blocks.{}.attn.to_out.0"],
        "double_blocks.{}.txt_attn.qkv": [f"transformer_blocks.{{}}.attn.add_{x}_proj" for x in "qkv"],
        "double_blocks.{}.txt_attn.proj": ["transformer_blocks.{}.attn.to_add_out"],
        "double_blocks.{}.img_mlp.0": ["transformer_blocks.{}.ff.net.0.proj"],
        "double_blocks.{}.img_mlp.2": ["transformer_blocks.{}.ff.net.2"],
        "double_blocks.{}.txt_mlp.0": ["transformer_blocks.{}.ff_context.net.0.proj"],
        "double_blocks.{}.txt_mlp.2": ["transformer_blocks.{}.ff_context.net.2"],
        "double_blocks.{}.img_mod.lin": ["transformer_blocks.{}.norm1.linear"],
        "double_blocks.{}.txt_mod.lin": ["transformer_blocks.{}.norm1_context.linear"],
        "single_blocks.{}.linear1": [f"single_transformer_blocks.{{}}.{x}" for x in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")],
        "single_blocks.{}.linear2": ["single_transformer_blocks.{}.proj_out"],
        "single_blocks.{}.modulation.lin": ["single_transformer_blocks.{}.norm.linear"],
    },
)  # fmt: skip


class Flux(Flux1):
    blocks = "FluxAutoBlocks"
    adapter_names = NAMES
