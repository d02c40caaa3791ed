"""Optimizers and schedules by name, checked arguments, and the averaged weights against their formula."""

import math

import pytest
import torch
from torch.nn import Parameter

from flowrun import config
from flowrun.config import ConfigError
from flowrun.optim import Ema, check_optimizer, make_optimizer, make_schedule

BASE = {
    "name": "AdamW",
    "lr": 1e-2,
    "betas": [0.9, 0.99],
    "weight_decay": 0.01,
    "args": {},
    "clip": 1.0,
    "schedule": "constant",
    "schedule_args": {},
    "warmup_steps": 0,
    "ema": 0.0,
}
NO_BETAS = {"betas": None, "weight_decay": 0.0}


def settings(**changes):
    return config.Optimizer(**BASE | changes)


def weights(n=3):
    return {f"m.{i}": Parameter(torch.full((2, 2), float(i + 1))) for i in range(n)}


def refusal(**changes):
    with pytest.raises(ConfigError) as caught:
        make_optimizer(settings(**changes), weights())
    return str(caught.value)


def test_the_optimizer_steps_as_torch_does():
    ours, theirs = weights(), weights()
    a = make_optimizer(settings(name="adamw", args={"eps": 1e-6}), ours)
    b = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01, eps=1e-6)
    for _ in range(3):
        for optimizer, parameters in ((a, ours), (b, theirs)):
            sum((p**3).sum() for p in parameters.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert type(a) is torch.optim.AdamW
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("name", ["ADAMW", "sgd", "RMSprop", "Adafactor", "muon"])
def test_names_are_taken_in_any_case(name):
    made = make_optimizer(settings(name=name, **({} if name == "ADAMW" else NO_BETAS)), weights())
    assert type(made).__name__.lower() == name.lower()
    assert made.param_groups[0]["lr"] == 1e-2


class Halver(torch.optim.SGD):
    """A class outside torch.optim."""


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params, size=1.0):
        super().__init__(params, {"size": size})


def test_a_class_is_taken_by_module_and_name():
    made = make_optimizer(settings(name=f"{__name__}:Halver", args={"momentum": 0.5}, **NO_BETAS), weights())
    assert type(made) is Halver and made.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize("changes, words", [
    ({"name": "AdamV"}, ["optimizer.name", "no AdamV", "did you mean Adam "]),
    ({"name": "Optimizer"}, ["optimizer.name", "no Optimizer"]),
    ({"name": "LBFGS"}, ["optimizer.name", "several times"]),
    ({"name": "no_such_module:Opt"}, ["optimizer.name", "cannot import"]),
    ({"name": "math:sqrt"}, ["optimizer.name", "no torch.optim.Optimizer"]),
    ({"name": f"{__name__}:WithoutRate", **NO_BETAS}, ["optimizer.name", "takes no lr"]),
    ({"name": "SGD", "weight_decay": 0.0}, ["optimizer.betas", "SGD takes no betas", "optimizer.betas=null"]),
    ({"name": "Rprop", "betas": None}, ["optimizer.weight_decay", "optimizer.weight_decay=0"]),
    ({"args": {"amsgrd": True}}, ["optimizer.args.amsgrd", "takes no amsgrd", "did you mean amsgrad?"]),
    ({"args": {"lr": 1.0}}, ["optimizer.args.lr", "set optimizer.lr"]),
    ({"args": {"params": []}}, ["optimizer.args.params", "takes no params"]),
    ({"betas": [0.9]}, ["optimizer.betas", "AdamW takes 2, not 1"]),
    ({"betas": [0.9, 1.5]}, ["optimizer", "AdamW refuses", "beta"]),
])  # fmt: skip
def test_wrong_settings_are_refused_by_name(changes, words):
    text = refusal(**changes)
    assert all(word in text for word in words), text
    assert text.count("\n") == 0


def test_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="nothing is trained"):
        make_optimizer(settings(), {})


