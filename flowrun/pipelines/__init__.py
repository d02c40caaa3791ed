"""A pipeline is a model family: components, units, and the live preparation and velocity of training and sampling.

A new family is one module here with one subclass of `Pipeline`, and one option file in conf/model.

A shape is what one row holds in pixels: (height, width) of a picture, (frames, height, width) of a video.

Legend: B rows, C channels, f h w latent frames, height and width (pictures have no f), F H W frames, height and width in
pixels, T noise levels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import ModelMixin
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from flowrun.cache.key import digest
from flowrun.files import HashFile
from flowrun.flow.guidance import guide
from flowrun.graph import Unit
from flowrun.pipelines._adapter_names import AdapterNames as AdapterNames
from flowrun.pipelines._precision import computes_in, dtype_of
from flowrun.sound import Hearing, Wave

Shape = tuple[int, ...]
NEGATIVE = "negative_"  # before the name of a condition: of the prompt that guidance subtracts


@dataclass(frozen=True, kw_only=True)
class Component:
    """One network and all that belongs to it. Making a Component reads no weights."""

    name: str
    load: Callable[[], nn.Module]  # on the CPU, in the precision of its files
    outline: Callable[[], nn.Module]  # without weights, on the meta device: what its parts are called and hold
    configure: Callable[[], Mapping[str, Any]]  # the configuration alone
    identity: Callable[[HashFile], bytes]  # configuration + weights (file contents, or the seed), tokenizer included
    describe: str  # for the plan


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is done to a component's weights once they are loaded."""

    apply: Callable[[nn.Module], None]
    identity: Callable[[HashFile], bytes]  # of all that it depends on
    describe: str


