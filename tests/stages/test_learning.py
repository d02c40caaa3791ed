"""Rewards rise on prompts and noises that were never sampled to learn from. One seed, a network without training behind it."""

from __future__ import annotations

import pytest

from flowrun.raised import raised
from tests.conftest import Runs
from tests.stages.test_rollout import LOSSY, learn

HELD_OUT = ("sample.prompts=[pear,lemon]", "sample.seeds=[0,1,2,3]", "sample.every=1000", "sample.steps=4")
LONGER = ("train.epochs=15", "rollout.prompts_per_epoch=4", "rollout.batch_size=16", "train.batch_size=16", "rollout.updates=1",
          "rollout.sampler.window.size=3", "train.log_every=1000")  # fmt: skip


CACHED = ("task=grpo_rescored", *LOSSY, "rollout.sampler.steps=8", "rollout.sampler.window.size=3")


@pytest.mark.parametrize(
    "task",
    [("task=grpo",), ("task=nft", "rollout.advantage.clip=2", "task.beta=0.5"), pytest.param(CACHED, marks=pytest.mark.slow)],
)
def test_a_reward_rises_where_nothing_was_sampled(runs: Runs, task: tuple[str, ...]) -> None:
    gain = raised(learn(runs, *LONGER, *HELD_OUT, *task))["red"]
    assert gain.pictures == 8
    assert gain.gain > 3 * gain.error > 0


@pytest.mark.slow
def test_the_other_way_round_it_falls(runs: Runs) -> None:
    gain = raised(learn(runs, *LONGER, *HELD_OUT, "task=grpo", "reward.red.weight=-1"))["red"]
    assert gain.gain < -3 * gain.error < 0
