"""Direct distillation against closed forms: where a walk ends, what the loss is, and that every step is trained."""

from itertools import pairwise

import pytest
import torch

from flowrun.algorithms.distill import Distill
from flowrun.config import ConfigError
from flowrun.flow.schedule import sigmas
from flowrun.graph import Draws, Executor, State, Unit
from flowrun.registry import ALGORITHMS
from tests.stubs import FlowStub


def distill(steps=2, noise="paired", guidance=1.0):
    return Distill(ALGORITHMS.build("task", Distill, {"steps": steps, "noise": noise, "guidance": guidance}))


class Stub(FlowStub):
    """A pipeline whose velocity is `answer(x, sigma)`; it keeps the levels it was asked at."""

    target, reduction = "target_latents", 8

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


class Conditioned(Stub):
    """Its velocity is the row's condition, wherever it is asked."""

    conditions = ("c",)

    def begin(self, batch, levels, noise):
        assert len(batch["c"]) == len(noise)
        return batch["c"]

    def velocity(self, prepared, x, sigma):
        assert len(prepared) == len(x) == len(sigma)
        return prepared

    def units(self):
        text = Unit(name="text", input_params=("prompt",), output_params=("hidden",),
                    process=lambda ctx, prompt: {"hidden": torch.full((2,), float(len(prompt)))})  # fmt: skip
        last = Unit(name="last", input_params=("hidden",), output_params=("c",),
                    process=lambda ctx, hidden: {"c": hidden.sum() + torch.zeros(3, 4, 4)})  # fmt: skip
        return text, last, Unit(name="other", input_params=("image",), output_params=("target_latents",))


@pytest.mark.parametrize("guidance", [0.0, 1.0, 1.5, 4.0])
def test_guidance_moves_the_walk_away_from_that_of_the_empty_caption(batch, guidance):
    """With constant velocities: the end is noise - (empty + g (caption - empty))."""
    own, empty = (torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    given = batch | {"c": own} | ({"negative_c": empty} if guidance != 1 else {})
    out = distill(3, guidance=guidance).loss(Conditioned(None), given, None)
    end = batch["teacher_noise"] - (empty + guidance * (own - empty))
    assert torch.allclose(out.per_row, (end - batch["teacher_latents"]).square().mean((1, 2, 3)), rtol=1e-4)


def test_the_empty_captions_conditions_come_from_the_pipelines_own_units():
    algorithm, pipeline = distill(guidance=2.0), Conditioned(None)
    assert algorithm.reads(pipeline) == ("c", "negative_c", "teacher_noise", "teacher_latents")
    units = algorithm.units(pipeline)
    assert [unit.name for unit in units] == ["negative_text", "negative_last"]
    assert units[0].reads == frozenset(), "they are the same for all rows"
    state = Executor(units, {}).run(State(), Draws(0, "row", 0))
    assert torch.equal(state.shared["negative_c"], torch.zeros(3, 4, 4))
    assert distill().units(pipeline) == () and distill().reads(pipeline)[0] == "c"


def test_no_step_at_all_is_refused():
    with pytest.raises(ConfigError, match="task.steps: is 0; give at least 1"):
        distill(steps=0)