def rates(total, **changes):
    optimizer = make_optimizer(settings(lr=1.0, **changes), weights())
    schedule = make_schedule(settings(lr=1.0, **changes), optimizer, total)
    seen = []
    for _ in range(total + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_cosine_with_a_floor_follows_its_formula():
    """Warm-up is linear from 0; then floor + (1 - floor) (1 + cos(pi t)) / 2, at the floor after the last update."""
    seen = rates(30, schedule="cosine_with_min_lr", schedule_args={"min_lr_rate": 0.03}, warmup_steps=10)
    wanted = [n / 10 for n in range(10)] + [0.03 + 0.97 * (1 + math.cos(math.pi * n / 20)) / 2 for n in range(21)]
    assert seen == pytest.approx(wanted, abs=1e-12)


def test_constant_stays_and_linear_ends_at_zero():
    assert rates(5) == [1.0] * 6
    assert rates(4, schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_every_named_schedule_can_be_made():
    from transformers import SchedulerType

    needs = {
        "warmup_stable_decay": {"num_decay_steps": 2},
        "cosine_with_min_lr": {"min_lr": 0.1},
        "cosine_warmup_with_min_lr": {"min_lr": 0.1},
    }
    for kind in SchedulerType:
        if kind.value in ("reduce_lr_on_plateau", "greedy"):
            continue
        warmup = 0 if kind.value == "constant" else 2
        seen = rates(8, schedule=kind.value, schedule_args=needs.get(kind.value, {}), warmup_steps=warmup)
        assert max(seen) == pytest.approx(1.0), kind


@pytest.mark.parametrize("changes, words", [
    ({"schedule": "cosin"}, ["optimizer.schedule", "no cosin", "cosine_with_min_lr", "linear"]),
    ({"schedule": "reduce_lr_on_plateau"}, ["optimizer.schedule", "one of"]),
    ({"schedule": "cosine", "schedule_args": {"num_cycle": 1}}, ["schedule_args.num_cycle", "did you mean num_cycles?"]),
    ({"schedule": "constant", "schedule_args": {"min_lr": 1}}, ["optimizer.schedule_args.min_lr", "takes no min_lr"]),
    ({"schedule": "cosine", "schedule_args": {"num_training_steps": 1}}, ["schedule_args.num_training_steps"]),
    ({"schedule": "cosine_with_min_lr"}, ["optimizer.schedule_args", "min_lr"]),
    ({"schedule": "warmup_stable_decay"}, ["optimizer.schedule_args", "num_decay_steps"]),
    ({"warmup_steps": 5}, ["optimizer.warmup_steps", "constant has no warm-up", "constant_with_warmup"]),
])  # fmt: skip
def test_wrong_schedules_are_refused_by_name(changes, words):
    optimizer = make_optimizer(settings(), weights())
    with pytest.raises(ConfigError) as caught:
        make_schedule(settings(**changes), optimizer, 10)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_early_check_needs_no_model_and_finds_what_the_later_calls_refuse():
    assert check_optimizer(settings(schedule="linear", warmup_steps=5), 5) == []
    (warning,) = check_optimizer(settings(schedule="linear", warmup_steps=50), 5)
    assert "warmup_steps is 50 but the run has 5 steps" in warning
    for wrong in ({"name": "SGD"}, {"args": {"foo": 1}}, {"schedule": "none"}, {"betas": [0.9, 1.0]}):
        with pytest.raises(ConfigError):
            check_optimizer(settings(**wrong), 5)


def test_parameters_without_gradient_do_not_disturb_the_update():
    parameters = weights()
    optimizer = make_optimizer(settings(), parameters)
    (parameters["m.1"] ** 2).sum().backward()
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    optimizer.step()
    assert torch.equal(parameters["m.0"], torch.ones(2, 2))
    assert not torch.equal(parameters["m.1"], torch.full((2, 2), 2.0))


def test_the_average_follows_its_formula():
    """d = min(decay, (1 + n) / (10 + n)) after n earlier updates, 0 at the first, in float64 by hand."""
    p = Parameter(torch.tensor([1.0]))
    ema, wanted = Ema([p], 0.3), 0.0
    for n in range(12):
        p.data += 1.0
        ema.update()
        d = min(0.3, (1 + n) / (10 + n)) if n else 0.0
        wanted = d * wanted + (1 - d) * p.item()
        assert float(ema.state()[0]["0"]) == pytest.approx(wanted, rel=1e-6), n


def test_the_average_is_applied_inside_the_block_and_the_weights_return_bit_for_bit():
    parameters = [Parameter(torch.randn(4, 3)), Parameter(torch.randn(2).bfloat16())]
    ema = Ema(parameters, 0.9)
    for _ in range(5):
        for p in parameters:
            p.data.add_(torch.randn_like(p))
        ema.update()
    before = [p.detach().clone() for p in parameters]
    places = [p.data_ptr() for p in parameters]
    with ema.applied():
        assert torch.equal(parameters[0], ema.state()[0]["0"])
        assert not torch.equal(parameters[0], before[0])
        with pytest.raises(RuntimeError, match="already"), ema.applied():
            pass
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    assert places == [p.data_ptr() for p in parameters]


def test_the_average_of_narrow_weights_is_wide():
    """With d = 0.999 a step of 2^-8 times 1 - d is below bf16's resolution; the average must still move."""
    p = Parameter(torch.ones(1, dtype=torch.bfloat16))
    ema = Ema([p], 0.5)
    for _ in range(20):
        ema.update()
    p.data.fill_(1.0078125)
    for _ in range(3):
        ema.update()
    average = ema.state()[0]["0"]
    assert average.dtype == torch.float32
    assert 1.0 < float(average) < 1.0078125


def test_a_saved_average_goes_on_as_if_never_stopped():
    def updates(p, ema, count):
        for _ in range(count):
            p.data.mul_(1.1)
            ema.update()

    a, b = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    whole = Ema([a], 0.9)
    updates(a, whole, 7)
    first = Ema([b], 0.9)
    updates(b, first, 3)
    averages, count = first.state()
    averages = {name: value.clone() for name, value in averages.items()}
    second = Ema([b], 0.9)
    second.load(averages, count)
    updates(b, second, 4)
    assert torch.equal(whole.state()[0]["0"], second.state()[0]["0"])
    assert whole.state()[1] == second.state()[1] == 7
    with pytest.raises(ValueError, match="not these"):
        second.load({"0": torch.ones(4)}, 1)
