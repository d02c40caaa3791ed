"""Flow-matching loss against closed forms, and caption dropout against its probability."""

import math
from types import SimpleNamespace

import pytest
import torch

from flowrun.algorithms.sft import Sft
from flowrun.config import ConfigError
from flowrun.registry import ALGORITHMS
from tests.stubs import FlowStub

BASE = {
    "density": "logit_normal",
    "density_mean": 0.0,
    "density_std": 1.0,
    "shift": 1.0,
    "weighting": "none",
    "caption_dropout": 0.0,
    "mask": False,
}


def sft(**changes):
    return Sft(ALGORITHMS.build("task", Sft, BASE | changes))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Stub(FlowStub):
    """A pipeline whose velocity is `answer(clean, noise, x, sigma)`; it keeps what it was asked."""

    target = "target_latents"

    def __init__(self, answer):
        self.answer = answer

    def begin(self, batch, sigma, noise):
        return SimpleNamespace(clean=batch["target_latents"], noise=noise, sigma=sigma)

    def velocity(self, prepared, x, sigma):
        self.asked = SimpleNamespace(x=x, sigma=sigma, noise=prepared.noise)
        assert torch.equal(prepared.sigma, sigma)
        return self.answer(prepared.clean, prepared.noise, x, sigma)


def truth(clean, noise, x, sigma):
    return noise - clean


def off_by(amount):
    return lambda clean, noise, x, sigma: noise - clean + amount


@pytest.fixture
def batch():
    return {"target_latents": torch.randn(6, 3, 4, 4, generator=generator(9))}


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_the_true_velocity_costs_nothing(batch, weighting):
    out = sft(weighting=weighting).loss(Stub(truth), batch, generator())
    assert out.loss == 0 and torch.equal(out.per_row, torch.zeros(6))


def test_a_constant_error_costs_its_square(batch):
    out = sft().loss(Stub(off_by(0.5)), batch, generator())
    assert out.per_row.tolist() == pytest.approx([0.25] * 6, rel=1e-5)
    assert float(out.loss) == pytest.approx(0.25, rel=1e-5)


def test_the_loss_is_the_mean_of_the_rows_and_a_rows_error_is_its_own(batch):
    rows = torch.arange(6.0).reshape(6, 1, 1, 1)
    out = sft().loss(Stub(off_by(rows)), batch, generator())
    assert out.per_row.tolist() == pytest.approx([i**2 for i in range(6)], rel=1e-4, abs=1e-6)
    assert float(out.loss) == pytest.approx(55 / 6, rel=1e-5)


@pytest.mark.parametrize(
    "weighting, factor", [("sigma_sqrt", lambda s: s**-2), ("cosmap", lambda s: 2 / (math.pi * (1 - 2 * s + 2 * s**2)))]
)
def test_weights_multiply_each_rows_error(batch, weighting, factor):
    pipeline = Stub(off_by(2.0))
    out = sft(weighting=weighting).loss(pipeline, batch, generator())
    assert torch.allclose(out.per_row, 4 * factor(pipeline.asked.sigma), rtol=1e-4)
    assert float(out.metrics["mse"]) == pytest.approx(4, rel=1e-5)
    assert torch.equal(out.metrics["sigma"], pipeline.asked.sigma.mean())


def test_the_network_sees_the_mix_of_clean_and_noise(batch):
    pipeline = Stub(truth)
    sft().loss(pipeline, batch, generator())
    s = pipeline.asked.sigma.reshape(6, 1, 1, 1)
    assert torch.allclose(
        pipeline.asked.x, (1 - s) * batch["target_latents"] + s * pipeline.asked.noise, rtol=0, atol=1e-6
    )
    assert len(set(pipeline.asked.sigma.tolist())) == 6  # one level per row
    assert abs(float(pipeline.asked.noise.mean())) < 0.3 and 0.8 < float(pipeline.asked.noise.std()) < 1.2


def test_density_settings_reach_the_draw(batch):
    pipeline = Stub(truth)
    many = {"target_latents": torch.zeros(4000, 1, 1, 1)}
    for changes, median in (
        ({"density_mean": 1.0}, 1 / (1 + math.exp(-1))),
        ({"density": "uniform"}, 0.5),
        ({"shift": 3.0}, 0.75),
    ):
        sft(**changes).loss(pipeline, many, generator())
        assert float(pipeline.asked.sigma.median()) == pytest.approx(median, abs=0.02), changes
    sft(density_std=0.01).loss(pipeline, many, generator())
    assert float(pipeline.asked.sigma.std()) < 0.01


def test_the_gradient_is_that_of_the_mean_squared_error(batch):
    scale = torch.tensor(0.5, requires_grad=True)
    pipeline = Stub(lambda clean, noise, x, sigma: scale * (noise - clean))
    out = sft().loss(pipeline, batch, generator())
    out.loss.backward()
    power = float((pipeline.asked.noise - batch["target_latents"]).square().mean())
    assert float(scale.grad) == pytest.approx(2 * (0.5 - 1) * power, rel=1e-5)  # d/da (a - 1)^2 <v^2>
    assert not out.per_row.requires_grad and not out.metrics["mse"].requires_grad


