"""GRPO against closed forms: the ratio, what the clip keeps, and the distance from the reference."""

import pytest
import torch
from lessons import SIGMAS, Velocities, draws, generator, lesson, make, walked

from flowrun.config import ConfigError
from flowrun.flow.policy import log_prob, mean_by_velocity, transition

DYNAMICS = [("flow_sde", 0.7), ("dance_sde", 0.3), ("cps", 0.8)]
STEP = 1


def made(dynamics="flow_sde", eta=0.7, *changes):
    return make("grpo", f"rollout.sampler.dynamics={dynamics}", f"rollout.sampler.eta={eta}", *changes)


def losses(algorithm, walk, advantages, trained, reference=None, valid=None):
    return algorithm.losses(lesson(walk, advantages, valid), Velocities(trained, reference), generator())


@pytest.mark.parametrize("dynamics, eta", DYNAMICS)
def test_before_the_first_update_the_ratio_is_one_and_the_gradient_is_the_policys(dynamics, eta):
    algorithm, v = made(dynamics, eta), draws(9).requires_grad_()
    walk, advantages = walked(algorithm.rollout.sampler, (0, STEP), v.detach()), [1.5, -0.5, 0.0]
    found = losses(algorithm, walk, advantages, v)
    assert len(found) == algorithm.terms((0, STEP)) == 2
    out = found[STEP]()
    assert float(out.metrics["ratio_off_max"]) == 0 and float(out.metrics["clip_fraction"]) == 0
    gradient = torch.autograd.grad(out.loss, v)[0]
    taken = transition(algorithm.rollout.sampler.dynamics, eta, walk.states[STEP], v, SIGMAS[1].double(), SIGMAS[2].double(), SIGMAS[1])
    own = log_prob(walk.states[STEP + 1], taken)
    expected = torch.autograd.grad(-(torch.tensor(advantages).double() * own).mean(), v)[0]
    assert (gradient - expected).abs().max() < 1e-15
    assert gradient[2].abs().max() == 0 and gradient[0].abs().max() > 1e-3


def at_ratio(algorithm, target, advantage):
    """One row's loss and gradient where the stored log-probability makes the ratio `target`."""
    v = draws(9).requires_grad_()
    walk = walked(algorithm.rollout.sampler, (STEP,), v.detach())
    walk.log_probs[STEP] = walk.log_probs[STEP] - torch.tensor(target, dtype=torch.float64).log()
    out = losses(algorithm, walk, [advantage, 0.0, 0.0], v)[0]()
    return out, torch.autograd.grad(out.loss, v)[0]


@pytest.mark.parametrize(
    "ratio, advantage, kept", [(1.5, 1.0, False), (0.5, -1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (1.05, 1.0, True)]
)
def test_the_clip_takes_the_gradient_where_the_policy_already_moved_the_right_way(ratio, advantage, kept):
    algorithm = made("flow_sde", 0.7, "task.clip_low=0.1", "task.clip_high=0.2")
    out, gradient = at_ratio(algorithm, ratio, advantage)
    assert bool(gradient.abs().max() > 0) == kept
    assert float(out.metrics["clip_fraction"]) * 3 == pytest.approx(float(not kept))
    bound = min(max(ratio, 0.9), 1.2)
    assert float(out.per_row[0]) == pytest.approx(max(-advantage * ratio, -advantage * bound), rel=1e-12)


@pytest.mark.parametrize("dynamics, eta", DYNAMICS)
def test_the_two_distances_from_the_reference_differ_by_the_steps_factor(dynamics, eta):
    v, reference = draws(9), draws(10)
    found = {}
    for kind in ("mean", "velocity"):
        algorithm = made(dynamics, eta, "task.kl_weight=1", f"task.kl={kind}")
        walk = walked(algorithm.rollout.sampler, (STEP,), v)
        policies = Velocities(v.clone().requires_grad_(), reference)
        out = algorithm.losses(lesson(walk, [0.0, 0.0, 0.0]), policies, generator())[0]()
        assert policies.asked == ["reference", "trained"]
        found[kind] = float(out.metrics["kl"])
        assert float(out.loss) == pytest.approx(found[kind])
        assert torch.autograd.grad(out.loss, policies._trained)[0].abs().max() > 0  # it pulls, and is not only shown
    factor = mean_by_velocity(algorithm.rollout.sampler.dynamics, eta, SIGMAS[1].double(), SIGMAS[2].double(), SIGMAS[1].double())
    assert found["velocity"] == pytest.approx(float((v - reference).square().mean()))
    assert found["mean"] == pytest.approx(float(factor**2) * found["velocity"])


def test_without_a_weight_the_reference_is_not_asked():
    algorithm, v = made(), draws(9)
    policies = Velocities(v)
    algorithm.losses(lesson(walked(algorithm.rollout.sampler, (STEP,), v), [1.0, -1.0, 0.0]), policies, generator())[0]()
    assert policies.asked == ["trained"]


def test_failed_pictures_give_no_gradient_and_leave_the_others_share():
    algorithm, v = made("flow_sde", 0.7, "task.kl_weight=1"), draws(9).requires_grad_()
    walk = walked(algorithm.rollout.sampler, (STEP,), v.detach())
    both = torch.autograd.grad(losses(algorithm, walk, [1.0, -1.0, 0.5], v, draws(10))[0]().loss, v)[0]
    out = losses(algorithm, walk, [1.0, -1.0, 0.5], v, draws(10), [True, True, False])[0]()
    gradient = torch.autograd.grad(out.loss, v)[0]
    assert gradient[2].abs().max() == 0 and torch.equal(gradient[:2], both[:2]) and float(out.per_row[2]) == 0


def test_the_unnormalised_log_probability_scales_the_gradient_by_twice_the_variance():
    gradients = {}
    for form in ("normalized", "unnormalized"):
        algorithm, v = made("cps", 0.8, f"rollout.sampler.log_prob={form}"), draws(9).requires_grad_()
        walk = walked(algorithm.rollout.sampler, (STEP,), v.detach())
        gradients[form] = torch.autograd.grad(losses(algorithm, walk, [1.0, -1.0, 0.5], v)[0]().loss, v)[0]
        std = transition(algorithm.rollout.sampler.dynamics, 0.8, v, v, SIGMAS[1].double(), SIGMAS[2].double(), SIGMAS[1].double()).std
    assert torch.allclose(gradients["unnormalized"], 2 * std.square() * gradients["normalized"], atol=1e-15)


def test_a_sampler_without_noise_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.sampler\.dynamics: is ode"):
        made("ode", 0)
