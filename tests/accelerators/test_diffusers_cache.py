"""Feature caches in rollouts: they skip, they are right, they leave nothing.   pytest tests/accelerators/test_diffusers_cache.py"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, FluxTransformer2DModel
from diffusers.hooks.hooks import HookRegistry, ModelHook
from torch import Tensor

from flowrun.accelerators import applied, rollout_applied
from flowrun.accelerators._policies import Policy
from flowrun.accelerators.diffusers_cache import DiffusersCache
from flowrun.accelerators.torch_compile import Mode, TorchCompile
from flowrun.config import ConfigError
from flowrun.feature_cache import Clock, FeatureCache, Paced
from flowrun.pipelines import Pipeline
from tests.accelerators.tiny import STEPS, conditions, flux, loss, made_of, noise, walked
from tests.pipelines.families import assembled

pytestmark = pytest.mark.slow

RANGE = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": [-1, 900]}
SKIPPING: dict[str, Mapping[str, Any]] = {  # settings under which each policy leaves something out
    "first_block": {"threshold": 100.0},
    "faster": RANGE,
    "pyramid": RANGE,
    "taylorseer": {"cache_interval": 3, "disable_cache_before_step": 1, "taylor_factors_dtype": "fp32"},
    "magcache": {"threshold": 10.0, "mag_ratios": [1.0, 1.0]},
}
KEY = "acceleration.rollout.diffusers_cache"


def cache(policy: str, **params: Any) -> DiffusersCache:
    return DiffusersCache(DiffusersCache.Config(policy=Policy(policy), policy_params=params or dict(SKIPPING[policy])))


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return flux(blocks=(1, 3))


@pytest.fixture
def computed(pipeline: Pipeline) -> Iterator[list[int]]:
    """How many attention layers were computed: [count]."""
    count = [0]

    def one(*_: Any) -> None:
        count[0] += 1

    network = pipeline.models["transformer"]
    layers = [block.attn.to_q for block in (*network.transformer_blocks, *network.single_transformer_blocks)]
    handles = [layer.register_forward_hook(one) for layer in layers]
    yield count
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("policy", SKIPPING)
def test_it_leaves_out_what_it_reports_and_leaves_nothing_behind(
    pipeline: Pipeline, computed: list[int], policy: str, guidance: float
) -> None:
    network, one = pipeline.models["transformer"], cache(policy)
    before, plain = made_of(network), walked(pipeline, guidance)
    computed[0] = 0
    with rollout_applied([one], pipeline):
        found = walked(pipeline, guidance)
    branches = 2 if guidance != 1 and policy not in ("faster", "pyramid") else 1
    told = one.report()
    assert told["calls"] == branches * STEPS and 0 < told["hits"] < told["calls"]
    assert computed[0] + told["skipped"] == branches * STEPS * 4
    assert (found - plain).abs().max() > 1e-4
    assert made_of(network) == before
    assert torch.equal(walked(pipeline, guidance), plain)


@pytest.mark.parametrize("policy", SKIPPING)
def test_a_second_walk_of_another_length_and_size_equals_one_alone(pipeline: Pipeline, policy: str) -> None:
    def alone(**given: Any) -> Tensor:
        with rollout_applied([cache(policy)], pipeline):
            return walked(pipeline, **given)

    first, second = {"rows": 2, "steps": 6}, {"rows": 3, "steps": 5, "guidance": 3.0}
    truth = [alone(**first), alone(**second)]
    with rollout_applied([cache(policy)], pipeline):
        assert torch.equal(walked(pipeline, **first), truth[0]) and torch.equal(walked(pipeline, **second), truth[1])


@pytest.mark.parametrize("policy", SKIPPING)
def test_hooks_are_gone_after_an_error_within_and_the_next_walk_is_exact(pipeline: Pipeline, policy: str) -> None:
    network = pipeline.models["transformer"]
    before, plain = made_of(network), walked(pipeline)
    with pytest.raises(RuntimeError, match="stop"), rollout_applied([cache(policy)], pipeline):
        walked(pipeline)
        raise RuntimeError("stop")
    assert made_of(network) == before and torch.equal(walked(pipeline), plain)


def test_what_diffusers_leaves_when_it_fails_half_way_is_removed(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    network, enable = pipeline.models["transformer"], FluxTransformer2DModel.enable_cache
    before = made_of(network)

    def half_way(self: Any, config: Any) -> None:
        enable(self, config)
        raise ValueError("the last block is not registered")

    monkeypatch.setattr(FluxTransformer2DModel, "enable_cache", half_way)
    with pytest.raises(ConfigError) as error, rollout_applied([cache("first_block")], pipeline):
        raise AssertionError("entered")
    assert str(error.value).startswith(f"{KEY}.policy: first_block does not fit transformer (FluxTransformer2DModel): the last block")
    assert made_of(network) == before and not network.is_cache_enabled


class Louder(ModelHook):
    """Another hook of diffusers' kind, as those that cast or move a layer's weights."""

    def post_forward(self, module: Any, output: Any) -> Any:
        return tuple(1.1 * one for one in output) if isinstance(output, tuple) else 1.1 * output


def test_hooks_of_others_stay(pipeline: Pipeline) -> None:
    made = flux(blocks=(1, 3))
    network, quiet = made.models["transformer"], walked(pipeline)
    layers = [block.attn for block in (*network.transformer_blocks, *network.single_transformer_blocks)]
    for layer in layers:
        HookRegistry.check_if_exists_or_initialize(layer).register_hook(Louder(), "louder")
    before, plain = made_of(network), walked(made)
    assert not torch.equal(plain, quiet)
    with rollout_applied([cache("pyramid")], made):
        assert not torch.equal(walked(made), plain)
    assert made_of(network) == before and torch.equal(walked(made), plain)
    assert all(list(layer._diffusers_hook.hooks) == ["louder"] for layer in layers)


def test_evaluation_before_and_after_is_exact_and_training_too(pipeline: Pipeline) -> None:
    drawn, trained = walked(pipeline), loss(pipeline)
    one = cache("first_block")
    for _ in range(2):
        with rollout_applied([one], pipeline):
            assert not torch.equal(walked(pipeline), drawn)
        assert torch.equal(walked(pipeline), drawn) and torch.equal(loss(pipeline), trained)


@pytest.mark.parametrize("policy", ["pyramid", "faster"])
def test_guidance_stays_on_under_a_policy_with_one_state_for_each_layer(
    pipeline: Pipeline, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each branch has an attention of its own. Asked one after the other, the second would get the first one's."""
    outputs: list[Tensor] = []
    layer = pipeline.models["transformer"].transformer_blocks[0].attn
    handle = layer.register_forward_hook(lambda module, given, out: outputs.append(out[0]))
    with rollout_applied([one := cache(policy)], pipeline):
        right = walked(pipeline, guidance=4.0)
        assert one.report()["hits"] > 0 and len(outputs) == STEPS
        assert not any(torch.equal(*out.chunk(2)) for out in outputs)
        monkeypatch.setattr(FeatureCache, "per_branch", True)
        outputs.clear()
        assert (walked(pipeline, guidance=4.0) - right).abs().max() > 1e-3
        alike = [torch.equal(*pair) for pair in zip(outputs[::2], outputs[1::2], strict=True)]
        assert any(alike) == (policy == "pyramid")  # FasterCache mixes what the two left
    handle.remove()


