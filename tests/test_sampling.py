"""Sampling against diffusers' scheduler and against closed forms.   pytest tests/test_sampling.py"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from flowrun import sampling
from flowrun.flow.schedule import sigmas
from flowrun.pipelines.emoji import EmojiPipeline
from flowrun.registry import PIPELINES
from tests.stubs import FlowStub

TRANSFORMER = {
    "in_channels": 192, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 384, "pooled_projection_dim": 384, "axes_dims_rope": [4, 6, 6],
}  # fmt: skip


@pytest.fixture(scope="module")
def pipeline() -> EmojiPipeline:
    node = {"components": {"transformer": TRANSFORMER}, "weights": None, "text_tokens": 8,
            "latents": {"patch": 8, "mean": 0.4, "std": 0.75}, "scheduler": {"shift": 1.0}}  # fmt: skip
    built = EmojiPipeline(PIPELINES.build("model", EmojiPipeline, node), seed=0)
    built.load(("transformer",), torch.device("cpu"), torch.float32)
    return built


def conditions(seed: int, rows: int = 3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "prompt_embeds": torch.randn(rows, 8, 384, generator=draw),
        "pooled_prompt_embeds": torch.randn(rows, 384, generator=draw),
    }


def encoded(*prompts: str) -> dict[str, dict[str, Tensor]]:
    return {p: {name: value[0] for name, value in conditions(index, 1).items()} for index, p in enumerate(prompts)}


def noise(rows: int = 3) -> Tensor:
    return torch.randn(rows, 192, 4, 4, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("guidance", [1.0, 1.5, 4.0, 0.0])
@pytest.mark.parametrize("levels", [sigmas(4, 1.0), sigmas(7, 3.0)])
def test_equals_diffusers_scheduler_stepping_the_same_network(
    pipeline: EmojiPipeline, guidance: float, levels: Tensor
) -> None:
    positive, negative, x = conditions(1), conditions(2), noise()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=levels[:-1].tolist())
    with torch.no_grad():
        for t in scheduler.timesteps:
            sigma = (t / 1000).expand(3)
            batched = {name: torch.cat((negative[name], positive[name])) for name in positive}
            if guidance == 1:
                v = pipeline.velocity(pipeline.begin(positive, sigma, x), x, sigma)
            else:
                rows, both = torch.cat((x, x)), torch.cat((sigma, sigma))
                minus, plus = pipeline.velocity(pipeline.begin(batched, both, rows), rows, both).chunk(2)
                v = minus + guidance * (plus - minus)
            x = scheduler.step(v, t, x, return_dict=False)[0]
    ours = sampling.denoise(pipeline, positive, negative, noise(), levels, guidance)
    torch.testing.assert_close(ours, x, atol=1e-5, rtol=0)


class Straight(FlowStub):
    """Stands in for a pipeline whose velocity is known: noise - clean, with clean = the conditions' `clean`."""

    conditions = ("clean",)

    def __init__(self, origin: Tensor) -> None:
        self.origin, self.calls, self.models = (
            origin,
            [],
            {"transformer": nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))},
        )

    def begin(self, batch: dict[str, Tensor], sigmas: Tensor, noise: Tensor) -> Tensor:
        return batch["clean"]

    def velocity(self, prepared: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        network = self.models["transformer"]
        self.calls.append(SimpleNamespace(rows=len(x), sigma=sigma.tolist(), grad=torch.is_grad_enabled(),
                                          modes=[module.training for module in network.modules()]))  # fmt: skip
        return self.origin.repeat(len(x) // len(self.origin), 1) - prepared


def test_a_straight_path_ends_at_its_clean_end_and_guidance_moves_along_the_difference() -> None:
    start, plus, minus = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    for guidance in (0.0, 1.0, 2.5):
        end = sampling.denoise(Straight(start), {"clean": plus}, {"clean": minus}, start, sigmas(5, 2.0), guidance)
        torch.testing.assert_close(end, minus + guidance * (plus - minus), atol=1e-5, rtol=0)


def test_guidance_is_one_call_of_double_size_and_none_when_it_is_one() -> None:
    start = torch.zeros(2, 5)
    for guidance, rows in ((1.0, 2), (1.5, 4)):
        straight, tick = Straight(start), Mock()
        sampling.denoise(straight, {"clean": start}, {"clean": start}, start, sigmas(3, 1.0), guidance, tick)
        assert [call.rows for call in straight.calls] == [rows] * 3 and tick.call_count == 3
        assert [call.sigma[0] for call in straight.calls] == pytest.approx([1, 2 / 3, 1 / 3])


def test_guidance_without_a_negative_is_refused() -> None:
    start = torch.zeros(1, 5)
    with pytest.raises(ValueError, match="guidance 2.0 needs negative"):
        sampling.denoise(Straight(start), {"clean": start}, None, start, sigmas(2, 1.0), 2.0)


def test_the_network_is_in_evaluation_mode_without_gradients_and_put_back_also_after_an_error() -> None:
    start = torch.zeros(1, 5)
    straight = Straight(start)
    network = straight.models["transformer"]
    network[1].eval()
    before = [module.training for module in network.modules()]
    sampling.denoise(straight, {"clean": start}, None, start, sigmas(2, 1.0), 1.0)
    assert all(not call.grad and not any(call.modes) for call in straight.calls)
    assert [module.training for module in network.modules()] == before == [True, True, False]

    def fail() -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        sampling.denoise(straight, {"clean": start}, None, start, sigmas(2, 1.0), 1.0, fail)
    assert [module.training for module in network.modules()] == before


def test_pictures_come_one_per_seed_and_prompt_whatever_is_drawn_beside(
    pipeline: EmojiPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = encoded("a", "b", "")
    many = sampling.pictures(pipeline, rows, ["a", "b"], [0, 1], (32, 32), 3, 1.5)
    assert [(picture.prompt, picture.seed) for picture in many] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert all(picture.image.shape == (3, 32, 32) and picture.image.abs().max() <= 1 for picture in many)
    (alone,) = sampling.pictures(pipeline, rows, ["b"], [1], (32, 32), 3, 1.5)
    torch.testing.assert_close(alone.image, many[3].image, atol=1e-5, rtol=0)
    assert (many[0].image - many[2].image).abs().max() > 0.1  # another seed
    monkeypatch.setattr(sampling, "CHUNK", 3)
    chunked = sampling.pictures(pipeline, rows, ["a", "b"], [0, 1], (32, 32), 3, 1.5)
    for one, other in zip(chunked, many, strict=True):
        torch.testing.assert_close(one.image, other.image, atol=1e-5, rtol=0)


def test_pictures_use_the_empty_prompt_as_the_negative_only_under_guidance(pipeline: EmojiPipeline) -> None:
    rows = encoded("a", "")
    (plain,) = sampling.pictures(pipeline, {"a": rows["a"]}, ["a"], [0], (32, 32), 3, 1.0)
    (guided,) = sampling.pictures(pipeline, rows, ["a"], [0], (32, 32), 3, 3.0)
    assert not torch.equal(plain.image, guided.image)
    with pytest.raises(KeyError):
        sampling.pictures(pipeline, {"a": rows["a"]}, ["a"], [0], (32, 32), 3, 3.0)


def test_every_prompt_and_every_seed_has_noise_of_its_own(pipeline: EmojiPipeline) -> None:
    same = encoded("a")["a"]  # equal conditions: only the noise can differ
    drawn = sampling.pictures(pipeline, {"a": same, "b": same}, ["a", "b"], [0, 1], (32, 32), 2, 1.0)
    images = torch.stack([picture.image.flatten() for picture in drawn])  # [4, 3072]
    assert torch.pdist(images).min() > 10


def test_pictures_leave_the_global_generator_alone(pipeline: EmojiPipeline) -> None:
    before = torch.get_rng_state()
    sampling.pictures(pipeline, encoded("a"), ["a"], [0], (32, 32), 2, 1.0)
    assert torch.equal(torch.get_rng_state(), before)
