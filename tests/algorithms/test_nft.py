"""DiffusionNFT against closed forms: the loss that does not show the reward and the gradient that does."""

from dataclasses import replace

import pytest
import torch
from lessons import SIGMAS, Velocities, draws, generator, lesson, make, walked

from flowrun.config import ConfigError
from flowrun.flow.path import mix
from flowrun.rollout import Walked

CLIP = 5.0


def made(*changes):
    return make("nft", *changes)


def finished(seed=3):
    return Walked(sigmas=SIGMAS.double(), steps=(), noise=draws(seed), clean=draws(seed + 1))


def first(algorithm, advantages, trained, old, reference=None, valid=None):
    """(the first level's loss, the x that it asked at, its level)."""
    policies = Velocities(trained, reference, old)
    seen = {}
    ask = policies.old

    def old_at(x, sigma):
        seen.update(x=x, sigma=sigma)
        return ask(x, sigma)

    policies.old = old_at
    out = algorithm.losses(lesson(finished(), advantages, valid), policies, generator())[0]()
    return out, seen["x"], seen["sigma"]


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_at_the_old_policy_the_gradient_has_the_closed_form_for_every_beta(beta):
    algorithm, v, advantages = made(f"task.beta={beta}"), draws(9).requires_grad_(), [2.0, -1.0, 0.0]
    out, x, sigma = first(algorithm, advantages, v, v.detach())
    gradient = torch.autograd.grad(out.loss, v)[0]
    off = x - sigma * v.detach() - finished().clean
    weight = off.abs().flatten(1).mean(1)[:, None, None]
    r = (torch.tensor(advantages).double() / (2 * CLIP) + 0.5)[:, None, None]
    rows, elements = len(off), off[0].numel()
    expected = -(2 * r - 1) * 2 * sigma * off / (weight * elements) * CLIP / rows
    assert (gradient - expected).abs().max() < 1e-9
    assert gradient[2].abs().max() < 1e-15 and gradient[0].abs().max() > 1e-3  # both halves of the pair cancel


def test_at_the_old_policy_the_losss_value_does_not_show_the_reward():
    v = draws(9)
    values = [float(first(made(), advantages, v, v)[0].loss) for advantages in ([5.0] * 3, [0.0] * 3, [-5.0] * 3)]
    assert max(values) - min(values) < 1e-12


def test_opposite_advantages_give_opposite_gradients():
    gradients = []
    for sign in (1.0, -1.0):
        v = draws(9).requires_grad_()
        out, *_ = first(made(), [sign * 2.0] * 3, v, v.detach())
        gradients.append(torch.autograd.grad(out.loss, v)[0])
    assert torch.allclose(gradients[0], -gradients[1], atol=1e-15) and gradients[0].abs().max() > 1e-4


def test_samples_are_noised_along_the_straight_path_at_the_samplers_levels():
    algorithm = made()
    out, x, sigma = first(algorithm, [0.0] * 3, draws(9), draws(9))
    assert float(sigma) in SIGMAS[:-1].double().tolist() and float(out.metrics["sigma"]) == float(sigma)
    drawn = generator()
    levels = SIGMAS[:-1][torch.randperm(4, generator=drawn)[:2]]
    assert float(levels[0]) == pytest.approx(float(sigma))
    noise = torch.randn(x.shape, generator=drawn).double()
    assert torch.allclose(x, mix(finished().clean, noise, sigma), atol=1e-7)


def test_the_old_policy_is_asked_before_the_trained_one():
    policies = Velocities(draws(9), draws(10), draws(11))
    made("task.kl_weight=1").losses(lesson(finished(), [0.0] * 3), policies, generator())[0]()
    assert policies.asked == ["reference", "old", "trained"]


def test_the_distance_from_the_reference_is_that_of_velocities():
    v, reference = draws(9).requires_grad_(), draws(10)
    with_it, *_ = first(made("task.kl_weight=2"), [0.0] * 3, v, v.detach(), reference)
    without, *_ = first(made(), [0.0] * 3, v, v.detach())
    distance = float((v.detach() - reference).square().mean())
    assert float(with_it.loss - without.loss) == pytest.approx(2 * distance, rel=1e-6)


def test_failed_pictures_do_not_count():
    v = draws(9).requires_grad_()
    out, *_ = first(made(), [2.0, -1.0, 0.0], v, draws(10), valid=[True, False, True])
    assert torch.autograd.grad(out.loss, v)[0][1].abs().max() == 0 and float(out.per_row[1]) == 0


def test_more_levels_than_the_sampler_has_are_refused():
    algorithm = made("task.levels=5")
    with pytest.raises(ConfigError, match="sampler has 4 levels"):
        algorithm.check(SIGMAS)
    made("task.levels=5", "task.times=uniform").check(SIGMAS)


def test_a_shift_of_the_samplers_own_levels_is_refused():
    with pytest.raises(ConfigError, match=r"task\.shift"):
        made("task.shift=3")


def test_any_sampler_will_do():
    algorithm = made("rollout.sampler.dynamics=flow_sde", "rollout.sampler.eta=0.7")
    walk = replace(walked(algorithm.rollout.sampler, (1,), draws(9)), states={}, log_probs={})
    policies = Velocities(draws(9), None, draws(10))
    assert len(algorithm.losses(lesson(walk, [1.0, 0.0, -1.0]), policies, generator())) == algorithm.terms((1,)) == 2
