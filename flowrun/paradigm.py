"""What an algorithm says of the sampling that made its data: what may be done to that sampling follows from it. No torch."""

from __future__ import annotations

from enum import Enum


class Paradigm(Enum):
    """How the loss relates to the sampling that made its data: coupled re-reads the steps taken (log-probabilities),
    decoupled only the finished latents or a data set, distillation the states of a teacher's or its own walk."""

    coupled = "coupled"
    decoupled = "decoupled"
    distillation = "distillation"


class Rereads(Enum):
    """What a loss takes from the sampling that made its data, from least to most: nothing at all; the latents it ended with;
    states on the way; pairs of states, compared with the step between them run again; the log-probabilities of its steps."""

    nothing = "nothing"
    final_latent = "final_latent"
    states = "states"
    transitions = "transitions"
    log_probs = "log_probs"

    @property
    def stepwise(self) -> bool:
        """Whether training computes steps of the sampling once more and compares."""
        return self in (Rereads.transitions, Rereads.log_probs)
