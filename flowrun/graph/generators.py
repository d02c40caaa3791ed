"""The generators that anybody can draw from. A unit that does so gives results that depend on what ran before it."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


class GlobalGenerators:
    """States of Python's, NumPy's and torch's generators, with every GPU in use, at the time when this was made.

    Looking costs about 0.1 ms: more than a small unit takes, so callers bracket many units with it."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: dict[str, Any] = numpy.random.get_state(legacy=False)
        self._torch = torch.get_rng_state()
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def moved(self) -> bool:
        """Whether anybody has drawn, or seeded, since. A GPU first used since has not been looked at before."""
        now = GlobalGenerators()
        now._gpus = now._gpus[: len(self._gpus)]
        return now._states() != self._states()

    def restore(self) -> None:
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)

    def _states(self) -> tuple[Any, ...]:
        # NumPy's normal numbers come in pairs: the spare one is part of its state.
        spare = {name: value for name, value in self._numpy.items() if name != "state"}
        engine = [part.tobytes() if isinstance(part, numpy.ndarray) else part for part in self._numpy["state"].values()]
        return self._python, spare, engine, [state.numpy().tobytes() for state in (self._torch, *self._gpus)]
