"""Learning from rollouts: the walk against diffusers' call, an update against its arithmetic by hand, and where an epoch's time goes."""

from __future__ import annotations

import copy
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import sd3
import small
import torch
from figure import Figure, interleaved, one_thread, seconds
from job import BareLoop, Velocity, flux, learning, loaded
from torch import Tensor

from flowrun.feature_cache import FeatureCache
from flowrun.flow.policy import HALF_LOG_2PI, Dynamics
from flowrun.graph import seed_of
from flowrun.guided import Guided
from flowrun.rollout import Keys, walk
from flowrun.scoring import Scoring
from flowrun.stages.learner import Learner
from flowrun.stages.roller import Epoch
from flowrun.stages.rollout import Learning
from flowrun.stop import Stop

MOST_WALKING, MOST_CALL_MS = 1.05, 0.5  # of diffusers' call; beyond it, of each velocity
MOST_UPDATE_MS, LIMIT = 0.5, 0.95  # beyond the arithmetic of an update; of the bare loop's speed
STEPS, GUIDANCE = 8, 4.0
GRPO = ("task=grpo", "reward=[red,nearest]", "reward.nearest.weight=0", "optimizer.lr=1e-6")  # hardly moves: the ratio stays near 1
SMALL = ("model=emoji_tiny", "model.pipeline=small:Small", "optimizer.ema=0", "train.batch_size=4", "rollout.prompts_per_epoch=2",
         "rollout.group_size=2", "rollout.batch_size=4", "rollout.updates=1", "rollout.sampler.window.size=1")  # fmt: skip
