"""Rescored GRPO on a Gaussian policy whose gradient is known: from a step from x, x_next ~ N(mean, std^2 I) by a policy mu that is off
by delta in its mean, for the score A = -|x_next - goal|^2 / 2 + baseline.

    d E_old[A] / d mean = goal - mean        and from draws of mu, unweighed,  goal - mean - delta + E_mu[A] delta / std^2
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from lessons import SIGMAS, Velocities, draws, generator, lesson, make, walked
from torch import Tensor
from torch.distributions import Normal

from flowrun.config import ConfigError
from flowrun.flow.policy import log_prob, mean_by_velocity, transition
from flowrun.rollout import Walked

STEP, N, KAPPA = 1, 40_000, 0.7  # KAPPA: |delta| / std
WIDE = ("task.clip_low=0.999", "task.clip_high=1e9")  # the clip is not what is looked at
SAMPLERS = [("flow_sde", 0.7, "normalized"), ("dance_sde", 0.3, "normalized"), ("cps", 0.8, "normalized"), ("cps", 0.8, "unnormalized")]


def made(task, dynamics="flow_sde", eta=0.7, form="normalized", *changes):
    keys = (f"rollout.sampler.dynamics={dynamics}", f"rollout.sampler.eta={eta}", f"rollout.sampler.log_prob={form}")
    return make(task, *keys, *WIDE, *changes)


@dataclass
class Bandit:
    """One step from one state, N times by mu. known: d loss / d theta of an exact rollout, where the velocity is v + theta u; per_row:
    the factor from (x_next - mean) . u A / std^2 to a row's part of it."""

    walk: Walked
    velocity: Tensor
    u: Tensor
    advantages: Tensor
    std: float
    gap: float      # delta . u
    ahead: float    # (goal - mean) . u
    score: float    # E_mu[A]
    per_row: float

    @property
    def known(self) -> float:
        return self.per_row * self.ahead

    @property
    def unweighed(self) -> float:
        return self.per_row * (self.ahead - self.gap + self.score * self.gap / self.std**2)

    def expected(self, weight) -> float:
        """By integration along delta, across which A's mean is known; weight: log ratio -> the weight."""
        z = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
        density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
        along = self.std * z                                                                   # (x_next - mean_mu) . u
        score = self.score + (self.ahead - self.gap) * along + (self.std**2 - along.square()) / 2
        slope = (along + self.gap) / self.std**2
        return self.per_row * float(torch.trapezoid(density * weight(-KAPPA * z - KAPPA**2 / 2) * score * slope, z))


def bandit(sampler, seed=0) -> Bandit:
    x, v, goal, u = (draws(seed + i, (1, 2, 4)) for i in range(4))
    sigmas = SIGMAS[STEP].double(), SIGMAS[STEP + 1].double(), SIGMAS[1].double()
    a, u, elements = float(mean_by_velocity(sampler.dynamics, sampler.eta, *sigmas)), u / u.norm(), 8
    old = transition(sampler.dynamics, sampler.eta, x, v, *sigmas)
    std = float(old.std)
    mu = transition(sampler.dynamics, sampler.eta, x, v + KAPPA * std / a * u, *sigmas)        # delta = KAPPA std u
    after = mu.mean + mu.std * draws(seed + 9, (N, 2, 4))
    score = -(after - goal).square().flatten(1).sum(1) / 2
    baseline = (float((old.mean - goal).square().sum()) + elements * std**2) / 2               # -E_old
    everywhere = {STEP: x.expand(N, 2, 4), STEP + 1: after}
    rolled = Walked(sigmas=SIGMAS.double(), steps=(STEP,), noise=everywhere[STEP], clean=after, states=everywhere,
                    log_probs={STEP: log_prob(after, mu, sampler.log_prob)})  # fmt: skip
    walk = rolled.rescored({STEP: log_prob(after, old, sampler.log_prob)}, sampler)
    shape = a / elements * (1 if sampler.log_prob.value == "normalized" else 2 * std**2)
    ahead, gap = float(((goal - old.mean) * u).sum()), KAPPA * std
    off = (float((mu.mean - goal).square().sum()) + elements * std**2) / 2
    return Bandit(walk, v, u, score + baseline, std, gap, ahead, baseline - off, -shape)


def measured(algorithm, b: Bandit, walk=None) -> tuple[float, float]:
    """(d loss / d theta, its standard error), theta's part of each row's gradient taken alone."""
    v = b.velocity.expand(N, 2, 4).clone().requires_grad_()
    told = lesson(walk or b.walk, b.advantages.tolist())
    out = algorithm.losses(told, Velocities(v), generator())[0]()
    rows = (torch.autograd.grad(out.loss, v)[0] * b.u).flatten(1).sum(1) * N
    return float(rows.mean()), float(rows.std()) / math.sqrt(N)


def lost_of(algorithm, b: Bandit) -> float:
    return algorithm.weighting.worth(b.walk.off[STEP]).lost


