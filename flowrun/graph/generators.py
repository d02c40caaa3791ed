"""The generators that anybody can draw from. A unit that does so gives results that depend on what ran before it."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def global_generators() -> tuple[Any, ...]:
    """States of Python's, NumPy's and torch's generators, with every GPU in use; equal when nothing was drawn between.

    About 0.1 ms: more than a small unit takes, so callers bracket many units with it."""
    legacy = numpy.random.get_state(legacy=False)  # its spare normal number is part of the state: they come in pairs
    engine = [part.tobytes() if isinstance(part, numpy.ndarray) else part for part in legacy["state"].values()]
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch_states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *gpus)]
    return random.getstate(), engine, legacy["has_gauss"], legacy["gauss"], torch_states
