"""Feature caches in our solver against diffusers' own pipeline with the same cache.   pytest tests/test_feature_cache.py"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers import FirstBlockCacheConfig, FluxPipeline, MagCacheConfig, PyramidAttentionBroadcastConfig
from torch import Tensor, nn

from flowrun.feature_cache import FeatureCache
from flowrun.sampling import denoise
from tests.pipelines.families import CPU, encoded, make, normal
from tests.pipelines.oracles import ORACLES

PROMPTS, TOKENS, STEPS = ["a red apple", "a very small cat on top of a large house"], 77, 8
FIRST_BLOCK = FirstBlockCacheConfig(threshold=0.3)
MAG = MagCacheConfig(threshold=0.3, num_inference_steps=STEPS, mag_ratios=torch.ones(STEPS))


@pytest.fixture(scope="module")
def flux() -> Any:
    """FLUX at its smallest with all weights."""
    pipeline = make("flux")
    pipeline.load(pipeline.components(), CPU, torch.float32)
    return pipeline


@pytest.fixture
def blocks(flux: Any) -> Iterator[list[int]]:
    """How many inner blocks of the network ran: [count]. Disables what a test enabled."""
    ran = [0]

    def count(module: Any, given: Any) -> None:
        ran[0] += 1

    network = flux.models["transformer"]
    handles = [block.attn.register_forward_pre_hook(count) for block in (*network.transformer_blocks, *network.single_transformer_blocks)]
    yield ran
    for handle in handles:
        handle.remove()
    if network.is_cache_enabled:
        network.disable_cache()


def noise() -> Tensor:
    return normal(2, 16, 8, 8, seed=1)


def ours(flux: Any, guidance: float) -> Tensor:
    conditions, negative = encoded(flux, PROMPTS), encoded(flux, [""] * len(PROMPTS))
    return denoise(flux, conditions, negative, noise(), flux.schedule(STEPS, (64, 64)), guidance)


def theirs(flux: Any, guidance: float) -> Tensor:
    """Latents by diffusers' pipeline, which asks each guidance branch alone and in a context of its own."""
    negative = {"negative_prompt": [""] * len(PROMPTS), "true_cfg_scale": guidance} if guidance != 1 else {}
    packed = ORACLES["flux"](flux).whole(
        prompt=PROMPTS, latents=FluxPipeline._pack_latents(noise(), *noise().shape), num_inference_steps=STEPS, height=64, width=64,
        guidance_scale=3.5, max_sequence_length=TOKENS, output_type="latent", **negative,
    ).images  # fmt: skip
    return FluxPipeline._unpack_latents(packed, 64, 64, 8)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("config", [FIRST_BLOCK, MAG], ids=["first_block", "mag"])
def test_a_cache_skips_the_same_blocks_as_in_diffusers_pipeline(flux: Any, blocks: list[int], config: Any, guidance: float) -> None:
    plain, whole = ours(flux, guidance), blocks[0]
    flux.models["transformer"].enable_cache(config)
    blocks[0] = 0
    found, ran = ours(flux, guidance), blocks[0]
    blocks[0] = 0
    truth = theirs(flux, guidance)
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)
    assert ran == blocks[0]
    branches = 1 if guidance == 1 else 2
    assert 0 < ran < branches * STEPS * 4 and whole == STEPS * 4  # without a cache all branches are one call
    assert (found - plain).abs().max() > 1e-3


def test_it_takes_a_context_for_each_branch(flux: Any, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    flux.models["transformer"].enable_cache(FIRST_BLOCK)
    truth = ours(flux, 4.0)
    monkeypatch.setattr(FeatureCache, "branch", lambda self, name, sigma: self._networks[0].cache_context("all"))
    assert (ours(flux, 4.0) - truth).abs().max() > 1e-3
    monkeypatch.setattr(FeatureCache, "branch", lambda self, name, sigma: nullcontext())
    with pytest.raises(ValueError, match="No cache context"):
        ours(flux, 4.0)


def test_a_walk_reuses_nothing_from_before_even_after_an_error(flux: Any, blocks: list[int]) -> None:
    flux.models["transformer"].enable_cache(FIRST_BLOCK)
    first = ours(flux, 4.0)
    ours(flux, 1.0)
    assert torch.equal(ours(flux, 4.0), first)
    conditions, levels = encoded(flux, PROMPTS), flux.schedule(STEPS, (64, 64))
    with pytest.raises(RuntimeError, match="stop"):
        denoise(flux, conditions, None, -noise(), levels, 1.0, Mock(side_effect=[None, None, RuntimeError("stop")]))
    assert torch.equal(ours(flux, 4.0), first)


def test_a_cache_of_one_state_gets_both_branches_in_one_call(flux: Any, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The truth: each branch with a network of its own, so that no state can be shared."""
    network, guidance, plain = flux.models["transformer"], 4.0, ours(flux, 4.0)
    nets = [copy.deepcopy(network) for _ in range(2)]
    with broadcast(network):
        found = ours(flux, guidance)
    sides = [encoded(flux, PROMPTS), encoded(flux, [""] * len(PROMPTS))]
    x, sigmas = noise(), flux.schedule(STEPS, (64, 64))
    with torch.no_grad(), broadcast(nets[0]), broadcast(nets[1]):
        for sigma, following in pairwise(sigmas):
            each = []
            for side, own in zip(sides, nets, strict=True):
                monkeypatch.setitem(flux.models, "transformer", own)
                each.append(flux.velocity(flux.begin(side, sigmas[:-1], x), x, sigma.expand(len(x))))
            x = x + (following - sigma) * (each[1] + guidance * (each[0] - each[1]))
    torch.testing.assert_close(found, x, atol=1e-5, rtol=1e-5)
    assert (found - plain).abs().max() > 1e-3


@contextmanager
def broadcast(network: nn.Module) -> Iterator[None]:
    """Attention is computed in every second of the middle steps."""
    now = [0.0]

    def look(module: nn.Module, given: Any, named: dict[str, Tensor]) -> None:
        now[0] = 1000 * float(named["timestep"][0])

    handle = network.register_forward_pre_hook(look, with_kwargs=True)
    network.enable_cache(PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, current_timestep_callback=lambda: now[0]))
    yield
    network.disable_cache()
    handle.remove()


def test_a_wrapped_network_is_the_one_with_the_cache_and_without_any_nothing_happens(flux: Any, blocks: list[int]) -> None:
    wrapped = nn.Sequential(flux.models["transformer"])
    assert not FeatureCache(wrapped).per_branch
    flux.models["transformer"].enable_cache(FIRST_BLOCK)
    assert FeatureCache(wrapped).per_branch
    with FeatureCache(nn.Linear(1, 1)).walk(1), FeatureCache(nn.Linear(1, 1)).branch("cond", torch.ones(())):
        pass
