"""The average of the trained weights, which samples and the saved model use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor
from torch.nn import Parameter


class Ema:
    """average <- d average + (1 - d) weights after every update, with d = min(decay, (1 + n) / (10 + n)).

    n counts the updates before this one; at the first, d = 0: the average becomes the weights. diffusers' EMAModel does
    the arithmetic; the average is kept in fp32 or wider: with d = 0.999 a bf16 average would never move.
    """

    def __init__(self, parameters: Sequence[Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self._model = EMAModel(self._parameters, decay=decay, foreach=True)
        narrow = self._model.shadow_params
        self._model.shadow_params = [s.to(torch.promote_types(s.dtype, torch.float32)) for s in narrow]

    def update(self) -> None:
        """Take in the weights as they are now; once after each optimiser update."""
        self._model.step(self._parameters)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The averaged weights stand in the model within the block; the training weights return bit for bit after it,
        also when the block raises. Raises RuntimeError when entered twice, which would lose the training weights."""
        if self._model.temp_stored_params is not None:
            raise RuntimeError("the averaged weights are already in the model")
        self._model.store(self._parameters)
        try:
            self._model.copy_to(self._parameters)
            yield
        finally:
            self._model.restore(self._parameters)

    def state(self) -> tuple[dict[str, Tensor], int]:
        """The averages by position (references, not copies), and the number of updates taken in."""
        return {str(i): s for i, s in enumerate(self._model.shadow_params)}, self._model.optimization_step

    def load(self, averages: dict[str, Tensor], updates: int) -> None:
        """Go on from `state()`. Raises ValueError when the shapes are those of other parameters."""
        own = self._model.shadow_params
        wanted = {str(i): (s.shape, s.dtype) for i, s in enumerate(own)}
        given = {name: (s.shape, s.dtype) for name, s in averages.items()}
        if given != wanted:
            raise ValueError(f"the saved average has {len(given)} tensors that are not these {len(wanted)} parameters'")
        for i, average in enumerate(own):
            average.copy_(averages[str(i)])
        self._model.optimization_step = updates
