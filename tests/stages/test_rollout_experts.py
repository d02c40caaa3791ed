"""Learning from rewards where two experts share the noise levels.   pytest tests/stages/test_rollout_experts.py"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowrun.config import ConfigError
from flowrun.dist import make_dist
from flowrun.families import EPOCH
from flowrun.random_data import videos
from flowrun.run import Assembly, assemble
from flowrun.stages.build import build_learning


def assembled(task: str, trained: str, *more: str) -> Assembly:
    """The boundary of wan2_2_tiny lies at 0.875; its six steps ask for 1, 0.94, 0.86, 0.76, 0.62, 0.43."""
    data = ("data=video", f"data.path={videos()}", "sample.prompts=[]", *EPOCH, "rollout.sampler.steps=6")
    return assemble(["model=wan2_2_tiny", f"task={task}", f"task.trainable_models=[{trained}]", *data, *more])


@pytest.mark.parametrize(
    ("task", "trained", "asked", "more"),
    [
        ("grpo", "transformer", "from 0.875 to 1 alone, and this task learns from levels of 0.43", ["rollout.sampler.window.size=1"]),
        ("grpo", "transformer_2", "learns from levels of 0.4322 to 1", ["rollout.sampler.window.size=1"]),
        ("nft", "transformer", "learns from levels of 0.4322 to 1", []),
        ("nft", "transformer_2", "learns from levels of 0.2 to 0.9", ["task.times=uniform", "task.least=0.2", "task.greatest=0.9"]),
    ],
)
def test_one_expert_is_not_trained_at_the_levels_of_the_other(task: str, trained: str, asked: str, more: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^task.trainable_models: transformer") as error:
        assembled(task, trained, *more)
    assert asked in str(error.value) and "train transformer and transformer_2, or keep to its levels by" in error.value.fix


@pytest.mark.parametrize(
    ("task", "trained", "more"),
    [
        ("grpo", "transformer", ["rollout.sampler.window.last=1", "rollout.sampler.window.size=1"]),
        ("grpo", "transformer_2", ["rollout.sampler.window.first=2", "rollout.sampler.window.size=1"]),
        ("nft", "transformer", ["task.least=0.875"]),
        ("nft", "transformer_2", ["task.greatest=0.87"]),
    ],
)
def test_at_its_own_levels_it_is(tmp_path: Path, task: str, trained: str, more: list[str]) -> None:
    made = assembled(task, trained, *more)
    learning = build_learning(made, make_dist(made.run.precision), tmp_path, None)
    before = {name: p.detach().clone() for name, p in learning.updates.parameters.items()}
    learning.run()
    after = learning.updates.parameters
    assert {name.split(".")[0] for name in after} == {trained}
    assert not all(torch.equal(before[name], after[name]) for name in after)