class Holding(ABC):
    """How a frozen component's weights are held where it is not in full on the device. describe: for the plan.

    identity: of what that does to the component's values; empty: nothing."""

    describe: str
    identity: bytes = b""

    @abstractmethod
    def place(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """As it is loaded, from the CPU. dtype: of the weights that the module came with, and computes in."""

    @abstractmethod
    def settle(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Once it carries its adapter, if any."""

    @abstractmethod
    def bytes(self, outline: nn.Module, dtype: torch.dtype) -> int:
        """What its weights then take on the device. outline: the network on the meta device."""


class Pipeline(ABC):
    """`models` holds what a stage has loaded. `velocity` computes in the loaded weights' precision and returns fp32."""

    Config: ClassVar[type]
    data: ClassVar[str] = "image"  # what the rows' pixels are called: image | video
    inputs: ClassVar[tuple[str, ...]]  # names that the units read from the data
    pictures: tuple[str, ...] = ()  # those of them that are condition pictures, one of each row under each name
    conditions: ClassVar[tuple[str, ...]]  # names that `begin` reads
    ragged: ClassVar[tuple[str, ...]] = ()  # those that differ in length from row to row; a batch fills up with zeros
    target: ClassVar[str]  # name of the clean latents
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)  # components that `velocity` calls, each in a range of noise levels
    decoders: ClassVar[tuple[str, ...]] = ()  # components that `decode` calls
    decode_only: ClassVar[tuple[str, ...]] = ()  # parts of them that nothing else calls, so that no gradient comes there
    # component -> the layers that `adapter.targets=auto` means: ends of their names, or a pattern for whole names
    lora_targets: ClassVar[Mapping[str, tuple[str, ...] | str]]
    adapter_names: ClassVar[AdapterNames | None] = None  # of other programs; None: diffusers reads none of theirs

    def __init__(self, config: Any, seed: int) -> None:
        self.config, self.seed = config, seed
        self.models: dict[str, nn.Module] = {}
        self.trained: tuple[str, ...] = ()  # names that get gradients, set by the run
        self.changes: dict[str, Change] = {}  # component -> what becomes part of its weights
        self.holdings: dict[str, Holding] = {}  # component -> how its weights are held, where not as they are
        self._unsettled: list[str] = []

    @property
    def denoiser(self) -> str:
        """The first of them."""
        return self.denoisers[0]

    @property
    def trained_range(self) -> tuple[float, float]:
        """Least and greatest noise level at which what is `trained` is called: where training draws from."""
        return 0.0, 1.0

    def called(self, least: float, greatest: float) -> tuple[str, ...]:
        """Those of `denoisers` that `velocity` calls at noise levels from `least` to `greatest`."""
        return self.denoisers

    @abstractmethod
    def components(self) -> dict[str, Component]: ...

    @abstractmethod
    def units(self) -> tuple[Unit, ...]:
        """What is computed per row before the loss, in order."""

    @property
    def sound(self) -> Hearing | None:
        """What it hears of a row beside the pixels; None: nothing."""
        return None

    @property
    @abstractmethod
    def reduction(self) -> int:
        """Pixels of a picture's side for each of its latents' side."""

    @abstractmethod
    def latent_shape(self, shape: Shape) -> tuple[int, ...]:
        """(C, h, w) or (C, f, h, w) of a row of this shape. Raises ConfigError when the model cannot take it."""

    @abstractmethod
    def schedule(self, steps: int, shape: Shape) -> Tensor:
        """Noise levels to sample rows of this shape at, from 1 to 0: [steps + 1], fp32."""

    def start(self, noise: Tensor, sigmas: Tensor) -> Tensor:
        """Where sampling from noise [B, C, h, w] along the levels `sigmas` begins."""
        return noise

    def level(self, share: Tensor) -> Tensor:
        """Shares of the model's training time in (0, 1], as a task's density draws them, -> noise levels. [B], fp32."""
        return share

    def error_weight(self, sigma: Tensor) -> Tensor | None:
        """[B] -> the factor of a velocity's squared error that makes it the loss which the model was trained by; None: 1."""
        return None

    def weigh(self, squares: Tensor) -> Tensor:
        """Squared errors of latents [B, C, (f,) h, w] as they count in a mean over all of them: the same shape."""
        return squares

    def stream_errors(self, squares: Tensor) -> dict[str, Tensor]:
        """Mean squared errors of each of several streams, for metrics: name -> 0-d."""
        return {}

    @abstractmethod
    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> Any:
        """Batch-level preparation from the `conditions` in `batch`, done once per batch.

        sigmas: the noise levels that will be asked for, [B] in training, [T] in sampling. noise: [B, C, (f,) h, w]."""

    @abstractmethod
    def velocity(self, prepared: Any, x: Tensor, sigma: Tensor) -> Tensor:
        """The network's noise - clean at x [B, C, (f,) h, w] and sigma [B]. Returns the shape of x, fp32."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents -> pictures [B, 3, H, W] or videos [B, F, 3, H, W], fp32 in [-1, 1]."""

    def sounds(self, latents: Tensor) -> Sequence[Wave | None]:
        """What the clean latents of each row sound like; None: like nothing."""
        return [None] * len(latents)

    def pixel_shape(self, latents: Sequence[int]) -> Shape:
        """The shape of rows whose latents are (C, h, w): what `latent_shape` undoes."""
        return tuple(self.reduction * side for side in latents[-2:])

    def is_ragged(self, name: str) -> bool:
        """Whether rows of this name, a condition for the prompt or for the negative one, differ in length."""
        return name.removeprefix(NEGATIVE) in self.ragged

    def joined(self, *batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The conditions of all rows of several batches, in order: name -> [sum of B, ...]."""
        return {
            name: pad_sequence([row for batch in batches for row in batch[name]], batch_first=True)
            if name in self.ragged
            else torch.cat([batch[name] for batch in batches])
            for name in self.conditions
        }

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        """What the family makes of its velocities for the negative prompt and for the prompt; guidance 1 is none."""
        return guide(negative, positive, guidance)

    def guidance_at(self, sigma: Tensor, guidance: float) -> float:
        """The guidance at noise level sigma (0-d) when it is asked for as `guidance`."""
        return guidance

    def long_texts(self, texts: Sequence[str]) -> list[str]:
        """Warnings about those that the text encoders cut, counted and named. Loads no weights."""
        return []

    def noise(self, shape: Shape, generator: torch.Generator) -> Tensor:
        """Where the sampling of one row starts: [C, (f,) h, w], fp32, on the generator's device."""
        return torch.randn(self.latent_shape(shape), generator=generator, device=generator.device)

    def identity(self, name: str, hash_file: HashFile) -> bytes:
        """Of a component as `load` makes it."""
        own = self.components()[name].identity(hash_file)
        changed = digest(own, self.changes[name].identity(hash_file)) if name in self.changes else own
        held = self.holdings[name].identity if name in self.holdings else b""
        return digest(changed, held) if held else changed

    def describe(self, name: str) -> str:
        """A component as `load` makes it, for the plan."""
        own = self.components()[name].describe
        further = [parts[name].describe for parts in (self.changes, self.holdings) if name in parts]
        return ", ".join([own, *further])

    def load(self, names: Collection[str], device: torch.device, dtype: torch.dtype) -> None:
        """Give weights to these components: evaluation mode, frozen, in memory of their own. Raises KeyError.

        Adapters are then put on, if any; `settle` comes last."""
        components = self.components()
        for name in names:
            module, holding = components[name].load(), self.holdings.get(name)
            own_weights(module, device if holding is None else torch.device("cpu"), dtype)
            if name in self.changes:
                self.changes[name].apply(module)
            if holding is not None:
                computes_in(module, dtype)
                holding.place(module, device, dtype)
                self._unsettled.append(name)
            self.models[name] = module.eval().requires_grad_(False)

    def settle(self, device: torch.device) -> None:
        """What was loaded since the last time is held as it stays."""
        while self._unsettled:
            name = self._unsettled.pop()
            self.holdings[name].settle(self.models[name], device, dtype_of(self.models[name]))


def own_weights(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Copy and place every weight: one mapped from a file may be misaligned, which changes a network's last bits.

    Parts that a network of diffusers names as too delicate for half precision are held in fp32, as diffusers holds them."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data = tensor.data.to(device=device, dtype=held_in(module, name, tensor.dtype, dtype), copy=True)


def held_in(module: nn.Module, name: str, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The precision of one of its weights when the network is held in `dtype`. own: that of its files."""
    if not own.is_floating_point:
        return own
    delicate = set(getattr(module, "_keep_in_fp32_modules", None) or ()) if isinstance(module, ModelMixin) else set()
    return torch.promote_types(dtype, torch.float32) if delicate & set(name.split(".")) else dtype