def test_without_hits_it_is_said(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    plain = walked(pipeline)
    with caplog.at_level(logging.INFO, "flowrun"), rollout_applied([one := cache("first_block", threshold=0.0)], pipeline):
        assert torch.equal(walked(pipeline), plain)
    assert one.report()["hits"] == one.report()["skipped"] == one.report()["seconds_saved"] == 0
    (record,) = [r for r in caplog.records if r.name == "flowrun.accelerators.diffusers_cache"]
    assert record.levelno == logging.WARNING and record.getMessage().startswith(f"diffusers_cache: nothing was left out in {STEPS} calls")


def test_figures_are_of_one_epoch_and_seconds_are_those_of_full_calls(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by one with each layer computed: a full call takes 4, one with hits what is left."""
    now, one = [0.0], cache("first_block")
    network = pipeline.models["transformer"]
    layers = [block.attn.to_q for block in (*network.transformer_blocks, *network.single_transformer_blocks)]
    handles = [layer.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 1)) for layer in layers]
    monkeypatch.setattr("flowrun.feature_cache.time.perf_counter", lambda: now[0])
    for _ in range(2):
        with rollout_applied([one], pipeline):
            walked(pipeline)
    for handle in handles:
        handle.remove()
    told = one.report()
    assert told["hits"] == STEPS - 1 and told["skipped"] == 3 * (STEPS - 1)  # the first block decides and is computed
    assert told["seconds_saved"] == 3 * (STEPS - 1)


def test_magcache_spreads_its_ratios_over_the_steps_of_each_walk() -> None:
    config = Paced(torch.tensor([1.0, 0.9, 0.8, 0.7]), threshold=0.1, max_skip_steps=3, retention_ratio=0.2)
    for steps, ratios in ((4, [1.0, 0.9, 0.8, 0.7]), (2, [1.0, 0.7]), (7, [1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7]), (4, [1.0, 0.9, 0.8, 0.7])):
        config.pace(steps)
        assert config.num_inference_steps == steps
        assert config.mag_ratios.tolist() == pytest.approx(ratios)


def test_pyramid_is_told_the_walks_time(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    times = set()
    call = Clock.__call__
    monkeypatch.setattr(Clock, "__call__", lambda self: times.add(call(self)) or call(self))
    with rollout_applied([cache("pyramid")], pipeline):
        walked(pipeline)
    assert sorted(times, reverse=True) == pytest.approx((1000 * pipeline.schedule(STEPS, (32, 32))[:-1]).tolist())
    with rollout_applied([cache("pyramid")], pipeline), pytest.raises(RuntimeError, match="outside a walk"):
        for _ in range(2):
            pipeline.velocity(pipeline.begin(conditions(1), torch.ones(1), noise(pipeline, 1)), noise(pipeline, 1), torch.ones(1))


@pytest.mark.parametrize(
    ("policy", "params", "line"),
    [
        ("first_block", {"treshold": 1.0}, "treshold: is no setting of FirstBlockCacheConfig; did you mean threshold?"),
        ("first_block", {"threshold": "x"}, "threshold: is 'x'; give a number"),
        ("first_block", {"threshold": True}, "threshold: is True; give a number"),
        ("taylorseer", {"cache_interval": 1.5}, "cache_interval: is 1.5; give a whole number"),
        ("taylorseer", {"taylor_factors_dtype": "fp8"}, "taylor_factors_dtype: is 'fp8'; give fp32, bf16, fp16"),
        ("taylorseer", {"cache_identifiers": "attn"}, "cache_identifiers: is 'attn'; give a list of text"),
        ("pyramid", {**RANGE, "spatial_attention_timestep_skip_range": [1]},
         "spatial_attention_timestep_skip_range: is [1]; give a list of a whole number, 2 of them"),
        ("pyramid", {**RANGE, "current_timestep_callback": 1}, "current_timestep_callback: is set by the run itself; leave it out"),
        ("faster", {"is_guidance_distilled": False}, "is_guidance_distilled: is set by the run itself; leave it out"),
        ("magcache", {"mag_ratios": [1.0], "num_inference_steps": 28}, "num_inference_steps: is set by the run itself; leave it out"),
        ("magcache", {"threshold": 0.1}, "mag_ratios: is not given; measure them"),
        ("faster", {"spatial_attention_timestep_skip_range": [-1, 1001]},
         "spatial_attention_timestep_skip_range: ends at 1001; give 900 at most: first steps are computed"),
    ],
)  # fmt: skip
def test_settings_are_those_of_diffusers(policy: str, params: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        cache(policy, **params)
    assert str(error.value).startswith(f"{KEY}.policy_params.{line}")


def test_pyramid_without_a_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy_params: gives none of spatial_attention_block_skip_range, .*; give one, 2 or more"):
        cache("pyramid", spatial_attention_timestep_skip_range=[100, 800])


@pytest.mark.parametrize(
    ("family", "policy", "line"),
    [
        ("sd3", "first_block", ": transformer (SD3Transformer2DModel) has no feature caches; leave it out for this model"),
        ("flux2_klein", "first_block", ".policy: first_block does not fit transformer (Flux2Transformer2DModel): its first blocks return"),
        ("ltx2", "first_block", ".policy: first_block does not fit transformer (LTX2VideoTransformer3DModel): "),
        ("wan2_2", "magcache", ".policy: magcache counts the steps of a walk from its first, and transformer and transformer_2 take"),
        ("wan2_2", "faster", ".policy: faster counts the steps of a walk from its first, and transformer and transformer_2 take"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_loaded(family: str, policy: str, line: str) -> None:
    unloaded = assembled(f"{family}_tiny")
    with pytest.raises(ConfigError) as error:
        cache(policy).check(unloaded)
    assert str(error.value).startswith(KEY + line), error.value
    assert not unloaded.models


def test_layers_that_match_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"taylorseer does not fit transformer .*: it finds none of its parts there"):
        cache("taylorseer", cache_identifiers=["nope"]).check(assembled("emoji_tiny"))


@pytest.mark.parametrize("family", ["wan", "ltx_video", "emoji"])
def test_taylorseer_finds_attention_layers_whatever_they_are_called(family: str) -> None:
    """diffusers' own patterns match none of Wan's and LTX's, and say nothing."""
    (line,) = cache("taylorseer").check(assembled(f"{family}_tiny"))
    count = int(line.rpartition(", on ")[2].partition(" ")[0])
    assert count >= 2


def test_the_plan_says_what_is_left_out_before_weights_are_loaded() -> None:
    unloaded = assembled("emoji_tiny")
    assert cache("first_block", threshold=0.08).check(unloaded) == ["transformer first_block, threshold=0.08, on 2 of its parts"]
    assert not unloaded.models


def test_a_network_with_a_cache_of_its_own_is_refused(pipeline: Pipeline) -> None:
    network = pipeline.models["transformer"]
    network.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ConfigError, match="has a cache already"), rollout_applied([cache("first_block")], pipeline):
        raise AssertionError("entered")
    network.disable_cache()



@pytest.mark.slow
@pytest.mark.parametrize("mode", ["regional", "full"])
@pytest.mark.parametrize("policy", ["first_block", "pyramid"])
def test_a_compiled_network_takes_over_as_much_as_one_that_is_not(policy: str, mode: str) -> None:
    torch._dynamo.reset()
    made = flux(blocks=(1, 3))
    with rollout_applied([one := cache(policy)], made):
        truth, told = walked(made), one.report()
    before, plain = made_of(made.models["transformer"]), walked(made)
    compiler = TorchCompile(TorchCompile.Config(mode=Mode(mode), compile_kwargs={"backend": "eager"}, recompile_limit=64))
    with applied([compiler], made):
        with rollout_applied([one], made):
            torch.testing.assert_close(walked(made), truth, atol=1e-5, rtol=1e-5)
        assert one.report()["skipped"] == told["skipped"] > 0
        torch.testing.assert_close(walked(made), plain, atol=1e-5, rtol=1e-5)
    assert made_of(made.models["transformer"]) == before and torch.equal(walked(made), plain)
