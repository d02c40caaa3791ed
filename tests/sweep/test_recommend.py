"""What a sweep recommends, from tables written by hand."""

from __future__ import annotations

import pytest

from flowrun.config import Best
from flowrun.sweep.recommend import of_accelerations, of_figure, points, recommended
from flowrun.sweep.settings import Figure, Setting, accelerators, compared, figure_of, is_acceleration, swept
from flowrun.sweep.table import Row

CACHE, COMPILE = "acceleration/rollout", "acceleration/shared"


def row(
    job: int,
    cache: str,
    compile: str,
    seconds: float,
    deviation: float | None = None,
    bound: float = 0.1,
    seed: int = 0,
    status: str = "ok",
) -> Row:
    measured = {} if deviation is None else {
        "result.deviation_max": str(deviation), "result.deviation_p99": str(deviation / 2), "result.deviation_bound": str(bound),
        "result.deviation_of": "final latents",
    }  # fmt: skip
    return {"job": str(job), CACHE: cache, COMPILE: compile, "seed": str(seed), "status": status, "directory": "",
            "result.s_per_epoch": str(seconds), "result.warmup_s": "7", **measured}  # fmt: skip


FOUR = [row(0, "[]", "[]", 2.0, 0.0), row(1, "[diffusers_cache]", "[]", 1.2, 0.5), row(2, "[]", "[torch_compile]", 1.5, 0.01),
        row(3, "[diffusers_cache]", "[torch_compile]", 0.9, 0.6)]  # fmt: skip


def told(rows: list[Row]) -> str:
    return "\n".join(of_accelerations(compared(rows)))


def test_the_fastest_within_its_bound_is_recommended_and_faster_ones_are_named_with_why_not() -> None:
    text = told(FOUR)
    assert text.startswith(
        "recommended: torch_compile: 1.5 s an epoch after a warm-up of 7 s, 1.33 times as fast as with none; "
    )
    assert "final latents deviate by up to 0.01, and may by 0.1" in text
    assert f"  '{CACHE}=[]' '{COMPILE}=[torch_compile]'" in text
    assert (
        "not within its bound: diffusers_cache + torch_compile: 0.9 s" in text
        and "not within its bound: diffusers_cache: 1.2 s" in text
    )


def test_a_bound_is_kept_when_it_is_just_reached() -> None:
    assert recommended(points(compared([row(0, "[]", "[]", 2.0, 0.0), row(1, "[a]", "[]", 1.0, 0.1)]))).label == "a"
    assert (
        recommended(points(compared([row(0, "[]", "[]", 2.0, 0.0), row(1, "[a]", "[]", 1.0, 0.1000001)]))).label
        == "none"
    )


def test_nothing_is_recommended_when_every_setting_deviates_by_too_much() -> None:
    text = told([row(0, "[a]", "[]", 2.0, 0.3), row(1, "[b]", "[]", 1.0, 0.2)])
    assert text.startswith("recommended: nothing, for every setting deviates by more than it may; the least is b")


def test_without_a_measured_deviation_nothing_is_recommended_and_the_fastest_is_told() -> None:
    text = told([row(0, "[]", "[]", 2.0), row(1, "[a]", "[]", 1.0)])
    assert text.startswith("recommended: nothing, for no deviation was measured; acceleration.probe")
    assert "the fastest is a: 1 s an epoch" in text


def test_what_was_not_measured_is_never_recommended() -> None:
    text = told([row(0, "[]", "[]", 2.0, 0.0), row(1, "[a]", "[]", 1.0)])
    assert text.startswith("recommended: none") and text.endswith("not measured: a")


def test_jobs_that_have_not_ended_well_do_not_count() -> None:
    assert told([row(0, "[]", "[]", 2.0, 0.0), row(1, "[a]", "[]", 1.0, 0.0, status="stopped")]).startswith(
        "recommended: none"
    )
    assert told([row(0, "[]", "[]", 2.0, status="failed"), row(1, "[a]", "[]", 1.0, status="failed")]).startswith(
        "recommended: nothing"
    )


