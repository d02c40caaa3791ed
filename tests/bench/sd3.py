"""A Stable Diffusion 3 of 18 M parameters, 17 M of T5 and 2 M of VAE encoder, on a folder of 64 pictures of 64x64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from flowrun.data import Row
from flowrun.pipelines._diffusers import DiffusersPipeline

ROWS, SIDE, TOKENS = 64, 64, 77
SETTINGS = {
    "transformer": "num_layers=5 num_attention_heads=5 attention_head_dim=64 caption_projection_dim=320"
    " joint_attention_dim=512 pooled_projection_dim=256 dual_attention_layers=[]",
    "vae": "block_out_channels=[32,64,128,128] layers_per_block=2 norm_num_groups=32",
    "text_encoder": "hidden_size=128 intermediate_size=512 projection_dim=128",
    "text_encoder_2": "hidden_size=128 intermediate_size=512 projection_dim=128",
    "text_encoder_3": "d_model=512 d_kv=64 num_heads=8 d_ff=1152 num_layers=6",
}
MODEL = ("model=sd3_tiny", *(f"model.components.{name}.{word}" for name, words in SETTINGS.items() for word in words.split()))


def job(folder: Path) -> tuple[str, ...]:
    """The overrides that train it on pictures of coloured noise, made in `folder`, each with a caption of its own."""
    draw = torch.Generator().manual_seed(0)
    folder.mkdir()
    for row in range(ROWS):
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{row}.png")
        (folder / f"{row}.txt").write_text(f"noise number {row}, in all colours")
    return (*MODEL, "data=folder", f"data.path={folder}", f"data.geometry.size=[{SIDE},{SIDE}]", "train.batch_size=1")


def velocity(network: nn.Module, batch: dict[str, Tensor], x: Tensor, sigma: Tensor) -> Tensor:
    """The network by its own arguments."""
    return network(
        hidden_states=x,
        encoder_hidden_states=batch["prompt_embeds"],
        pooled_projections=batch["pooled_prompt_embeds"],
        timestep=1000 * sigma,
        return_dict=False,
    )[0]


def as_diffusers(pipeline: DiffusersPipeline) -> StableDiffusion3Pipeline:
    """Diffusers' own pipeline of the same networks, which must be loaded."""
    parts = {name: pipeline.weights.part(name) for name in pipeline.names.parts}
    whole = StableDiffusion3Pipeline(**pipeline.models, **parts)
    whole.set_progress_bar_config(disable=True)
    return whole


Encode = Callable[[Iterable[Row]], list[object]]  # each row's embeddings and moments, then the empty caption's embeddings


def by_pipeline(whole: StableDiffusion3Pipeline) -> Encode:
    """Diffusers' own functions, row by row."""

    def text(caption: str) -> tuple[Tensor, Tensor]:
        found = whole.encode_prompt(caption, None, None, do_classifier_free_guidance=False, max_sequence_length=TOKENS)
        return found[0], found[2]

    def moments(file: Path) -> tuple[Tensor, Tensor]:
        posterior = whole.vae.encode(whole.image_processor.preprocess(Image.open(file).convert("RGB"))).latent_dist
        return posterior.mean, posterior.std

    return _over(text, moments)


def by_hand(whole: StableDiffusion3Pipeline) -> Encode:
    """Nothing but tokenizers and networks, row by row."""

    def ids(tokenizer: Callable, caption: str) -> Tensor:
        return tokenizer(caption, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt").input_ids

    def text(caption: str) -> tuple[Tensor, Tensor]:
        first = whole.text_encoder(ids(whole.tokenizer, caption), output_hidden_states=True)
        second = whole.text_encoder_2(ids(whole.tokenizer_2, caption), output_hidden_states=True)
        t5 = whole.text_encoder_3(ids(whole.tokenizer_3, caption))[0]  # [1, 77, 512]
        clip = torch.cat((first.hidden_states[-2], second.hidden_states[-2]), dim=-1)
        clip = pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return torch.cat((clip, t5), dim=-2), torch.cat((first[0], second[0]), dim=-1)

    def moments(file: Path) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1)  # [3, H, W]
        posterior = whole.vae.encode(pixels[None] / 127.5 - 1).latent_dist
        return posterior.mean, posterior.std

    return _over(text, moments)


def _over(text: Callable[[str], object], moments: Callable[[Path], object]) -> Encode:
    @torch.no_grad()
    def encode(rows: Iterable[Row]) -> list[object]:
        return [*((text(row.prompt), moments(row.source)) for row in rows), text("")]

    return encode
