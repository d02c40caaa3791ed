"""Copies of the trained weights under names: the policy that sampled, the one that is held to, the one to go back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter


class Kept:
    """In fp32 or wider, as averages must be, on the parameters' device."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = list(parameters)
        self._copies: dict[str, list[Tensor]] = {}
        self._standing = ""

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def keep(self, name: str) -> None:
        """The weights as they are now."""
        self._copies[name] = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self._parameters]

    @torch.no_grad()
    def blend(self, name: str, decay: float) -> None:
        """copy <- decay copy + (1 - decay) weights."""
        if decay == 0:
            self.keep(name)
            return
        for copy, parameter in zip(self._copies[name], self._parameters, strict=True):
            copy.lerp_(parameter.to(copy.dtype), 1 - decay)

    @torch.no_grad()
    def restore(self, name: str) -> None:
        """The weights become the copy."""
        for parameter, copy in zip(self._parameters, self._copies[name], strict=True):
            parameter.copy_(copy)

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """The copy stands in the model within the block; the weights return bit for bit after it, also when the block raises.

        Raises RuntimeError within another such block, which would lose the weights."""
        if self._standing:
            raise RuntimeError(f"{self._standing!r} already stands in the model")
        before, self._standing = [p.detach().clone() for p in self._parameters], name
        try:
            self.restore(name)
            yield
        finally:
            with torch.no_grad():
                for parameter, own in zip(self._parameters, before, strict=True):
                    parameter.copy_(own)
            self._standing = ""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Name -> the copies by position (references)."""
        return {name: {str(i): copy for i, copy in enumerate(copies)} for name, copies in self._copies.items()}

    def load(self, name: str, copies: dict[str, Tensor]) -> None:
        """Raises ValueError when the shapes are those of other parameters."""
        wanted = {str(i): tuple(p.shape) for i, p in enumerate(self._parameters)}
        if {key: tuple(copy.shape) for key, copy in copies.items()} != wanted:
            raise ValueError(f"the saved weights {name!r} are those of other parameters")
        self.keep(name)
        for i, copy in enumerate(self._copies[name]):
            copy.copy_(copies[str(i)])
