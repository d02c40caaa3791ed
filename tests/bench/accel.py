"""Accelerators on a FLUX network of 21 M parameters on one thread: compiled against not, sampling with a cache against without.

All ratios are of CPU seconds, of calls in turns. Compiling starts with nothing on disk, and its time is a figure of its own.
"""

from __future__ import annotations

import torch
from figure import Figure, cpu_seconds, interleaved, one_thread
from torch._inductor.utils import fresh_cache

from flowrun.accelerators import applied, rollout_applied
from flowrun.accelerators._policies import Policy
from flowrun.accelerators.diffusers_cache import DiffusersCache
from flowrun.accelerators.torch_compile import Mode, TorchCompile
from flowrun.pipelines import Pipeline
from tests.accelerators.tiny import flux, loss, walked

SIZES = ("num_attention_heads=8", "attention_head_dim=64", "axes_dims_rope=[16,24,24]")
BLOCKS = (0, 5)  # of one stream alone, so that one kind of block is compiled
ROWS, STEPS, ROUNDS = 1, 16, 11
POLICIES = {  # settings in use, not those that skip most; random weights change more from step to step than trained ones
    "first_block": {"threshold": 0.5},
    "pyramid": {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": [100, 800]},
    "taylorseer": {"cache_interval": 3, "disable_cache_before_step": 3, "taylor_factors_dtype": "fp32"},
}


def measure() -> list[Figure]:
    with one_thread(), fresh_cache():
        return _measured()


def _measured() -> list[Figure]:
    plain, compiled = _network(), _network()
    count = sum(p.numel() for p in plain.models["transformer"].parameters()) / 1e6
    one = TorchCompile(TorchCompile.Config(mode=Mode.auto, compile_kwargs={}, recompile_limit=64))
    found = []
    with applied([one], compiled):
        for name, act in (("a training pass", _trained), ("a walk", _sampled)):
            act(compiled)  # compiles
            in_turns = (lambda made=made, act=act: cpu_seconds(lambda: act(made)) for made in (plain, compiled))
            eager, fast = interleaved(*in_turns, rounds=ROUNDS)
            value = f"{eager / fast:.2f}x ({eager * 1e3:.0f} against {fast * 1e3:.0f} ms)"
            what = f"{name} compiled by blocks, network of {count:.0f} M, against without"
            found.append(Figure(what, value, "> 1x", eager > fast, "seven tenths of it are matrix products, which are not compiled"))
        told = one.report()
    found.append(Figure("compiling for both, with nothing on disk", f"{told['graphs']:.0f} graphs, {told['compile_seconds']:.0f} s"))
    return [*found, *(_cached(plain, name) for name in POLICIES)]


def _network() -> Pipeline:
    made = flux(*(f"model.components.transformer.{size}" for size in SIZES), blocks=BLOCKS)
    made.models["transformer"].requires_grad_(True)
    return made


def _trained(made: Pipeline) -> None:
    loss(made, ROWS).backward()


def _sampled(made: Pipeline) -> torch.Tensor:
    return walked(made, rows=ROWS, steps=STEPS)


def _cached(made: Pipeline, policy: str) -> Figure:
    one = DiffusersCache(DiffusersCache.Config(policy=Policy(policy), policy_params=POLICIES[policy]))

    def cached() -> torch.Tensor:
        with rollout_applied([one], made):
            return _sampled(made)

    whole, short = interleaved(lambda: cpu_seconds(lambda: _sampled(made)), lambda: cpu_seconds(cached), rounds=ROUNDS)
    error = (cached() - (truth := _sampled(made))).norm() / truth.norm()
    told = one.report()
    value = f"{whole / short:.2f}x, {told['hits']:.0f} of {told['calls']:.0f} calls shortened, latents differ by {error:.1e} of their size"
    what = f"a walk of {STEPS} steps with {policy}, against without"
    return Figure(what, value, "> 1x", whole > short, "looking costs more than is left out")
