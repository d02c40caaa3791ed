"""What result.json says of a run's speed, of its accelerators and of its rewards, held against metrics.csv."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from statistics import median

import pytest

from flowrun.stages.pace import Pace
from tests.conftest import Runs, result
from tests.stages.test_rollout import learn

CACHED = ("task=nft", "acceleration/rollout=[diffusers_cache]", "+acceleration.rollout.diffusers_cache.policy_params.threshold=0.5",
          "acceleration.bound=0.02", "rollout.sampler.steps=8", "reward.red.weight=2", "train.epochs=3")  # fmt: skip


def rows(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_first_one_counts_only_where_it_is_alone() -> None:
    pace = Pace()
    assert pace.figures("step") == {"s_per_step": 0.0, "warmup_s": 0.0}
    pace.began = time.perf_counter() - 10  # what comes before the first step belongs to the warm-up
    pace.add(4.0)
    assert pace.figures("step") == {"s_per_step": 4.0, "warmup_s": pytest.approx(6.0, abs=0.5)}
    for seconds in (1.0, 9.0, 1.5):  # one of them was disturbed
        pace.add(seconds)
    assert pace.figures("epoch") == {"s_per_epoch": 1.5, "warmup_s": pytest.approx(8.5, abs=0.5)}


def test_a_training_run_says_what_a_step_takes_without_the_first(runs: Runs) -> None:
    run = runs("train.steps=4")
    seconds = [float(row["s_per_step"]) for row in rows(run)]
    found = result(run)
    assert found["s_per_step"] == pytest.approx(median(seconds[1:])) and found["warmup_s"] > 0 and found["memory_gb"] > 0


def test_a_decoupled_run_says_what_an_epoch_takes_what_its_cache_did_and_how_far_walks_end_from_exact_ones(runs: Runs) -> None:
    run = learn(runs, *CACHED)
    found, curve = result(run), [row for row in rows(run) if row["loss"]]
    phases = [[float(row[f"seconds/{phase}"]) for phase in ("rollout", "reward", "update")] for row in curve]
    assert found["s_per_epoch"] == pytest.approx(median([sum(one) for one in phases[1:]]))
    assert found["s_per_rollout_step"] == pytest.approx(median([one[0] for one in phases[1:]]) / (2 * 8)), "two walks of eight steps"
    for name in ("hits", "skipped"):
        assert found[f"diffusers_cache/{name}"] == float(curve[-1][f"diffusers_cache/{name}"]) > 0
    first = rows(run)[0]
    assert found["paradigm"] == "decoupled" and found["deviation_of"] == "final latents" and "clip_range" not in found
    assert found["deviation_max"] == float(first["probe/final_max"]) >= found["deviation_p99"] == float(first["probe/final_p99"]) > 0
    assert found["deviation_bound"] == 0.02
    assert found["reward"] == pytest.approx(2 * found["reward/red"]) and found["samples_reward"] == pytest.approx(2 * found["samples/red"])


@pytest.mark.slow
def test_a_coupled_run_is_held_to_a_tenth_of_its_clip_range_beyond_rounding(runs: Runs) -> None:
    math = ("acceleration/shared=[attention_backend]", "acceleration.shared.attention_backend.backend=_native_math")
    run = learn(runs, "task=grpo", "task.clip_low=2e-3", "task.clip_high=2e-3", "train.epochs=1", *math)
    found, first = result(run), rows(run)[0]
    assert found["paradigm"] == "coupled" and found["deviation_of"] == "log-probabilities"
    assert found["clip_range"] == 2e-3 and found["deviation_bound"] == pytest.approx(2e-4)
    assert found["deviation_max"] == max(0.0, float(first["probe/log_prob_max"]) - float(first["probe/floor_log_prob_max"]))
    assert float(first["probe/final_max"]) > 0, "walks by another kernel are held against those by none"


@pytest.mark.slow
def test_a_run_without_the_probe_says_nothing_of_deviations(runs: Runs) -> None:
    found = result(learn(runs, "task=nft", "acceleration.probe=false", "train.epochs=1"))
    assert not [name for name in found if name.startswith("deviation")] and found["s_per_epoch"] > 0
