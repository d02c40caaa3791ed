"""An assembled training on cached data, and the bare loop that does the same arithmetic with its inputs in memory."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers.training_utils import EMAModel

from flowrun.dist import make_dist
from flowrun.run import assemble
from flowrun.stages.build import build_training
from flowrun.stages.cache import fill
from flowrun.stages.train import Training

MANY = 1_000_000  # steps: the schedule must not end within a measurement


def training(folder: Path, *overrides: str) -> Training:
    """A training ready to step, its cache filled: csv tracker, no samples."""
    logging.getLogger("flowrun").setLevel(logging.WARNING)
    assembly = assemble([f"cache.root={folder / 'cache'}", "tracker=[csv]", "sample.prompts=[]", f"train.steps={MANY}", *overrides])
    dist = make_dist(assembly.run.precision)
    if assembly.library is not None:
        fill(assembly, assembly.library.work(), dist)
    run = Path(tempfile.mkdtemp(dir=folder))
    return build_training(assembly, dist, run, None)


def bare_loop(training: Training, batches: int) -> Callable[[int], None]:
    """step(i): forward, backward, clip, optimizer, schedule and EMA by hand, on a copy of the network. No framework.

    The inputs are the first `batches` batches of the training, made beforehand."""
    trainer = training.trainer
    network = copy.deepcopy(trainer.pipeline.models["transformer"])
    settings, parameters = trainer.run.optimizer, [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=tuple(settings.betas), weight_decay=settings.weight_decay, **settings.args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50))
    ema = EMAModel(parameters, decay=settings.ema, foreach=True)
    inputs = [trainer.feed.batch(trainer.batches.window(step)[0]) for step in range(batches)]
    h, w = inputs[0]["target_latents"].shape[-2:]
    rows, columns = torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)
    picture_ids = torch.stack((torch.zeros_like(rows), rows, columns), dim=1).float()
    text_ids = torch.zeros(inputs[0]["prompt_embeds"].shape[1], 3)

    def step(i: int) -> None:
        batch = inputs[i % batches]
        clean = batch["target_latents"]
        sigma = torch.sigmoid(torch.randn(len(clean)))
        noise, s = torch.randn_like(clean), sigma[:, None, None, None]
        x = (1 - s) * clean + s * noise
        v = network(hidden_states=x.flatten(2).transpose(1, 2).contiguous(), encoder_hidden_states=batch["prompt_embeds"],
                    pooled_projections=batch["pooled_prompt_embeds"], timestep=sigma, img_ids=picture_ids, txt_ids=text_ids, return_dict=False)[0]
        loss = (v.transpose(1, 2).reshape(x.shape) - (noise - clean)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        ema.step(parameters)

    network.train()
    return step


def in_turns(first: Callable[[int], None], second: Callable[[int], None], steps: Sequence[int], rounds: int) -> tuple[float, float]:
    """Seconds per step of both: medians over rounds of `len(steps)` steps each, taken in turns."""
    import time
    from statistics import median

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, kept in zip((first, second), times, strict=True):
            began = time.perf_counter()
            for step in steps:
                run(step)
            kept.append((time.perf_counter() - began) / len(steps))
    return median(times[0]), median(times[1])
