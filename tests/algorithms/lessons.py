"""Rollouts and policies without networks: velocities are tensors, so that gradients with respect to them have closed forms."""

import torch

from flowrun.algorithms import Lesson
from flowrun.compose import compose
from flowrun.flow.policy import log_prob, transition
from flowrun.flow.step import euler
from flowrun.registry import ALGORITHMS, checked
from flowrun.rollout import Walked
from flowrun.rollout_settings import RolloutSettings

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])
SHAPE = (3, 2, 4)  # B, and two latent dimensions


def settings(*changes):
    return checked("rollout", RolloutSettings, compose(list(changes)).rollout)


def make(task, *changes):
    """The algorithm of a task's option, with changed settings."""
    run = compose([f"task={task}", *changes])
    common = {"name", "algorithm", "splitter", "trainable_models"}
    cls = ALGORITHMS.find(task, "task.algorithm")
    config = checked("task", cls.Config, {key: value for key, value in run.task.items() if key not in common})
    return cls(config, checked("rollout", RolloutSettings, run.rollout))


class Velocities:
    """Policies whose velocity at a level is a tensor of its own, whatever x is."""

    def __init__(self, trained, reference=None, old=None):
        self.asked, self._trained, self._reference, self._old = [], trained, reference, old

    def begin(self, sigmas):
        self.sigmas = sigmas

    def trained(self, x, sigma):
        self.asked.append("trained")
        return self._trained

    def reference(self, x, sigma):
        self.asked.append("reference")
        return self._reference

    def old(self, x, sigma):
        self.asked.append("old")
        return self._old


def draws(seed, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def walked(sampler, steps, velocity, seed=0):
    """Walks along one velocity, noisy at `steps`, in float64."""
    x, noise, states, log_probs = draws(seed), torch.Generator().manual_seed(seed + 1), {}, {}
    start = x
    for step, (sigma, after) in enumerate(zip(SIGMAS[:-1].double(), SIGMAS[1:].double(), strict=True)):
        if step not in steps:
            x = euler(x, velocity, sigma, after)
            continue
        taken = transition(sampler.dynamics, sampler.eta, x, velocity, sigma, after, SIGMAS[1].double())
        x_next = taken.mean + taken.std * torch.randn(x.shape, generator=noise, dtype=torch.float64)
        states |= {step: x, step + 1: x_next}
        log_probs[step] = log_prob(x_next, taken, sampler.log_prob)
        x = x_next
    return Walked(sigmas=SIGMAS.double(), steps=tuple(steps), noise=start, clean=x, states=states, log_probs=log_probs)


def lesson(walk, advantages, valid=None):
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return Lesson(walk, advantages, torch.ones(len(advantages), dtype=torch.bool) if valid is None else torch.tensor(valid))


def generator():
    return torch.Generator().manual_seed(5)