def test_seeds_of_one_setting_are_one_point_with_their_best_speed_and_greatest_deviation() -> None:
    rows = [
        row(0, "[]", "[]", 2.0, 0.0),
        row(1, "[]", "[]", 2.2, 0.0, seed=1),
        row(2, "[a]", "[]", 1.0, 0.05),
        row(3, "[a]", "[]", 2.0, 0.2, seed=1),
    ]
    fastest, plain = points(compared(rows))
    assert (fastest.label, fastest.seconds, fastest.deviation, fastest.p99) == ("a", 1.0, 0.2, 0.1)
    assert (plain.label, plain.seconds) == ("none", 2.0) and recommended([fastest, plain]) is plain


def test_speeds_that_may_differ_by_chance_are_said_to() -> None:
    text = told([row(0, "[]", "[]", 1.04, 0.0), row(1, "[a]", "[]", 1.0, 0.0), row(2, "[b]", "[]", 1.06, 0.0)])
    assert text.endswith("within 5 % of its speed, which may be chance: none")


@pytest.mark.parametrize("value, names", [
    ("[]", []),
    ("", []),
    ("[a,b]", ["a", "b"]),
    ("[{name: a, params: {k: 1, more: {threshold: 0.2}, empty: {}}},b]", ["a(k=1, threshold=0.2)", "b"]),
    ("{name: a}", ["a"]),
])  # fmt: skip
def test_accelerators_are_named_as_they_were_chosen(value: str, names: list[str]) -> None:
    assert accelerators(value) == names


def test_a_sweep_of_the_probe_or_its_bound_is_none_of_accelerators() -> None:
    assert is_acceleration(FOUR)
    assert not is_acceleration([{"job": "0", "status": "ok", "acceleration.probe": on} for on in ("true", "false")])
    assert swept(FOUR) == [CACHE, COMPILE]


def other(job: int, lr: str, seed: int, **results: float) -> Row:
    return {
        "job": str(job),
        "lr": lr,
        "seed": str(seed),
        "status": "ok",
        **{f"result.{name}": str(value) for name, value in results.items()},
    }


def test_settings_are_compared_by_the_reward_of_samples_before_that_of_rollouts_before_the_loss() -> None:
    assert figure_of([other(0, "1", 0, loss_mean=1, reward=2, samples_reward=3)]) == Figure(
        "samples_reward", Best.greatest
    )
    assert figure_of([other(0, "1", 0, loss_mean=1, reward=2)]) == Figure("reward", Best.greatest)
    assert figure_of([other(0, "1", 0, loss_mean=1)]) == Figure("loss_mean", Best.least)
    assert figure_of([other(0, "1", 0, memory_gb=1)]) is None
    assert figure_of([other(0, "1", 0, memory_gb=1)], "memory_gb", Best.least) == Figure("memory_gb", Best.least)


def test_the_best_setting_is_the_one_of_the_best_mean_over_seeds() -> None:
    rows = [
        other(0, "1", 0, loss_mean=1.0),
        other(1, "1", 1, loss_mean=3.0),
        other(2, "2", 0, loss_mean=1.4),
        other(3, "2", 1, loss_mean=1.6),
    ]
    settings: list[Setting] = compared(rows)
    assert of_figure(settings, Figure("loss_mean", Best.least)) == [
        "best by least loss_mean: lr=2: loss_mean 1.5, mean of 2 seeds; then lr=1: loss_mean 2"
    ]
    assert of_figure(settings, Figure("loss_mean", Best.greatest))[0].startswith(
        "best by greatest loss_mean: lr=1: loss_mean 2"
    )
    assert of_figure(compared(rows[:2]), Figure("loss_mean", Best.least)) == ["loss_mean 2 +- 1.4 over 2 seeds"]
