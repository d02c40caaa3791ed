"""Accelerators in rollouts: what is refused by its marker, what is found by measuring, and what a lossy one does to the ratio."""

from __future__ import annotations

import logging

import pytest

from flowrun import cli
from flowrun.accelerators.diffusers_cache import DiffusersCache
from flowrun.compose import compose
from flowrun.stages.probe import Deviation, Spread, judged
from flowrun.stages.rollout import Learning
from tests.conftest import SMALL, Runs
from tests.stages.test_rollout import BLIND, CAPTIONS, GROUPS, NEAREST, curves, learn

STEPS = (*BLIND, "train.epochs=1", "rollout.sampler.steps=8", "rollout.sampler.window.size=4")


class Liar(DiffusersCache):
    """A lossy accelerator whose marker says otherwise."""

    safety = "lossless"


ENTRY = f"acceleration.rollout={{name: '{__name__}:Liar', params: {{policy: first_block, policy_params: {{threshold: 0.5}}}}}}"
FINE = ("task.clip_low=2e-5", "task.clip_high=2e-5")


def deviation(greatest: float) -> Deviation:
    none = Spread(0.0, 0.0)
    return Deviation(Spread(greatest, greatest), none, none)


@pytest.mark.parametrize(
    "found, floor, said",
    [
        (0.0, 0.0, ("", "")),
        (5e-6, 0.0, ("", "")),
        (2e-5, 0.0, ("", "more than a tenth")),
        (2e-4, 0.0, ("moves log-probabilities by 0.0002", "")),
        (3e-4, 2.5e-4, ("", "rounding alone")),
        (4e-4, 2.5e-4, ("moves log-probabilities", "")),
    ],
)
def test_the_excess_over_rounding_is_judged_by_the_clip(found: float, floor: float, said: tuple[str, str]) -> None:
    answer = judged(deviation(found), deviation(floor), 1e-4)
    assert all(part in text if part else not text for part, text in zip(said, answer, strict=True)), answer


def test_a_lossy_cache_is_refused_for_grpo_by_its_marker(runs: Runs, capsys: pytest.CaptureFixture) -> None:
    assert cli.main([*SMALL, *GROUPS, NEAREST, *STEPS, "task=grpo", "acceleration/rollout=[diffusers_cache]"]) == 2
    assert "biases the importance ratio" in capsys.readouterr().err


def test_a_marker_that_lies_is_found_by_the_probe(runs: Runs, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the probe the same run learns from a ratio that is wrong by far more than rounding, with hits in the cache."""
    learn(runs, *STEPS, "task=grpo", *FINE, ENTRY, code=2)
    said = capsys.readouterr().err
    assert "acceleration: Liar moves log-probabilities by" in said
    run = learn(runs, *STEPS, "task=grpo", *FINE, ENTRY, "acceleration.probe=false", "run_id=biased", "resume=none")
    biased = curves(run)[0]
    assert float(biased["Liar/hits"]) > 0
    plain = curves(learn(runs, *STEPS, "task=grpo", *FINE, "run_id=plain", "resume=none"))[0]
    exact = max(float(plain["ratio_off_first"]), 1e-7)
    assert float(biased["ratio_off_first"]) > 10 * exact and float(biased["ratio_off_first"]) > 2e-5


@pytest.mark.slow
def test_the_cache_as_it_is_shipped_biases_the_ratio_and_is_caught_twice(runs: Runs, capsys: pytest.CaptureFixture) -> None:
    """After some training a network changes slowly from step to step, as published ones do, and nothing is loosened: neither the
    cache's threshold nor the clip. Batches of two out of chunks of four, so that there is rounding to compare with."""
    shipped = compose(["acceleration/rollout=[diffusers_cache]"]).acceleration.rollout["diffusers_cache"]
    assert shipped["policy"] == "first_block" and not any(shipped["policy_params"].values())
    base = runs(CAPTIONS, "train.steps=600", "train.batch_size=6", "optimizer.lr=3e-3", "train.log_every=1000")
    words = (*BLIND, f"model.weights={base}", "task=grpo", "train.epochs=1", "train.batch_size=2", "rollout.sampler.steps=50",
             "rollout.sampler.window.kind=all", "resume=none")  # fmt: skip
    assert cli.main([*SMALL, *GROUPS, NEAREST, *words, "acceleration/rollout=[diffusers_cache]"]) == 2
    assert "biases the importance ratio" in capsys.readouterr().err
    lying = f"acceleration.rollout={{name: '{__name__}:Liar', params: {{policy: first_block, policy_params: {{}}}}}}"
    learn(runs, *words, lying, code=2)
    assert "acceleration: Liar moves log-probabilities by" in capsys.readouterr().err
    found = curves(learn(runs, *words, lying, "acceleration.probe=false"))[0]
    plain = curves(learn(runs, *words, "acceleration.probe=false"))[0]
    biased, exact = float(found["ratio_off_first"]), float(plain["ratio_off_first"])
    assert float(found["Liar/hits"]) > 0 and "Liar/hits" not in plain
    assert exact < 1e-5 and biased > 10 * exact and biased > compose(["task=grpo", "reward=[red]"]).task["clip_high"]


@pytest.mark.slow
def test_a_decoupled_algorithm_learns_from_cached_rollouts_and_reports_them(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loose = "acceleration.rollout.diffusers_cache.policy_params.threshold=0.5"
    run = learn(runs, *STEPS, "task=nft", "acceleration/rollout=[diffusers_cache]", loose)
    figures = curves(run)[0]
    assert float(figures["diffusers_cache/hits"]) > 0 and float(figures["diffusers_cache/skipped"]) > 0
    assert "accelerated walks end up to" in caplog.text and "watch the rewards" in (run / "flowrun.log").read_text() + caplog.text


@pytest.mark.slow
def test_shared_accelerators_stand_in_rollout_and_training_alike(runs: Runs) -> None:
    math = ("acceleration/shared=[attention_backend]", "acceleration.shared.attention_backend.backend=_native_math")
    run = learn(runs, *STEPS, "task=grpo", *math)
    assert float(curves(run)[0]["ratio_off_first"]) == 0.0


@pytest.mark.slow
def test_a_probe_changes_nothing_of_the_run(runs: Runs) -> None:
    one, two = (learn(runs, *STEPS, "task=grpo", f"acceleration.probe={on}", f"run_id={on}", "resume=none") for on in ("true", "false"))
    kept = [[{k: v for k, v in row.items() if not k.startswith("probe")} for row in curves(run)] for run in (one, two)]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_an_epoch_is_learned_without_what_rollouts_are_accelerated_by(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is off while weights are updated: a hooked network would reuse what it computed for other weights."""
    on: list[bool] = []
    original = Learning._learn

    def watched(self: Learning, *rest: object) -> dict[str, float]:
        on.append(self.updates.pipeline.models["transformer"].is_cache_enabled)
        return original(self, *rest)

    monkeypatch.setattr(Learning, "_learn", watched)
    learn(runs, *STEPS, "task=nft", "acceleration/rollout=[diffusers_cache]")
    assert on == [False]
