"""What all families on diffusers' modular blocks share: components, begin, velocity, decode.

Legend: B rows, C channels, h w latent height and width, H W picture height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import diffusers
import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState, SequentialPipelineBlocks
from torch import Tensor, nn

from flowrun.cache.key import digest
from flowrun.config import ConfigError
from flowrun.files import HashFile
from flowrun.flow.path import wide
from flowrun.graph import Unit
from flowrun.modular import Modular, component_names
from flowrun.modular.blocks import quiet
from flowrun.pipelines import Component, Pipeline, Shape
from flowrun.pipelines._conditions import conditioned
from flowrun.pipelines._precision import dtype_of
from flowrun.pipelines._random import RandomWeights
from flowrun.pipelines._saved import SavedWeights
from flowrun.pipelines._targets import Target, posterior, target_units
from flowrun.pipelines._texts import long_texts, no_template, readers_of

TIME_UNITS = 1000  # what the blocks call time runs from 0 to 1000


@dataclass(kw_only=True, slots=True)
class Parts:
    weights: str | None         # a folder that save_pretrained made, a hub id, or null: random weights of `components`
    components: dict[str, Any]  # settings of each component; beside `weights` only null, which leaves one out
    target: Target              # draw | mode of what the VAE says of a picture


@dataclass(kw_only=True, slots=True)
class Config(Parts):
    max_sequence_length: int    # tokens of a caption that the text encoder sees, cut or padded

    def __post_init__(self) -> None:
        if self.max_sequence_length < 1:
            raise ConfigError("model.max_sequence_length", f"is {self.max_sequence_length}", "give at least 1")


class DiffusersPipeline(Pipeline):
    """Subclasses name the family's blocks and say how its latents are packed and normalised."""

    conditions = ("prompt_embeds", "pooled_prompt_embeds")
    target = "target_latents"
    decoders = ("vae",)
    decode_only = ("vae.decoder", "vae.post_quant_conv")

    blocks: ClassVar[str]  # diffusers' class of the family's modular blocks, all workflows
    optional: ClassVar[tuple[str, ...]] = ()  # components that the family can do without
    rewrites: ClassVar[Mapping[str, tuple[str, ...]]]  # block -> inputs that it replaces without saying so
    tokens: ClassVar[Mapping[str, str | None]]  # tokenizer -> the setting that says how many it gives; None: it knows
    around: ClassVar[Callable[[Any], int]] = staticmethod(no_template)  # tokens that stand around a caption and count as its own
    patch: ClassVar[int] = 2  # side of the squares of latents that are one token

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__(config, seed)
        self.inputs = (self.data, "prompt", *self.pictures)
        with quiet("transformers"):  # importing a family's blocks warns of image processors that need torchvision
            workflow = self.make_workflow()
        self.names = component_names(workflow)
        self.weights = self._weights()
        self.configs = {name: self.weights.config(name) for name in self.names.networks}
        self.modular = self.make_modular(workflow)
        self.check()

    def make_workflow(self) -> SequentialPipelineBlocks:
        blocks = getattr(diffusers, self.blocks)()
        workflow = blocks if self.workflow is None else blocks.get_workflow(self.workflow)
        self.correct(workflow)
        return workflow

    def make_modular(self, workflow: SequentialPipelineBlocks) -> Modular:
        return Modular(workflow, self.configs, self.weights.part, self.denoiser, self.settings(), self.rewrites)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Names of the condition pictures of a row; none for text to image."""
        return ()

    @property
    def workflow(self) -> str | None:
        """Which of the blocks' workflows; None: they have one only."""
        return "image_conditioned" if self.pictures else "text2image"

    def correct(self, workflow: SequentialPipelineBlocks) -> None:
        """Change blocks where they do otherwise than the family's pipeline in diffusers."""

    def settings(self) -> dict[str, Any]:
        """Values of the blocks' inputs that hold for every row."""
        return {"max_sequence_length": self.config.max_sequence_length}

    def check(self) -> None:
        """Raises ConfigError for settings that do not fit the components."""

    def agree(self, setting: str, value: Any, name: str) -> None:
        """A setting of the denoisers follows from another component. Raises ConfigError."""
        for denoiser in self.denoisers:
            found = self.configs[denoiser][setting]
            if found != value:
                raise ConfigError(f"model.components.{denoiser}.{setting}", f"is {found}", f"must be {value}, as {name}")

    def told(self, conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        """The conditions of a batch, [B, ...] each, as the loop reads them. dtype: of the denoiser's weights."""
        return {name: value.to(dtype) for name, value in conditions.items()}

    def given(self, noise: Tensor) -> dict[str, Any]:
        """What the loop reads besides conditions and latents. noise: [B, C, h, w], in the precision of the denoiser."""
        return {}

    def pack(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] -> as the network takes them."""
        return latents

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """As the network returns them -> the shape of `like`, [B, C, h, w]."""
        return packed

    def normalise(self, raw: Tensor) -> Tensor:
        """The VAE's latents -> the network's: (raw - shift) scale."""
        return (raw - self._shift) * self._vae["scaling_factor"]

    def denormalise(self, latents: Tensor) -> Tensor:
        """The network's latents [B, C, h, w] -> the VAE's, its inverse."""
        return latents / self._vae["scaling_factor"] + self._shift

    def statistics(self) -> dict[str, Any]:
        """The numbers that `normalise` uses."""
        return {"shift": self._shift, "scale": self._vae["scaling_factor"]}

    @staticmethod
    def moments(vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels [B, 3, H, W] in [-1, 1] -> mean and standard deviation of the VAE's latents, as `normalise` takes them."""
        return posterior(vae, pixels)

    @staticmethod
    def pixels(vae: nn.Module, raw: Tensor) -> Tensor:
        """The VAE's latents [B, C, h, w] -> [B, 3, H, W], about [-1, 1]."""
        return vae.decode(raw, return_dict=False)[0]

    @property
    def channels(self) -> int:
        """C, of the network's latents."""
        return self._vae["latent_channels"]

    def components(self) -> dict[str, Component]:
        return {name: self._component(name) for name, config in self.configs.items() if config is not None}

    def units(self) -> tuple[Unit, ...]:
        target = target_units(self.config.target, self.moments, self.normalise, self.statistics(), self.data)
        return (*(conditioned(unit, self.pictures) for unit in self.modular.units(self.inputs)), *target)

    def latent_shape(self, shape: Shape) -> tuple[int, ...]:
        if len(shape) != 2:
            raise ConfigError("data", f"rows are videos of {shape[0]} frames, and this model takes pictures", "give it pictures")
        return self.channels, *self.tiled(shape)

    def tiled(self, size: Shape) -> tuple[int, int]:
        """(height, width) in pixels -> (h, w) in latents. Raises ConfigError when tokens do not fill it."""
        side, (height, width) = self.tile, size
        if height < side or width < side or height % side or width % side:
            what = f"a picture of {height}x{width} pixels does not divide into tiles of {side}x{side}"
            raise ConfigError("data", what, f"choose sizes that are multiples of {side}")
        return height // self.reduction, width // self.reduction

    def schedule(self, steps: int, shape: Shape) -> Tensor:
        like = torch.empty(1, *self.latent_shape(shape), device="meta")
        return self.modular.schedule(steps, {"height": shape[-2], "width": shape[-1], "latents": self.pack(like)})  # [steps + 1]

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> BlockState:
        dtype = dtype_of(self.models[self.denoiser])
        height, width = (self.reduction * side for side in noise.shape[-2:])
        noise = noise.to(dtype)
        known = {
            "latents": self.pack(noise), "height": height, "width": width,
            "timesteps": sigmas * TIME_UNITS, "num_inference_steps": len(sigmas),
            **self.told({name: batch[name] for name in self.conditions}, dtype), **self.given(noise),
        }  # fmt: skip
        return self.modular.begin(known)

    def velocity(self, prepared: BlockState, x: Tensor, sigma: Tensor) -> Tensor:
        network = self.models[self.denoiser]
        dtype = dtype_of(network)
        packed = self.pack(x.to(dtype)).contiguous()
        out = self.modular.velocity(prepared, packed, sigma * TIME_UNITS, network)
        return self.unpack(wide(out), x)  # [B, C, h, w]; fp32: the loss and the solver need it

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.models["vae"]
        raw = self.denormalise(wide(latents)).to(dtype_of(vae))  # [B, C, (f,) h, w]
        rows = [wide(self.pixels(vae, row)) for row in raw.split(1)]  # one by one: large pictures fit
        return torch.cat(rows).clamp(-1, 1)  # [B, (F,) 3, H, W]

    def long_texts(self, texts: Sequence[str]) -> list[str]:
        found = []
        for name, setting in self.tokens.items():
            if self.configs[name.replace("tokenizer", "text_encoder")] is not None:
                tokenizer = partial(self.modular.part, name)
                most = self.modular.settings[setting] if setting else tokenizer().model_max_length
                found += long_texts(name, tokenizer, most, texts, self.around)
        return found

    @property
    def tile(self) -> int:
        """A picture's sides are multiples of so many pixels."""
        return self.reduction * self.patch

    @property
    def _vae(self) -> Mapping[str, Any]:
        return self.configs["vae"]

    @property
    def _shift(self) -> float:
        return self._vae["shift_factor"] or 0.0  # null: none

    @cached_property
    def reduction(self) -> int:
        """Pixels per side of one place in the latents."""
        return 2 ** (len(self._vae["block_out_channels"]) - 1)

    def _weights(self) -> RandomWeights | SavedWeights:
        c = self.config
        without = {name for name, settings in c.components.items() if settings is None}
        if needed := sorted(without - {*self.optional}):
            fix = f"what can be left out: {', '.join(self.optional) or 'nothing'}"
            raise ConfigError(f"model.components.{needed[0]}", "is null, but this pipeline needs it", fix)
        if c.weights is None:
            return RandomWeights(self.names, c.components, self.seed)
        for name in c.components:
            if name not in self.names.networks:
                raise ConfigError(f"model.components.{name}", "comes with model.weights", "leave it out")
        saved = SavedWeights(self.names, c.weights, _with_readers(without), _with_readers(self.optional))
        for name, settings in c.components.items():
            _compare(name, settings or {}, saved.config(name) or {}, c.weights)
        return saved

    def _component(self, name: str) -> Component:
        w = self.weights
        return Component(name=name, load=partial(w.load, name), outline=partial(w.outline, name),
                         configure=lambda: self.configs[name], identity=partial(self._identity, name),
                         describe=w.describe(name))  # fmt: skip

    def _identity(self, name: str, hash_file: HashFile) -> bytes:
        """Of the network and of the tokenizers that are used beside it: other tokens would be another model."""
        parts = [self.weights.part_identity(beside, hash_file) for beside in readers_of(name) if beside in self.names.parts]
        return digest(self.weights.identity(name, hash_file), parts)


def _with_readers(networks: Collection[str]) -> set[str]:
    return {*networks, *(part for name in networks for part in readers_of(name))}


def _compare(name: str, settings: Mapping[str, Any], saved: Mapping[str, Any], weights: str) -> None:
    for setting, value in settings.items():
        if setting in saved and saved[setting] != value:
            what = f"is {value!r}, but {weights} was made with {saved[setting]!r}"
            raise ConfigError(f"model.components.{name}.{setting}", what, "leave it out")
