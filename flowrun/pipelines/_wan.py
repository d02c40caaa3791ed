"""What the Wan models share (Wan team 2025, arXiv 2503.20314): UMT5's states of a caption, a causal video VAE, a transformer
on 1x2x2 blocks of latents.

Captions are cleaned, padded with zeros to `max_sequence_length`, and not masked. Videos have 1 + n t frames.

Legend: B rows, C channels, f h w latent frames, height and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from diffusers.modular_pipelines.wan.encoders import WanTextEncoderStep, get_t5_prompt_embeds
from diffusers.utils import is_ftfy_available
from torch import Tensor, nn

from flowrun.config import ConfigError
from flowrun.flow.path import wide
from flowrun.pipelines import Shape, _diffusers
from flowrun.pipelines._causal_vae import CausalVideoVae
from flowrun.pipelines._diffusers import TIME_UNITS, DiffusersPipeline
from flowrun.pipelines._frames import FirstAlone
from flowrun.pipelines._saved import SavedWeights

LORA_LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")

Prepared = Mapping[str, Tensor]


class Wan(FirstAlone, CausalVideoVae, DiffusersPipeline):
    """Text to video with one transformer. Subclasses say what else the transformer sees and which one is asked."""

    Config = _diffusers.Config
    data = "video"
    conditions = ("prompt_embeds",)
    blocks = "WanBlocks"
    workflow = None
    rewrites = {"text_encoder": ()}
    tokens = {"tokenizer": "max_sequence_length"}
    lora_targets = {"transformer": LORA_LAYERS}
    token_times: ClassVar[bool] = False  # whether the network is told the time of each token

    def correct(self, workflow: SequentialPipelineBlocks) -> None:
        if not is_ftfy_available():
            raise ConfigError("model.pipeline", "Wan cleans captions with ftfy, which is not installed", "pip install 'flowrun[video]'")
        workflow.sub_blocks["text_encoder"] = OnePrompt()

    def check(self) -> None:
        vae, text = self.configs["vae"], self.configs["text_encoder"]
        self.agree("in_channels", self.seen_channels, self.seen_as)
        self.agree("out_channels", self.channels, "vae.z_dim")
        self.agree("text_dim", text["d_model"], "text_encoder.d_model")
        self.agree("patch_size", [1, self.patch, self.patch], "videos are cut so")
        for name, value in (("scale_factor_spatial", self.reduction), ("scale_factor_temporal", self.frame_reduction)):
            if vae[name] != value:
                raise ConfigError(f"model.components.vae.{name}", f"is {vae[name]}", f"must be {value}, as the VAE's levels")
        if isinstance(self.weights, SavedWeights):
            self.check_kind(self.weights.index)

    def check_kind(self, index: Mapping[str, Any]) -> None:
        """index: of the pipeline that was saved. Raises ConfigError when it is of another Wan model."""
        two, tokens = index.get("boundary_ratio") is not None, bool(index.get("expand_timesteps"))
        if two != (len(self.denoisers) == 2) or tokens != self.token_times:
            kind = "two experts" if two else "one time per token" if tokens else "one transformer and one time per video"
            raise ConfigError("model.weights", f"{self.config.weights} is a Wan with {kind}", "choose the model option of that family")

    @property
    def seen_channels(self) -> int:
        """Channels that the transformer sees."""
        return self.channels

    @property
    def seen_as(self) -> str:
        """Why, in words."""
        return "vae.z_dim"

    def latent_shape(self, shape: Shape) -> tuple[int, ...]:
        places = self.places(shape)
        most = min(self.configs[name]["rope_max_seq_len"] for name in self.denoisers)
        if max(places[0], *(side // self.patch for side in places[1:])) > most:
            frames, height, width = shape
            what = f"a video of {frames} frames of {height}x{width} pixels is larger than the transformer has places for"
            most_frames, most_pixels = self.frames((most,)), most * self.patch * self.reduction
            raise ConfigError("data", what, f"at most {most_frames} frames, {most_pixels} pixels on a side")
        return self.channels, *places

    def schedule(self, steps: int, shape: Shape) -> Tensor:
        """Of diffusers' Euler scheduler with the shift of the saved one. That is UniPC, which solves the same equation to
        second order from about the same levels, and tells the network times rounded to integers."""
        scheduler = FlowMatchEulerDiscreteScheduler(shift=self.modular.part("scheduler").config.flow_shift)
        scheduler.set_timesteps(steps)
        return scheduler.sigmas.float().cpu()

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> Prepared:
        return {name: batch[name] for name in self.conditions}

    def velocity(self, prepared: Prepared, x: Tensor, sigma: Tensor) -> Tensor:
        return self.predicted(self.models[self.denoiser], prepared, x, sigma * TIME_UNITS)

    def predicted(self, network: nn.Module, prepared: Prepared, x: Tensor, time: Tensor) -> Tensor:
        """The network's output at x [B, C, f, h, w] and time [B]: the shape of x, fp32."""
        dtype = next(weight for name, weight in network.named_parameters() if "patch_embedding" in name).dtype  # others stay fp32
        # the block in diffusers tells the time in the precision of the weights, its pipeline in fp32: bf16 cannot tell 750 from 752
        out = network(
            hidden_states=self.seen(prepared, x).to(dtype).contiguous(),
            timestep=self.told_time(time, x),
            encoder_hidden_states=prepared["prompt_embeds"].to(dtype),
            encoder_hidden_states_image=prepared["image_embeds"].to(dtype) if "image_embeds" in prepared else None,
            return_dict=False,
        )[0]
        return wide(out)  # the loss and the solver need it

    def seen(self, prepared: Prepared, x: Tensor) -> Tensor:
        """What the transformer sees of x: [B, seen_channels, f, h, w]."""
        return x

    def told_time(self, time: Tensor, x: Tensor) -> Tensor:
        """time: [B] -> as the network takes it."""
        return time


class OnePrompt(WanTextEncoderStep):
    """Theirs fails when no negative prompt is to be encoded with the prompt."""

    @staticmethod
    def encode_prompt(components: Any, prompt: list[str], device: torch.device, prepare_unconditional_embeds: bool,
                      negative_prompt: None, max_sequence_length: int) -> tuple[Tensor, None]:  # fmt: skip
        embeds = get_t5_prompt_embeds(components.text_encoder, components.tokenizer, prompt, max_sequence_length, device)
        return embeds, None  # [B, max_sequence_length, D]
