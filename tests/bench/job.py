"""An assembled training on cached data, and the bare loop that does the same arithmetic with its inputs in memory."""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from diffusers.training_utils import EMAModel
from figure import seconds
from torch import Tensor, nn

from flowrun.config import Optimizer
from flowrun.dist import Dist, make_dist
from flowrun.optim import make_schedule
from flowrun.run import Assembly, assemble
from flowrun.stages.build import build_learning, build_training
from flowrun.stages.cache import fill
from flowrun.stages.rollout import Learning
from flowrun.stages.train import Training
from flowrun.stages.work import Work

Built = TypeVar("Built", bound=Work)

MANY = 1_000_000  # steps: neither the schedule nor a checkpoint may end within a measurement
SETTINGS = ("tracker=[csv]", "sample.prompts=[]", f"train.steps={MANY}", f"train.checkpoint_every={MANY}")


def training(folder: Path, *overrides: str) -> Training:
    """A training ready to step, its cache filled if it has one; nothing is sampled, and its figures go to metrics.csv alone."""
    return _built(build_training, folder, overrides)


def learning(folder: Path, *overrides: str) -> Learning:
    """The same that learns from rollouts."""
    return _built(build_learning, folder, overrides)


def _built(build: Callable[[Assembly, Dist, Path, None], Built], folder: Path, overrides: Sequence[str]) -> Built:
    logging.getLogger("flowrun").setLevel(logging.WARNING)
    assembly = assemble([f"cache.root={folder / 'cache'}", *SETTINGS, *overrides])
    dist = make_dist(assembly.run.precision)
    if assembly.library is not None:
        fill(assembly, assembly.library.work(), dist)
    return build(assembly, dist, Path(tempfile.mkdtemp(dir=folder)), None)


def loaded(*overrides: str, models: Mapping[str, nn.Module] | None = None) -> Assembly:
    """An assembled run with the weights of all its components, or with `models`; asked to load, it does nothing more."""
    assembly = assemble([*SETTINGS, *overrides])
    pipeline = assembly.pipeline
    if models is None:
        pipeline.load(pipeline.components(), torch.device("cpu"), assembly.dtype)
    else:
        pipeline.models = dict(models)
    pipeline.load = lambda names, device, dtype: None
    return assembly


Velocity = Callable[[nn.Module, dict[str, Tensor], Tensor, Tensor], Tensor]  # network, batch, x, sigma


class BareLoop:
    """Forward, backward, clip, optimizer, schedule and average by hand, on a copy of the network. No framework.

    The inputs are the first `batches` batches of the training, made beforehand: they stay in memory."""

    def __init__(self, training: Training, velocity: Velocity, batches: int = 8) -> None:
        trainer = training.trainer
        self.network: nn.Module = copy.deepcopy(trainer.pipeline.models["transformer"]).train()
        self.velocity = velocity
        self.inputs = [trainer.feed.batch(trainer.batches.window(step)[0]) for step in range(batches)]
        self.arm(trainer.run.optimizer)

    def arm(self, c: Optimizer) -> None:
        self.clip, self.parameters = c.clip, [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=c.lr, betas=tuple(c.betas), weight_decay=c.weight_decay, **c.args
        )
        self.schedule = make_schedule(c, self.optimizer, MANY)
        self.average = EMAModel(self.parameters, decay=c.ema, foreach=True) if c.ema else None

    def step(self, i: int) -> None:
        batch = self.inputs[i % len(self.inputs)]
        clean = batch["target_latents"]
        sigma, noise = torch.sigmoid(torch.randn(len(clean))), torch.randn_like(clean)
        s = sigma[:, None, None, None]
        velocity = self.velocity(self.network, batch, (1 - s) * clean + s * noise, sigma)
        loss = (velocity - (noise - clean)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.schedule.step()
        if self.average is not None:
            self.average.step(self.parameters)
        self.optimizer.zero_grad(set_to_none=True)


def flux(network: nn.Module, batch: dict[str, Tensor], x: Tensor, sigma: Tensor) -> Tensor:
    """The emoji pipeline's network by its own arguments."""
    picture_ids, text_ids = _ids(*x.shape[2:], batch["prompt_embeds"].shape[1])
    out = network(
        hidden_states=x.flatten(2).transpose(1, 2).contiguous(),
        encoder_hidden_states=batch["prompt_embeds"],
        pooled_projections=batch["pooled_prompt_embeds"],
        timestep=sigma,
        img_ids=picture_ids,
        txt_ids=text_ids,
        return_dict=False,
    )[0]
    return out.transpose(1, 2).reshape(x.shape)


@cache
def _ids(height: int, width: int, tokens: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=1).float(), torch.zeros(tokens, 3)


class Enough(Exception):
    """Ends the training when all has been measured."""


def in_turns(training: Training, others: Sequence[Callable[[int], object]], steps: int, rounds: int) -> list[list[float]]:
    """Seconds per step of the training and of each of `others`, for each of `rounds` windows of `steps` steps.

    The training runs as it always does, whole turns of its loop with all that is in them. At the edges of the windows
    it is held, its clock too, while the others do as many steps. The first window warms all up and is left out."""
    found: list[list[float]] = []
    update, began = training.trainer.step, time.perf_counter()

    def held(step: int) -> dict[str, float]:
        nonlocal began
        if step % steps == 0:
            ours, window = time.perf_counter() - began, range(step, step + steps)
            found.append([taken / steps for taken in (ours, *(_over(window, act) for act in others))])
            if len(found) == rounds + 2:
                raise Enough
            began = time.perf_counter()
        return update(step)

    training.trainer.step = held
    try:
        training.run()
    except Enough:
        return found[2:]  # the first is the time before the first step
    raise AssertionError("the training ended before all was measured")


def _over(window: range, act: Callable[[int], object]) -> float:
    return seconds(lambda: [act(i) for i in window])
