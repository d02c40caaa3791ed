"""A pipeline is a model family: components, units, and the live preparation and velocity of training and sampling.

A new family is one module here with one subclass of `Pipeline`, and one option file in conf/model.

Legend: B rows, C channels, h w latent height and width, H W picture height and width in pixels, T noise levels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from flowrun.cache.key import digest
from flowrun.files import HashFile
from flowrun.flow.guidance import guide
from flowrun.graph import Unit
from flowrun.pipelines._adapter_names import AdapterNames as AdapterNames

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


class Pipeline(ABC):
    """`models` holds what a stage has loaded. `velocity` computes in the loaded weights' precision and returns fp32."""

    Config: ClassVar[type]
    inputs: ClassVar[tuple[str, ...]]  # names that the units read from the data
    conditions: ClassVar[tuple[str, ...]]  # names that `begin` reads
    ragged: ClassVar[tuple[str, ...]] = ()  # those that differ in length from row to row; a batch fills up with zeros
    target: ClassVar[str]  # name of the clean latents
    denoiser: ClassVar[str] = "transformer"  # the component that `velocity` calls
    decoders: ClassVar[tuple[str, ...]] = ()  # components that `decode` calls
    decode_only: ClassVar[tuple[str, ...]] = ()  # parts of them that nothing else calls, so that no gradient comes there
    # component -> the layers that `adapter.targets=auto` means: ends of their names, or a pattern for whole names
    lora_targets: ClassVar[Mapping[str, tuple[str, ...] | str]]
    adapter_names: ClassVar[AdapterNames | None] = None  # of other programs; None: diffusers reads none of theirs

    def __init__(self, config: Any, seed: int) -> None:
        self.config, self.seed = config, seed
        self.models: dict[str, nn.Module] = {}
        self.changes: dict[str, Change] = {}  # component -> what becomes part of its weights

    @abstractmethod
    def components(self) -> dict[str, Component]: ...

    @abstractmethod
    def units(self) -> tuple[Unit, ...]:
        """What is computed per row before the loss, in order."""

    @property
    @abstractmethod
    def reduction(self) -> int:
        """Pixels of a picture's side for each of its latents' side."""

    @abstractmethod
    def latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """(C, h, w) of a picture of (height, width) pixels. Raises ConfigError when the model cannot take that size."""

    @abstractmethod
    def schedule(self, steps: int, size: tuple[int, int]) -> Tensor:
        """Noise levels to sample pictures of (height, width) pixels at, from 1 to 0: [steps + 1], fp32."""

    def start(self, noise: Tensor, sigmas: Tensor) -> Tensor:
        """Where sampling from noise [B, C, h, w] along the levels `sigmas` begins."""
        return noise

    def level(self, share: Tensor) -> Tensor:
        """Shares of the model's training time in (0, 1], as a task's density draws them, -> noise levels. [B], fp32."""
        return share

    def error_weight(self, sigma: Tensor) -> Tensor | None:
        """[B] -> the factor of a velocity's squared error that makes it the loss which the model was trained by; None: 1."""
        return None

    @abstractmethod
    def begin(self, batch: Mapping[str, Tensor], sigmas: Tensor, noise: Tensor) -> Any:
        """Batch-level preparation from the `conditions` in `batch`, done once per batch.

        sigmas: the noise levels that will be asked for, [B] in training, [T] in sampling. noise: [B, C, h, w]."""

    @abstractmethod
    def velocity(self, prepared: Any, x: Tensor, sigma: Tensor) -> Tensor:
        """The network's noise - clean at x [B, C, h, w] and sigma [B]. Returns [B, C, h, w], fp32."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents [B, C, h, w] -> pictures [B, 3, H, W], fp32 in [-1, 1]."""

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

    def long_texts(self, texts: Sequence[str]) -> list[str]:
        """Warnings about those that the text encoders cut, counted and named. Loads no weights."""
        return []

    def noise(self, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Where the sampling of one picture starts: [C, h, w], fp32, on the generator's device."""
        return torch.randn(self.latent_shape(size), generator=generator, device=generator.device)

    def identity(self, name: str, hash_file: HashFile) -> bytes:
        """Of a component as `load` makes it."""
        own = self.components()[name].identity(hash_file)
        return digest(own, self.changes[name].identity(hash_file)) if name in self.changes else own

    def describe(self, name: str) -> str:
        """A component as `load` makes it, for the plan."""
        own = self.components()[name].describe
        return f"{own}, {self.changes[name].describe}" if name in self.changes else own

    def load(self, names: Collection[str], device: torch.device, dtype: torch.dtype) -> None:
        """Give weights to these components: evaluation mode, frozen, in memory of their own. Raises KeyError."""
        components = self.components()
        for name in names:
            module = components[name].load()
            _own_weights(module, device, dtype)
            if name in self.changes:
                self.changes[name].apply(module)
            self.models[name] = module.eval().requires_grad_(False)


def _own_weights(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Copy and place every weight: one mapped from a file may be misaligned, which changes a network's last bits."""
    for tensor in (*module.parameters(), *module.buffers()):
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        tensor.data = tensor.data.to(device=device, dtype=kept, copy=True)