EMOJI = ("model=emoji", "adapter=lora", "optimizer.ema=0", "adapter.rank=8", "adapter.alpha=16", "train.batch_size=32",
         "rollout.batch_size=32")  # fmt: skip


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, one_thread():
        overhead = _update(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        return [*_walks(), overhead, *_epochs(Path(folder))]


def _walks() -> list[Figure]:
    ours, theirs, same = _walk(sd3.MODEL, rounds=15)
    value = f"{ours / theirs:.2f}x ({ours * 1e3:.0f} ms, the call {theirs * 1e3:.0f} ms)"
    with one_thread():
        small_ours, small_theirs, small_same = _walk(("model=sd3_tiny",), rounds=60)
    added = (small_ours - small_theirs) / STEPS * 1e3
    each = f"{added:+.2f} ms a call (of {small_theirs / STEPS * 1e3:.2f} ms)"
    return [
        Figure(f"{STEPS} guided steps of a rollout with SD3, no noise injected, against its pipeline's call", value, f"<= {MOST_WALKING}x",
               ours / theirs <= MOST_WALKING, "preparing the batch, guidance and steps in fp32"),
        Figure("latents equal to that call's to the last bit: SD3, sd3_tiny", f"{same}, {small_same}", "True, True", same and small_same,
               "other arithmetic"),
        Figure("what it adds to each call of the network, sd3_tiny", each, f"<= {MOST_CALL_MS} ms", added <= MOST_CALL_MS, "as above"),
    ]  # fmt: skip


@torch.no_grad()
def _walk(model: tuple[str, ...], rounds: int) -> tuple[float, float, bool]:
    """Seconds of our walk and of the call of diffusers' pipeline, in turns, from equal latents and encoded prompts; whether they end
    equal."""
    assembly = loaded(*model, "task=grpo", "reward=[red]")
    pipeline, sampler = assembly.pipeline, assembly.learned.settings.sampler
    whole, shape = sd3.as_diffusers(pipeline), (sd3.SIDE, sd3.SIDE)
    embeds, _, pooled, _ = whole.encode_prompt(["a red apple", ""], None, None, do_classifier_free_guidance=False,
                                               max_sequence_length=sd3.TOKENS)  # fmt: skip
    cond, uncond = (dict(zip(pipeline.conditions, (embeds[[i]], pooled[[i]]), strict=True)) for i in (0, 1))
    noise = pipeline.noise(shape, torch.Generator().manual_seed(0))[None]  # [1, C, h, w]
    given = {
        "prompt_embeds": embeds[:1], "negative_prompt_embeds": embeds[1:], "pooled_prompt_embeds": pooled[:1],
        "negative_pooled_prompt_embeds": pooled[1:], "height": sd3.SIDE, "width": sd3.SIDE, "num_inference_steps": STEPS,
        "guidance_scale": GUIDANCE, "output_type": "latent",
    }  # fmt: skip

    def ours() -> Tensor:
        sigmas = pipeline.schedule(STEPS, shape)
        guided = Guided(pipeline, cond, uncond, noise, sigmas[:-1], GUIDANCE, FeatureCache())
        return walk(guided, pipeline.start(noise, sigmas), sigmas, sampler, (), Keys(0, 0, ["row"], [0]), torch.float32, keep=False).clean

    def theirs() -> Tensor:
        return whole(**given, latents=noise).images

    same = torch.equal(ours(), theirs())  # warms both up too
    return *interleaved(lambda: seconds(ours), lambda: seconds(theirs), rounds=rounds), same


def _update(folder: Path) -> Figure:
    """An update of one forward and backward pass."""
    made, epoch = _sampled(learning(folder, *GRPO, *SMALL))
    ours, bare = _updates(made, epoch, small.velocity, times=10, rounds=200)
    added = (ours - bare) * 1e3
    value = f"{added:+.2f} ms (bare loop {bare * 1e3:.2f} ms)"
    return Figure("an update from a rollout of a small network, one pass, batch 4, beyond a bare loop", value, f"<= {MOST_UPDATE_MS} ms",
                  added <= MOST_UPDATE_MS, "taking rows of the epoch, preparing them, metrics, and checks of losses")  # fmt: skip


def _epochs(folder: Path) -> list[Figure]:
    made = learning(folder, *GRPO, *EMOJI)
    found, whole = [], []
    with Stop() as stop, Scoring(made.rewards, made.settings.group_size) as scoring:
        for number in range(4):
            whole.append(seconds(lambda number=number: found.append(made._epoch(number, scoring, stop))))
    probing = median(seconds(lambda: made.probe.measure(())) for _ in range(3))
    phases = {name: median(metrics[f"seconds/{name}"] for metrics in found[1:]) for name in ("rollout", "reward", "update")}
    spent, epoch = sum(phases.values()), median(whole[1:])
    shares = ", ".join(f"{name} {value / spent:.0%}" for name, value in phases.items())
    ours, bare = _updates(*_sampled(made), flux, times=1, rounds=15)
    s = made.settings
    return [
        Figure(f"an update from a rollout of the emoji job, {s.pictures // s.updates} pictures x {s.sampler.window.size} steps",
               f"{bare / ours:.1%} of the limit ({ours * 1e3:.0f} ms, bare loop {bare * 1e3:.0f} ms)", f">= {LIMIT:.0%}",
               bare / ours >= LIMIT, "a millisecond a pass is ours, as on the small network; the rest is how runs differ"),
        Figure(f"an epoch of it, {s.pictures} pictures in {s.sampler.steps} steps", f"{epoch:.1f} s: {shares}"),
        Figure("the probe before a run, of an epoch of it", f"{probing / epoch:.0%} ({probing:.1f} s), once a run"),
    ]  # fmt: skip


def _sampled(made: Learning) -> tuple[Learning, Epoch]:
    with Scoring(made.rewards, made.settings.group_size) as scoring:
        epoch = made.roller.roll(0, made._sampling, scoring, lambda: True)
        scoring.result()
    return made, epoch


def _updates(made: Learning, epoch: Epoch, velocity: Velocity, times: int, rounds: int) -> tuple[float, float]:
    """Seconds of an update by Learner and by the bare loop, in turns. Advantages are -1 and 1, so that all losses have gradients."""
    values = torch.tensor([1.0, -1.0] * (len(epoch.samples) // 2))
    bare, valid = BareUpdate(made.learner, epoch, values, velocity), torch.ones(len(values), dtype=torch.bool)

    def update() -> float:
        return made.learner.update(0, epoch, 0, 0, values, valid)["grad_norm"]

    theirs, ours = bare.step(0), update()
    assert math.isclose(ours, theirs, rel_tol=1e-3), f"gradients of norm {ours} and {theirs}: not the same arithmetic"
    acts = (lambda: seconds(lambda: [update() for _ in range(times)]) / times,
            lambda: seconds(lambda: [bare.step(0) for _ in range(times)]) / times)  # fmt: skip
    ours, theirs = interleaved(*acts, rounds=rounds)
    return ours, theirs


class BareUpdate(BareLoop):
    """The first update of an epoch by hand, on a copy of the network: every noisy step of every micro-batch forward and backward, then
    clip, optimizer, schedule. What it reads is taken out of the epoch beforehand."""

    def __init__(self, learner: Learner, epoch: Epoch, values: Tensor, velocity: Velocity) -> None:
        self.network = copy.deepcopy(learner.pipeline.models["transformer"])
        self.velocity, config, sampler = velocity, learner.algorithm.config, learner.algorithm.rollout.sampler
        assert sampler.dynamics is Dynamics.flow_sde and not config.kl_weight, "what is written here"
        self.eta, self.low, self.high = sampler.eta, 1 - config.clip_low, 1 + config.clip_high
        shuffle = random.Random(seed_of(learner.seed, "pass", epoch.number, 0))
        self.inputs = [inputs for numbers in learner.deal.passes(0, 0, shuffle) for inputs in self._read(learner, epoch, numbers, values)]
        self.arm(learner.updates.run.optimizer)

    def _read(self, learner: Learner, epoch: Epoch, numbers: list[int], values: Tensor) -> Iterator[tuple]:
        """One for each noisy step: conditions, x, x_next, log p_old, advantage, sigma, and the step's own numbers."""
        chunk = next(chunk for chunk in epoch.chunks if numbers[0] in chunk.numbers)
        places = chunk.places(numbers)
        walked, batch = chunk.walked.take(places), {name: value[places] for name, value in chunk.conditions.items()}
        second = float(walked.sigmas[1])
        for step in walked.steps:
            s, n = float(walked.sigmas[step]), float(walked.sigmas[step + 1])
            g2 = self.eta**2 * s / (1 - (second if s == 1 else s))
            sigma = walked.sigmas[step].expand(len(numbers))
            own = (s, n, n + g2 * (n - s) / (2 * s), math.sqrt(g2 * (s - n)))
            yield batch, walked.states[step], walked.states[step + 1], walked.log_probs[step], values[numbers], sigma, own

    def step(self, i: int) -> float:
        for batch, x, x_next, old, advantage, sigma, (s, n, of_noise, std) in self.inputs:
            v = self.velocity(self.network, batch, x, sigma)
            mean = (1 - n) * (x - s * v) + of_noise * (x + (1 - s) * v)
            log_p = -(x_next - mean).square().flatten(1).mean(1) / (2 * std**2) - math.log(std) - HALF_LOG_2PI
            rho = (log_p - old).exp()
            loss = torch.maximum(-advantage * rho, -advantage * rho.clamp(self.low, self.high)).mean()
            (loss / len(self.inputs)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)
