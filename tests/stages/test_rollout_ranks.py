"""Two ranks sample, score and learn what one process does.   pytest tests/stages/test_rollout_ranks.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrun import cli
from tests.conftest import SMALL
from tests.ranks import launch
from tests.stages.test_rollout import BLIND, GROUPS, LOSSY, NEAREST, curves

pytestmark = pytest.mark.slow

COMMON = (*SMALL, *GROUPS, NEAREST, *BLIND, "resume=none")
TASKS = {
    "grpo": ("task=grpo", "task.kl_weight=0.1", "rollout.reference=base"),
    "rescored": ("task=grpo_rescored", *LOSSY, "rollout.sampler.steps=8"),
    "nft": ("task=nft", "task.old.decay=0.5", "task.levels=1"),
    "whole": ("task=grpo", "adapter=none", "rollout.reference=start", "task.kl_weight=0.1"),
}
EQUAL = ("rollout.updates=1", "rollout.sampler.window.size=1")  # two losses an update: a sum of two is the same in either order


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rollout_ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, words in TASKS.items():
            assert cli.main([*COMMON, *words, *EQUAL, f"run_id={name}"]) == 0
        assert cli.main([*COMMON, *TASKS["grpo"], *EQUAL, "rollout.prompts_per_epoch=4", "train.epochs=2", "run_id=sums"]) == 0
    commands = [{"name": f"{name}2", "words": [*COMMON, *words, *EQUAL, "processes=2", f"run_id={name}2"]} for name, words in TASKS.items()]
    sums = [*COMMON, *TASKS["grpo"], *EQUAL, "rollout.prompts_per_epoch=4", "train.epochs=2", "processes=2", "run_id=sums2"]
    told = launch(folder, [*commands, {"name": "sums2", "words": sums}])
    assert all(one.codes == [0, 0] for one in told.values()), told
    yield folder


def run(folder: Path, name: str) -> Path:
    (found,) = (folder / "outputs" / "runs" / "rollout").glob(f"*/{name}")
    return found


def trained(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(sorted((run(folder, name) / "checkpoints").glob("step-*"))[-1] / "trained.safetensors")


@pytest.mark.parametrize("name", TASKS)
def test_equal_micro_batches_give_equal_samples_rewards_and_weights_bit_for_bit(work: Path, name: str) -> None:
    alone, both = curves(run(work, name)), curves(run(work, f"{name}2"))
    assert [row["reward/red"] for row in alone] == [row["reward/red"] for row in both]
    one, two = trained(work, name), trained(work, f"{name}2")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    figures = [[row.get("weight/ess") for row in of] for of in (alone, both)]
    assert figures[0] == figures[1] and (name == "rescored") == any(value not in (None, "1.0") for value in figures[0])
    moved = [key for key in one if float(one[key].abs().max()) > 0]
    assert moved


def test_sums_in_another_order_agree_but_for_rounding(work: Path) -> None:
    one, two = trained(work, "sums"), trained(work, "sums2")
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-5
    first = [curves(run(work, name))[0]["reward/red"] for name in ("sums", "sums2")]
    assert first[0] == first[1]