def test_the_arithmetic_is_fp32_whatever_the_network_returns(batch):
    out = sft().loss(Stub(lambda clean, noise, x, sigma: (noise - clean + 1).bfloat16()), batch, generator())
    assert out.loss.dtype == out.per_row.dtype == torch.float32
    pipeline = Stub(truth)
    narrow = sft().loss(pipeline, {"target_latents": batch["target_latents"].bfloat16()}, generator())
    assert narrow.loss.dtype == pipeline.asked.x.dtype == pipeline.asked.noise.dtype == torch.float32


def test_draws_come_from_the_generator_alone(batch):
    before = torch.get_rng_state()
    first, second, other = Stub(truth), Stub(truth), Stub(truth)
    sft().loss(first, batch, generator(1))
    sft().loss(second, batch, generator(1))
    sft().loss(other, batch, generator(2))
    assert torch.equal(first.asked.x, second.asked.x) and not torch.equal(first.asked.x, other.asked.x)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("rows", [1, 3])
def test_a_short_batch_is_as_long_as_it_is(rows):
    out = sft().loss(Stub(off_by(1.0)), {"target_latents": torch.zeros(rows, 2, 2, 2)}, generator())
    assert out.per_row.shape == (rows,)
    assert float(out.loss) == pytest.approx(1)


def test_captions_are_dropped_with_the_given_probability():
    algorithm = sft(caption_dropout=0.1)
    picks = [algorithm.choose(0, f"row-{row}", epoch) for row in range(100) for epoch in range(100)]
    assert set(picks) == {0, 1}
    assert abs(sum(picks) / 1e4 - 0.1) < 3.3 * math.sqrt(0.1 * 0.9 / 1e4)


def test_dropping_depends_on_seed_row_and_epoch_alone():
    algorithm = sft(caption_dropout=0.5)
    picks = [algorithm.choose(0, "a", epoch) for epoch in range(64)]
    assert picks == [sft(caption_dropout=0.5).choose(0, "a", epoch) for epoch in range(64)]
    assert picks != [algorithm.choose(1, "a", epoch) for epoch in range(64)]
    assert picks != [algorithm.choose(0, "b", epoch) for epoch in range(64)]


def test_a_higher_share_drops_all_that_a_lower_one_drops():
    """One draw per visit, compared with the share: what separates two runs is the share alone."""
    less, more = sft(caption_dropout=0.2), sft(caption_dropout=0.6)
    picks = [(less.choose(0, str(row), 0), more.choose(0, str(row), 0)) for row in range(500)]
    assert set(picks) == {(0, 0), (0, 1), (1, 1)}


def test_shares_of_none_and_all_are_exact():
    never, always = sft(caption_dropout=0.0), sft(caption_dropout=1.0)
    assert not any(never.choose(0, str(row), 0) for row in range(1000))
    assert all(always.choose(0, str(row), 0) for row in range(1000))


def test_the_empty_caption_is_a_variant_only_when_it_is_used():
    assert sft().variants() == [{}]
    assert sft(caption_dropout=0.1).variants() == [{}, {"prompt": ""}]


@pytest.mark.parametrize("changes, words", [
    ({"density": "normal"}, ["task.density", "logit_normal"]),
    ({"density_std": 0.0}, ["task.density_std", "positive"]),
    ({"shift": 0.0}, ["task.shift", "positive"]),
    ({"caption_dropout": 1.5}, ["task.caption_dropout", "[0, 1]"]),
    ({"density": "uniform", "weighting": "sigma_sqrt"}, ["task.weighting", "no finite mean", "logit_normal"]),
    ({"caption_droput": 0.1}, ["task.caption_droput", "caption_dropout"]),
])  # fmt: skip
def test_wrong_settings_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        sft(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_only_what_the_mask_shows_counts(batch):
    """An error of 1 in the left half and 3 in the right one."""
    amount = torch.cat([torch.ones(6, 3, 4, 2), 3 * torch.ones(6, 3, 4, 2)], dim=3)
    left = torch.cat([torch.ones(6, 1, 4, 2), torch.zeros(6, 1, 4, 2)], dim=3)
    for mask, expected in ((left, 1.0), (1 - left, 9.0), (torch.ones_like(left), 5.0), (left + 0.5 * (1 - left), 11 / 3)):
        out = sft(mask=True).loss(Stub(off_by(amount)), batch | {"loss_mask": mask}, generator())
        assert torch.allclose(out.per_row, torch.full((6,), expected))
    nothing = sft(mask=True).loss(Stub(off_by(amount)), batch | {"loss_mask": 0 * left}, generator())
    assert torch.equal(nothing.per_row, torch.zeros(6))


def test_a_mask_is_taken_to_the_size_of_the_latents():
    pipeline = SimpleNamespace(reduction=8, conditions=("c",), target="target_latents")
    assert sft(mask=True).reads(pipeline) == ("c", "target_latents", "loss_mask")
    (unit,) = sft(mask=True).units(pipeline)
    mask = torch.zeros(3, 16, 32, dtype=torch.uint8)
    mask[:, :8, :8], mask[:, 8:, 8:12] = 255, 255
    reduced = unit.process(None, mask=mask)["loss_mask"]
    assert torch.equal(reduced, torch.tensor([[[1.0, 0, 0, 0], [0, 0.5, 0, 0]]]))
    assert sft().units(pipeline) == () and "loss_mask" not in sft().reads(pipeline)
