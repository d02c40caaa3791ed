"""Any model with modular blocks in diffusers, or with blocks of one's own: nothing here knows the family.

What a family's own file would say is found out from the blocks and the VAE:

    shapes          the VAE's, computed on the meta device
    conditions      outputs of the encoding steps that the loop, or a block before it, reads
    packing         the unpacking blocks move each place of the latents somewhere: on numbered places they show where
    normalisation   the decoding steps turn the latents z into what they give the VAE, a z + b in each channel: at z = 0
                    and z = 1 they show b and a + b; anything else is refused

Legend: B rows, C channels, f h w latent frames, height and width (pictures have no f), F H W the same in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState, SequentialPipelineBlocks
from torch import Tensor, nn

from flowrun.config import ConfigError
from flowrun.flow.path import wide
from flowrun.graph import Unit
from flowrun.modular import Modular
from flowrun.pipelines import NEGATIVE, Shape
from flowrun.pipelines._blocks import KEY, Outline, blocks_of, denoiser_of
from flowrun.pipelines._diffusers import DiffusersPipeline, Parts
from flowrun.pipelines._precision import dtype_of
from flowrun.pipelines._targets import posterior, target_units

LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
PROBED = 4  # places on a side of the latents on which the decoding steps are tried
CLOSE = 1e-4
STEPS = 2  # for blocks before the loop; the times of these are not used


class Data(Enum):
    image = "image"
    video = "video"


class AnyBlocks(DiffusersPipeline):
    """Text to image or to video. The VAE is called `vae`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Parts):
        blocks: str | None        # a class of diffusers, e.g. LTXAutoBlocks, or pkg.module:Class
        workflow: str | None      # which of its workflows; null: it has one only
        data: Data                # what the rows' pixels are: image | video
        settings: dict[str, Any]  # values of the blocks' inputs that hold for every row

    rewrites: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, config: Any, seed: int) -> None:
        self.data = config.data.value
        self._scales: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()  # of each VAE that was asked
        super().__init__(config, seed)

    def make_workflow(self) -> SequentialPipelineBlocks:
        workflow = blocks_of(self.config.blocks, self.config.workflow)
        self.denoisers = (denoiser_of(workflow),)
        self.lora_targets = {self.denoiser: LAYERS}
        return workflow

    def make_modular(self, workflow: SequentialPipelineBlocks) -> Modular:
        self._outline = cache(self.weights.outline)  # a large one takes a while

        def outline(name: str, config: Mapping[str, Any]) -> Outline:
            return Outline(name, config, self._outline(name))

        return Modular(workflow, self.configs, self.weights.part, self.denoiser, self.settings(), self.rewrites, outline)

    def settings(self) -> dict[str, Any]:
        return dict(self.config.settings)

    def check(self) -> None:
        if "vae" not in self.configs:
            raise ConfigError(KEY, f"has the networks {', '.join(self.configs)}", "one must be called vae")
        if self.configs[self.denoiser].get("use_meanflow"):
            raise ConfigError(KEY, "predicts mean velocities (use_meanflow)", "choose weights of the model that it was distilled from")
        known = {i.name for i in self.modular.blocks.inputs}
        if wrong := sorted(set(self.config.settings) - known):
            raise ConfigError(f"model.settings.{wrong[0]}", "is no input of the blocks", f"they read {', '.join(sorted(known))}")
        self._vae_outline = self._outline("vae")
        self._volumes = any(isinstance(module, nn.Conv3d) for module in self._vae_outline.modules())
        told = self.modular.told()
        made = [name for unit in self.modular.units(self.inputs) for name in unit.output_params]
        self.conditions = tuple(n for n in dict.fromkeys(made) if n in told and n not in self.inputs and not n.startswith(NEGATIVE))
        self.tokens = {"tokenizer": "max_sequence_length"} if "max_sequence_length" in self.modular.settings else {}

    @property
    def reduction(self) -> int:
        side = 512  # pixels; any VAE halves them a few times
        return side // self._encoded((1, side, side) if self.data == "video" else (side, side))[-1]

    def latent_shape(self, shape: Shape) -> tuple[int, ...]:
        """Raises ConfigError for a shape that the VAE does not give back."""
        if len(shape) != (3 if self.data == "video" else 2):
            raise ConfigError("data", f"rows are {'pictures' if len(shape) == 2 else 'videos'}", f"model.data says {self.data}")
        latents = self._encoded(tuple(shape))
        if (back := self.pixel_shape(latents)) != tuple(shape):
            written = ["x".join(map(str, size)) for size in (shape, back)]
            raise ConfigError("data", f"rows of {written[0]} come back from the VAE as {written[1]}", f"choose {written[1]}")
        return latents

    def pixel_shape(self, latents: Shape) -> Shape:
        return self._decoded(tuple(latents))

    def units(self) -> tuple[Unit, ...]:
        target = target_units(self.config.target, self.moments_as_latents, _unchanged, {"blocks": self.config.blocks}, self.data)
        return (*self.modular.units(self.inputs), *target)

    def schedule(self, steps: int, shape: Shape) -> Tensor:
        return self.modular.schedule(steps, {**self._sizes(shape), "latents": self.pack(torch.zeros(1, *self.latent_shape(shape)))})

    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> BlockState:
        dtype = dtype_of(self.models[self.denoiser])
        told = self.told({name: batch[name] for name in self.conditions}, dtype)
        told |= {f"{NEGATIVE}{name}": value for name, value in told.items()}  # some blocks insist on them; no guider looks at them
        given = {**self._sizes(self.pixel_shape(noise.shape[1:])), **told, "batch_size": len(noise), "num_inference_steps": STEPS}
        self.modular.in_precision(dtype)
        return self.modular.enter({"latents": self.pack(noise.to(dtype)), **given})

    def told(self, conditions: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in conditions.items()}

    def pack(self, latents: Tensor) -> Tensor:
        found = self._places(tuple(latents.shape[1:]))
        return latents if found is None else latents.flatten(1)[:, found.back.to(latents.device)].unflatten(1, found.packed)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        found = self._places(tuple(like.shape[1:]))
        return packed if found is None else packed.flatten(1)[:, found.there.to(packed.device)].unflatten(1, like.shape[1:])

    def moments_as_latents(self, vae: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """As `moments`, already as the network takes them, in fp32."""
        mean, std = map(wide, posterior(vae, self._seen(pixels)))
        if vae not in self._scales:
            self._scales[vae] = self._statistics(vae)
        scale, shift = self._scales[vae]
        mean, std = (mean - shift) / scale, std / scale
        return (mean[:, :, 0], std[:, :, 0]) if self._flat else (mean, std)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.models["vae"]
        dtype = dtype_of(vae)
        return torch.cat([self._pixels(row, vae) for row in wide(latents).to(dtype).split(1)]).clamp(-1, 1)

    def _pixels(self, latents: Tensor, vae: nn.Module) -> Tensor:
        given = {**self._sizes(self.pixel_shape(latents.shape[1:])), "output_type": "pt"}
        state = self.modular.decoded(self.pack(latents), given, {"vae": vae})
        return 2 * wide(state.get("videos" if self.data == "video" else "images")) - 1  # [1, (F,) 3, H, W]

    @property
    def _flat(self) -> bool:
        """Whether a picture is a video of one frame to the VAE."""
        return self._volumes and self.data == "image"

    def _seen(self, pixels: Tensor) -> Tensor:
        """[B, (F,) 3, H, W] -> as the VAE takes them."""
        return pixels.transpose(1, 2) if self.data == "video" else pixels[:, :, None] if self._flat else pixels

    @staticmethod
    def _sizes(shape: Shape) -> dict[str, Any]:
        """As blocks call them."""
        *frames, height, width = shape
        return {"height": height, "width": width, "batch_size": 1, **({"num_frames": frames[0]} if frames else {})}

    @lru_cache(maxsize=256)  # noqa: B019 - as many as there are buckets, and one pipeline in a run
    def _encoded(self, shape: Shape) -> tuple[int, ...]:
        *frames, height, width = shape
        pixels = self._seen(torch.empty(1, *frames, 3, height, width, device="meta"))
        latents = self._try(lambda: posterior(self._vae_outline, pixels)[0], "encode", shape)
        return tuple(latents[:, :, 0].shape[1:] if self._flat else latents.shape[1:])

    @lru_cache(maxsize=256)  # noqa: B019
    def _decoded(self, latents: Shape) -> Shape:
        given = torch.empty(1, *latents, device="meta")
        given = given[:, :, None] if self._flat else given
        pixels = self._try(lambda: self._vae_outline.decode(given, return_dict=False)[0], "decode", latents)  # [1, 3, (F,) H, W]
        return tuple(pixels.shape[2:] if self.data == "video" else pixels.shape[-2:])

    @staticmethod
    def _try(call: Any, what: str, shape: Shape) -> Tensor:
        try:
            return call()
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError("data", f"the VAE cannot {what} {'x'.join(map(str, shape))}: {error}", "choose another size") from error

    @lru_cache(maxsize=256)  # noqa: B019
    def _places(self, latents: Shape) -> _Places | None:
        """None: the network takes latents as they are."""
        given = self._sizes(self.pixel_shape(latents))
        packed = self.modular.blank({**given, "dtype": torch.float32}).shape[1:]
        if packed == torch.Size(latents):
            return None
        numbers = torch.arange(packed.numel(), dtype=torch.float64).reshape(1, *packed)
        places = self.modular.unpacked(numbers, given).flatten().long()
        if not torch.equal(places.sort().values, numbers.flatten().long()):
            raise ConfigError(KEY, "unpacks latents by more than moving them", "such a family needs a file of its own")
        return _Places(places, places.argsort(), tuple(packed))

    def _statistics(self, vae: nn.Module) -> tuple[Tensor, Tensor]:
        """scale a and shift b of each channel, [C, 1, ...]: what the decoding steps give the VAE is a z + b. Raises ConfigError."""
        shape = self._encoded((1, *[PROBED * self.reduction] * 2) if self.data == "video" else (PROBED * self.reduction,) * 2)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        at_0, at_1, at_noise = (self._given_to(vae, z) for z in (torch.zeros(shape), torch.ones(shape), noise))
        dims = tuple(range(2, at_0.ndim))
        shift = at_0.mean(dims, keepdim=True)
        scale = at_1.mean(dims, keepdim=True) - shift
        z = noise.to(at_0.device).reshape(at_0.shape)
        if not torch.allclose(at_noise, scale * z + shift, rtol=CLOSE, atol=CLOSE):
            what = "decodes latents by more than a scale and a shift of each channel"
            raise ConfigError(KEY, what, "such a family needs a file of its own")
        return scale, shift

    @torch.no_grad()
    def _given_to(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """What the decoding steps give the VAE for latents [C, (f,) h, w]."""
        device = next(vae.parameters()).device
        given = {**self._sizes(self.pixel_shape(tuple(latents.shape))), "output_type": "pt"}
        try:
            self.modular.decoded(self.pack(latents[None].to(device)), given, {"vae": _Listener(vae)})
        except _Heard as heard:
            return wide(heard.latents)
        raise ConfigError(KEY, "has no step that gives latents to vae.decode", "such a family needs a file of its own")


class _Places(NamedTuple):
    """there: of each place of the latents, in order, its place in what the network takes; back: the inverse. packed: that shape."""

    there: Tensor
    back: Tensor
    packed: Shape


class _Heard(Exception):
    def __init__(self, latents: Tensor) -> None:
        self.latents = latents


class _Listener:
    """A VAE that stops at what it is given to decode, in fp32."""

    dtype = torch.float32

    def __init__(self, vae: nn.Module) -> None:
        self._vae = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)

    def decode(self, latents: Tensor, *arguments: Any, **named: Any) -> Any:
        raise _Heard(latents)


def _unchanged(latents: Tensor) -> Tensor:
    return latents