def off(found: float, error: float, b: Bandit) -> str:
    """For the report that pytest writes."""
    distance = abs(found - b.known)
    return f"off by {distance / abs(b.known):.0%} of the gradient, {distance / error:.1f} standard errors"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_unweighed_the_gradient_is_far_off_and_weighed_it_is_the_known_one(sampler, record_property):
    whole = made("grpo_rescored", *sampler, "task.truncate=null")
    b = bandit(whole.rollout.sampler)
    found, error = measured(made("grpo", *sampler), b)
    assert abs(b.unweighed - b.known) > 10 * error  # n is large enough to tell
    assert abs(found - b.unweighed) < 3 * error and abs(found - b.known) > 10 * error
    record_property("unweighed", off(found, error, b))
    found, error = measured(whole, b)
    assert abs(found - b.known) < 3 * error
    record_property("weighed", off(found, error, b))
    assert b.expected(torch.exp) == pytest.approx(b.known, rel=1e-9) and b.expected(torch.ones_like) == pytest.approx(b.unweighed)


@pytest.mark.parametrize("truncate, power", [(2.0, 1.0), (1.2, 1.0), (None, 0.5), (1.1, 0.5)])
def test_what_truncation_and_power_leave_of_the_bias_is_known_reported_and_less(truncate, power, record_property):
    cut = made("grpo_rescored", *SAMPLERS[0], f"task.truncate={truncate or 'null'}", f"task.power={power}")
    b = bandit(cut.rollout.sampler)
    expected = b.expected(lambda log_ratio: (power * log_ratio).clamp(max=math.log(truncate or math.inf)).exp())
    found, error = measured(cut, b)
    assert abs(found - expected) < 3 * error
    left, before = (abs(value - b.known) / abs(b.known) for value in (expected, b.unweighed))
    record_property("bias", f"{left:.0%} of the gradient, {before:.0%} unweighed, where weight/lost is {lost_of(cut, b):.0%}")
    assert 0 < left < before
    worth = cut.weighting.worth(b.walk.off[STEP])
    if power == 1:  # log w ~ N(-KAPPA^2 / 2, KAPPA^2)
        above, shifted = ((sign * KAPPA**2 / 2 - math.log(truncate)) / KAPPA for sign in (-1, 1))
        phi = Normal(0.0, 1.0).cdf
        assert worth.truncated == pytest.approx(float(phi(torch.tensor(above))), abs=0.01)
        lost = float(phi(torch.tensor(shifted)) - truncate * phi(torch.tensor(above)))
        assert worth.lost == pytest.approx(lost, abs=0.01)
    assert worth.ess > made("grpo_rescored", *SAMPLERS[0], "task.truncate=null").weighting.worth(b.walk.off[STEP]).ess


def test_a_rollouts_own_log_probabilities_in_the_ratio_bias_it_too(record_property):
    plain, b = made("grpo", *SAMPLERS[0]), bandit(made("grpo", *SAMPLERS[0]).rollout.sampler)
    rolled = replace(b.walk, log_probs={STEP: b.walk.log_probs[STEP] - b.walk.off[STEP] / 8}, off={})
    found, error = measured(plain, b, rolled)
    record_property("grpo", off(found, error, b))
    assert abs(found - b.known) > 10 * error
    assert abs(found - b.expected(lambda log_ratio: (log_ratio / 8).exp())) < 3 * error  # the weight's 8th root, 8 elements


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_weight_is_the_ratio_of_whole_likelihoods_in_every_form(sampler):
    algorithm = made("grpo_rescored", *sampler, "task.truncate=null")
    s, v, other = algorithm.rollout.sampler, draws(9), draws(10)
    walk = walked(s, (0, STEP), v)
    before, after = ({i: walk.again(i, velocity, s) for i in walk.steps} for velocity in (v, v + 0.01 * other))
    again = walk.rescored({i: walk.log_prob(i, taken, s) for i, taken in after.items()}, s)
    for i in walk.steps:
        likelihood = [Normal(t.mean, t.std).log_prob(walk.states[i + 1]).flatten(1).sum(1) for t in (after[i], before[i])]
        assert (again.off[i] - (likelihood[0] - likelihood[1])).abs().max() < 1e-12
        assert float(again.off[i].abs().min()) > 1e-4
        assert torch.equal(again.take([2, 0]).off[i], again.off[i][[2, 0]])
    out = algorithm.losses(lesson(again, [1.0, -0.5, 0.3]), Velocities((v + 0.01 * other).requires_grad_()), generator())[STEP]()
    assert float(out.metrics["ratio_off_max"]) == 0  # the ratio is to what was computed once more
    assert torch.allclose(out.per_row, -torch.tensor([1.0, -0.5, 0.3]).double() * again.off[STEP].exp(), atol=1e-12)


def test_the_distance_from_the_reference_is_not_weighed():
    weighed, v = made("grpo_rescored", *SAMPLERS[0], "task.kl_weight=1"), draws(9)
    s = weighed.rollout.sampler
    walk = walked(s, (STEP,), v)
    walk = walk.rescored({STEP: walk.log_probs[STEP] - torch.tensor([0.1, 0.0, 0.2])}, s)
    out = weighed.losses(lesson(walk, [0.0, 0.0, 0.0]), Velocities(v.clone().requires_grad_(), draws(10)), generator())[0]()
    assert float(out.loss.detach()) == pytest.approx(float(out.metrics["kl"]), rel=1e-12)


@pytest.mark.parametrize("change, said", [("truncate=0", "task.truncate"), ("power=0", "task.power"), ("power=1.5", "task.power")])
def test_settings_that_make_no_weight_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        made("grpo_rescored", *SAMPLERS[0], f"task.{change}")
