"""Direct distillation against closed forms: where a walk ends, what the loss is, and that every step is trained."""

from itertools import pairwise

import pytest
import torch

from flowrun.algorithms.distill import Distill
from flowrun.config import ConfigError
from flowrun.flow.schedule import sigmas
from flowrun.graph import Draws
from flowrun.registry import ALGORITHMS


def distill(steps=2, noise="paired"):
    return Distill(ALGORITHMS.build("task", Distill, {"steps": steps, "noise": noise}))


class Stub:
    """A pipeline whose velocity is `answer(x, sigma)`; it keeps the levels it was asked at."""

    conditions, target, reduction = (), "target_latents", 8

    def __init__(self, answer):
        self.answer, self.levels = answer, []

    def schedule(self, steps, size):
        assert size == (32, 32)  # 4 x 4 latents
        return sigmas(steps, 3.0)

    def begin(self, batch, levels, noise):
        self.begun = levels

    def velocity(self, prepared, x, sigma):
        self.levels.append(sigma)
        return self.answer(x, sigma)


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 3, 4, 4, generator=draw) for name in ("teacher_noise", "teacher_latents")}


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_constant_velocity_ends_at_noise_minus_velocity(batch, steps):
    """From sigma 1 to 0 the steps add up to -1, whatever the schedule between."""
    velocity = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    out = distill(steps).loss(Stub(lambda x, sigma: velocity), batch, None)
    per_row = (batch["teacher_noise"] - velocity - batch["teacher_latents"]).square().mean((1, 2, 3))
    assert torch.allclose(out.per_row, per_row, rtol=1e-5)
    assert torch.allclose(out.loss, per_row.mean(), rtol=1e-5) and out.loss.dtype == torch.float32


def test_the_levels_are_those_of_sampling(batch):
    stub = Stub(lambda x, sigma: x)
    distill(4).loss(stub, batch, None)
    asked = torch.stack([levels[0] for levels in stub.levels])
    assert torch.equal(asked, sigmas(4, 3.0)[:-1]) and torch.equal(stub.begun, asked)


def test_a_student_that_is_its_teacher_has_no_loss(batch):
    """The target is the end of the same walk, taken here step by step by hand."""
    levels, x = sigmas(3, 3.0), batch["teacher_noise"]
    for sigma, after in pairwise(levels):
        x = x + (after - sigma) * torch.sin(x)
    out = distill(3).loss(Stub(lambda x, sigma: torch.sin(x)), batch | {"teacher_latents": x}, None)
    assert float(out.loss) < 1e-12


def test_every_step_of_the_walk_gets_a_gradient(batch):
    gains = [torch.ones((), requires_grad=True) for _ in range(4)]
    calls = iter(gains)
    distill(4).loss(Stub(lambda x, sigma: next(calls) * x), batch, None).loss.backward()
    assert all(float(gain.grad.abs()) > 1e-3 for gain in gains)


@pytest.mark.parametrize("noise, same", [("frozen", True), ("per_epoch", False)])
def test_noise_of_a_row_is_the_same_in_each_epoch_only_when_it_is_frozen(noise, same):
    (unit,) = distill(noise=noise).units(Stub(None))
    first, second = (draw(unit, Draws(0, "row", epoch)) for epoch in (0, 1))
    assert torch.equal(first, second) == same
    assert not torch.equal(first, draw(unit, Draws(0, "other row", 0)))


def draw(unit, draws):
    class Context:
        generator = draws.generator(unit)

    return unit.process(Context, target_latents=torch.zeros(3, 4, 4))["noise"]


def test_what_the_loss_reads_follows_from_where_the_noise_comes_from():
    stub = Stub(None)
    assert distill().reads(stub) == ("teacher_noise", "teacher_latents")
    assert distill(noise="frozen").reads(stub) == ("noise", "target_latents")
    assert distill().units(stub) == ()


def test_no_step_at_all_is_refused():
    with pytest.raises(ConfigError, match="task.steps: is 0; give at least 1"):
        distill(steps=0)
