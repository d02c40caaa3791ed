"""A rollout: pictures sampled to be learned from, and of their walks what the algorithm reads again.

Legend: B pictures of a chunk, C (f) h w latent channels, frames, height and width, T solver steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from flowrun.flow.policy import Transition, log_prob, nats, std_of, transition
from flowrun.flow.step import euler
from flowrun.graph import seed_of
from flowrun.rollout_settings import Sampler

Velocity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One picture to sample. group: the prompt's place in the epoch. row: its number among the data's rows. copy: of the group."""

    group: int
    row: int
    copy: int


@dataclass(frozen=True, kw_only=True)
class Walked:
    """What is kept of B walks. sigmas: [T + 1]. steps: those that injected noise, rising. noise, clean: where the walks began and
    ended, [B, C, (f,) h, w]. states: step -> x before it, and of the step after it; log_probs: step -> [B]; means: step -> where it
    would have come to without its noise. off: of what was rescored alone, step -> [B], by how many nats the step's likelihood is above
    that by which it was drawn."""

    sigmas: Tensor
    steps: tuple[int, ...]
    noise: Tensor
    clean: Tensor
    states: Mapping[int, Tensor] = field(default_factory=dict)
    log_probs: Mapping[int, Tensor] = field(default_factory=dict)
    means: Mapping[int, Tensor] = field(default_factory=dict)
    off: Mapping[int, Tensor] = field(default_factory=dict)

    def again(self, step: int, velocity: Tensor, sampler: Sampler) -> Transition:
        """The distribution of a noisy step from its stored state, with some velocity there. Gradients flow through its mean."""
        sigmas = self.sigmas[step], self.sigmas[step + 1], self.sigmas[1]
        return transition(sampler.dynamics, sampler.eta, self.states[step], velocity, *sigmas)

    def log_ratio(self, step: int, taken: Transition, sampler: Sampler) -> Tensor:
        """Log-probability of the stored step under `taken`, minus the one stored. [B]"""
        return self.log_prob(step, taken, sampler) - self.log_probs[step]

    def log_prob(self, step: int, taken: Transition, sampler: Sampler) -> Tensor:
        """Of the stored step under `taken`. [B]"""
        return log_prob(self.states[step + 1], taken, sampler.log_prob)

    def nats(self, step: int, sampler: Sampler) -> float:
        """Of a row's whole likelihood, in one unit of a step's log-probability."""
        std = std_of(sampler.dynamics, sampler.eta, self.sigmas[step], self.sigmas[step + 1], self.sigmas[1])
        return nats(sampler.log_prob, std, self.clean[0].numel())

    def rescored(self, log_probs: Mapping[int, Tensor], sampler: Sampler) -> Walked:
        """With other log-probabilities of the same steps; by how much they are off those of before is kept."""
        off = {step: (value - self.log_probs[step]) * self.nats(step, sampler) for step, value in log_probs.items()}
        return replace(self, log_probs=log_probs, off=off)

    def take(self, places: Sequence[int]) -> Walked:
        """Of some of the walks, in this order."""
        picked = torch.tensor(places, device=self.clean.device)
        return Walked(
            sigmas=self.sigmas,
            steps=self.steps,
            noise=self.noise[picked],
            clean=self.clean[picked],
            states={step: x[picked] for step, x in self.states.items()},
            log_probs={step: value[picked] for step, value in self.log_probs.items()},
            means={step: mean[picked] for step, mean in self.means.items()},
            off={step: value[picked] for step, value in self.off.items()},
        )


@dataclass(frozen=True)
class Keys:
    """Random numbers of each picture by what they are for: nothing depends on who samples it, or beside which others."""

    seed: int
    epoch: int
    rows: Sequence[str]  # ids, one per picture
    copies: Sequence[int]

    def generators(self, purpose: str, step: int = 0) -> list[torch.Generator]:
        return [
            torch.Generator().manual_seed(seed_of(self.seed, purpose, self.epoch, row, copy, step))
            for row, copy in zip(self.rows, self.copies, strict=True)
        ]

    def normal(self, like: Tensor, step: int) -> Tensor:
        """What step number `step` injects, drawn on the CPU: the same on every device. The shape of `like`, [B, ...], fp32."""
        drawn = [torch.randn(like.shape[1:], generator=generator) for generator in self.generators("step", step)]
        return torch.stack(drawn).to(like.device)


def walk(velocity: Velocity, x: Tensor, sigmas: Tensor, sampler: Sampler, noisy: Sequence[int], keys: Keys,
         dtype: torch.dtype, keep: bool, keep_means: bool = False) -> Walked:  # fmt: skip
    """From x [B, C, (f,) h, w] at sigmas[0] down to the last level: Euler's steps, and at the steps `noisy` the sampler's dynamics.

    dtype: states at the ends of noisy steps are rounded to it, so that what is stored is what was walked. keep: whether these
    states and their log-probabilities are; keep_means: whether their means are. Call it without gradients."""
    noise, states, log_probs, means, second = x, {}, {}, {}, sigmas[1]
    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        if step in noisy:
            x = _rounded(x, dtype)
        v = velocity(x, sigma)
        if step not in noisy:
            x = euler(x, v, sigma, sigma_next)
            continue
        taken = transition(sampler.dynamics, sampler.eta, x, v, sigma, sigma_next, second)
        after = _rounded(taken.mean + taken.std * keys.normal(x, step), dtype)
        if keep:
            states |= {step: x.to(dtype), step + 1: after.to(dtype)}
            log_probs[step] = log_prob(after, taken, sampler.log_prob)  # [B]
        if keep_means:
            means[step] = taken.mean
        x = after
    return Walked(sigmas=sigmas, steps=tuple(noisy), noise=noise, clean=x, states=states, log_probs=log_probs, means=means)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if dtype is torch.float32 else x.to(dtype).to(x.dtype)


