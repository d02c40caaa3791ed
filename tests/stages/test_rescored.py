"""Runs of rescored GRPO: lossy rollouts are admitted, measured and weighed, and exact ones learned from as GRPO does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from flowrun import cli
from flowrun.guided import Guided
from tests.conftest import SMALL, Runs, result
from tests.stages.test_probe import STEPS
from tests.stages.test_rollout import BLIND, GROUPS, LOSSY, NEAREST, curves, learn, rows, weights

ONE = ("task=grpo_rescored", *STEPS)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Velocities depend a little on how many pictures are asked for at once, as rounding makes them on most machines."""
    exact = Guided.__call__
    monkeypatch.setattr(Guided, "__call__", lambda self, x, sigma: exact(self, x, sigma) * (1 + 1e-5 * len(x)))


def section(run: Path, title: str) -> list[str]:
    lines = (run / "plan.txt").read_text().splitlines()
    start = max(i for i, line in enumerate(lines) if line.startswith(title))
    return [line[12:] for i, line in enumerate(lines[start:]) if i == 0 or line.startswith(" ")]


def test_a_lossy_rollout_is_refused_by_grpo_and_weighed_by_the_other(
    runs: Runs, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main([*SMALL, *GROUPS, NEAREST, *STEPS, "task=grpo", *LOSSY]) == 2
    assert "task=grpo_rescored weighs for it" in capsys.readouterr().err
    run = learn(runs, *ONE, *LOSSY)
    figures = {name: float(value) for name, value in curves(run)[0].items() if value}
    assert figures["diffusers_cache/hits"] > 0
    assert figures["ratio_off_first"] == 0.0  # both sides of the ratio are of training's path
    assert 0 < figures["weight/ess"] < 1 and figures["weight/nats_max"] > 1e-3
    assert 0 <= figures["weight/truncated"] < 1 and 0 <= figures["weight/lost"] < 1
    assert "the log-probabilities of the rollout are only a truncated weight here" in caplog.text
    assert "seconds/rescoring" in result(run)
    assert any(float(value.abs().max()) > 0 for name, value in weights(run).items() if "lora_B" in name)


def test_what_a_rollout_deviates_by_is_a_warning_with_the_share_that_counts(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    run = learn(runs, *ONE, *LOSSY, "task.clip_low=1e-6", "task.clip_high=1e-6")
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.getMessage().startswith("probe: ")]
    assert "the rollout moves log-probabilities by" in said and "of the steps effective" in said
    assert any("of the steps effective" in line for line in section(run, "probe"))


def test_weights_that_leave_few_steps_are_told_once_with_a_power_that_keeps_half(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """A walk whose every step but the first is the first one's is far from what training computes."""
    far = ("+acceleration.rollout.diffusers_cache.policy_params.threshold=1000", "rollout.sampler.eta=0.05", "train.epochs=2")
    run = learn(runs, *ONE, LOSSY[0], *far, "acceleration.probe=false")
    (said,) = [r.getMessage() for r in caplog.records if "of the steps effective" in r.getMessage()]
    assert "would keep half" in said and float(curves(run)[0]["weight/ess"]) < 0.5
    assert "acceleration.probe=false leaves it unmeasured" in (run / "plan.txt").read_text()
    power = said.split("task.power=")[1].split(",")[0]
    run = learn(runs, *ONE, LOSSY[0], *far, "acceleration.probe=false", f"task.power={power}", "resume=none", "run_id=kept")
    assert float(curves(run)[0]["weight/ess"]) > 0.4


def test_from_exact_rollouts_it_learns_what_grpo_does_bit_for_bit(runs: Runs) -> None:
    runs_of = {task: learn(runs, f"task={task}", *BLIND, "train.epochs=2") for task in ("grpo", "grpo_rescored")}
    plain, again = (weights(run) for run in runs_of.values())
    assert plain.keys() == again.keys() and all(torch.equal(value, again[name]) for name, value in plain.items())
    rows = curves(runs_of["grpo_rescored"])
    assert all((row["weight/nats_max"], row["weight/ess"], row["weight/mean"]) == ("0.0", "1.0", "1.0") for row in rows)
    plan = (runs_of["grpo_rescored"] / "plan.txt").read_text()
    assert "coupled, re-reads log probs and computes them once more" in plan


@pytest.mark.slow
def test_sampled_in_other_batches_than_it_is_trained_in_the_ratio_is_one_all_the_same(runs: Runs, coarse: None) -> None:
    other = ("train.epochs=1", "train.batch_size=2", "rollout.batch_size=8", *BLIND)
    exact, plain = (curves(learn(runs, f"task={task}", *other))[0] for task in ("grpo_rescored", "grpo"))
    assert float(exact["ratio_off_first"]) == 0.0 < float(plain["ratio_off_first"])
    assert 0 < float(exact["weight/nats_max"]) < 0.1 and float(exact["weight/ess"]) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_two_passes_compare_with_the_log_probabilities_of_before_the_first(runs: Runs) -> None:
    run = learn(runs, *ONE, *LOSSY, "rollout.inner_epochs=2", "rollout.updates=1", "rollout.batch_size=8", "train.batch_size=8")
    figures = curves(run)[0]
    assert float(figures["ratio_off_first"]) == 0.0 < float(figures["ratio_off_max"])


def test_the_floor_of_rounding_stands_in_the_plan_with_a_wider_clip_where_it_is_higher(
    runs: Runs, coarse: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    fine = ("task=grpo", *STEPS, "train.batch_size=2", "rollout.batch_size=8")
    narrow = ("task.clip_low=1e-7", "task.clip_high=1e-7")
    assert cli.main([*SMALL, *GROUPS, NEAREST, *fine, *narrow, "dry_run=true"]) == 0
    told = capsys.readouterr().out
    assert "the clip leaves the ratio 1e-07, 0.000307 nats of a picture's likelihood" in told  # 3 x 32 x 32 latents
    assert "the probe measures it once weights are there" in told
    run = learn(runs, *fine, *narrow)
    floor, warning = section(run, "probe")
    measured = next(float(row["probe/floor_log_prob_max"]) for row in rows(run) if row["step"] == "0")
    assert measured > 1e-7 and f"up to {measured:.2g}, likelihoods by up to {3072 * measured:.2g} nats" in floor
    assert "more than the clip's 1e-07" in warning and "a range of" in warning and warning in caplog.text
    wide = section(learn(runs, *fine, "task.clip_low=1e-3", "task.clip_high=1e-3", "resume=none", "run_id=wide"), "probe")
    assert wide == [floor]


def test_the_unnormalised_form_has_its_nats_from_step_to_step(runs: Runs, capsys: pytest.CaptureFixture) -> None:
    cps = ("rollout.sampler.dynamics=cps", "rollout.sampler.eta=1", "rollout.sampler.log_prob=unnormalized")
    assert cli.main([*SMALL, *GROUPS, NEAREST, "task=grpo", *cps, "dry_run=true"]) == 0
    # std = sigma_next, at 3/4, 1/2 and 1/4: D / (2 std^2) per unit of log-probability
    least, most = (3072 / (2 * std**2) * 1e-4 for std in (0.75, 0.25))
    assert f"the clip leaves the ratio 0.0001, {least:.3g} to {most:.3g} nats" in capsys.readouterr().out
