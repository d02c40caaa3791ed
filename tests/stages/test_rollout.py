"""Runs that learn from rollouts: what they leave, how they go on, and that what samples is what is trained."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrun import cli
from flowrun.stages.learner import Learner
from flowrun.stages.roller import Roller
from tests.conftest import SMALL, Runs, result

NEAREST = "reward.nearest.weight=0"
CAPTIONS = "data.captions=[red apple,green apple,pear,lemon,banana,peach]"
GROUPS = (
    CAPTIONS, "reward=[red,nearest]", "adapter=lora", "train.steps=null", "train.epochs=3", "train.batch_size=4",
    "rollout.prompts_per_epoch=2", "rollout.group_size=4", "rollout.batch_size=4", "rollout.sampler.steps=4",
    "rollout.sampler.window.size=2", "sample.every=4", "sample.prompts=[pear,lemon]", "sample.steps=2", "sample.guidance=1",
    "optimizer.lr=0.01", "optimizer.warmup_steps=0",
)  # fmt: skip
LOSSY = ("acceleration/rollout=[diffusers_cache]", "+acceleration.rollout.diffusers_cache.policy_params.threshold=0.5")
BLIND = ("sample.prompts=[]", "rollout.hold_out=false")  # nothing is drawn beside the rollouts


def rows(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def curves(run: Path) -> list[dict[str, str]]:
    """Everything but times and memory, as text: equal text is equal bits."""
    changing = ("seconds", "memory", "rollout_share", "diffusers_cache/seconds")
    kept = [{k: v for k, v in row.items() if not k.startswith(changing)} for row in rows(run)]
    return [row for row in kept if row["loss"]]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "pytorch_lora_weights.safetensors")


def test_rows_of_two_sizes_are_refused_with_both(runs: Runs, capsys: pytest.CaptureFixture) -> None:
    table = runs.folder / "prompts.csv"
    table.write_text("prompt,height,width\na,32,64\nb,32,64\nc,32,32\n")  # the larger size first
    sizes = ("data=prompts", f"data.path={table}", "data.columns.height=height", "data.columns.width=width", *BLIND)
    words = [word for word in (*SMALL, *GROUPS, "task=grpo", "reward=[red]", *sizes) if not word.startswith("data.captions")]
    assert cli.main(words) == 2
    assert "32x32 pixels and 64x32 pixels among them" in capsys.readouterr().err


def learn(runs: Runs, *overrides: str, code: int = 0) -> Path | None:
    runs(*GROUPS, NEAREST, *overrides, code=code)
    return runs.newest("rollout")


def test_grpo_leaves_curves_pictures_and_an_adapter(runs: Runs) -> None:
    run = learn(runs, "task=grpo")
    assert [row["step"] for row in rows(run)] == ["0", "2", "4", "6"]
    first, last = curves(run)[0], curves(run)[-1]
    assert float(first["ratio_off_first"]) == 0.0  # sampled and trained in equal batches: equal to the last bit
    assert 0 < float(last["ratio_off_max"]) < 1
    assert 0 < float(first["reward/red/group_std"]) < 1 and first["dead_groups"] == "0.0"
    told = result(run)
    assert (told["status"], told["stage"], told["steps"], told["pictures"]) == ("finished", "rollout", 6, 24)
    assert {"samples/red", "samples/nearest", "samples/best/red"} <= set(told)
    for name in ("samples/step-000000.png", "samples/step-000006.png", "rollouts/epoch-000001.png", "plan.txt", "config.yaml"):
        assert (run / name).is_file(), name
    assert any(float(value.abs().max()) > 0 for name, value in weights(run).items() if "lora_B" in name)
    plan = (run / "plan.txt").read_text()
    assert "cache then rollout" in plan and "2 rows held out" in plan and "nearest (measured only)" in plan


def test_nft_samples_with_the_old_policy_and_learns(runs: Runs) -> None:
    run = learn(runs, "task=nft", "task.old.decay=0.5")
    assert float(curves(run)[-1]["old_distance"]) > 0 and "ratio" not in curves(run)[-1]
    assert any(float(value.abs().max()) > 0 for name, value in weights(run).items() if "lora_B" in name)


def at_update(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C in update `step`."""
    original = Learner.update

    def interrupted(self: Learner, at: int, *rest: object) -> dict[str, float]:
        if at == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, at, *rest)

    monkeypatch.setattr(Learner, "update", interrupted)


def at_chunk(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C while an epoch is sampled."""
    original = Roller.roll

    def interrupted(self: Roller, number: int, *rest: object) -> object:
        if number == epoch:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, number, *rest)

    monkeypatch.setattr(Roller, "roll", interrupted)


@pytest.mark.parametrize(
    "changes",
    [
        ("task=grpo", "task.kl_weight=0.1", "rollout.reference=snapshot", "rollout.reference_every=2", "optimizer.ema=0.9"),
        ("task=grpo_rescored", *LOSSY, "rollout.sampler.steps=8"),
        pytest.param(("task=nft", "task.old.decay=0.5", "task.kl_weight=0.1", "rollout.reference=start"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("disturb, reached", [((at_update, 2), 4), ((at_chunk, 1), 2)])
@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, changes: tuple, disturb: tuple, reached: int
) -> None:
    whole = learn(runs, *changes, "run_id=whole", *BLIND)
    with monkeypatch.context() as patch:
        disturb[0](disturb[1], patch)
        broken = learn(runs, *changes, "run_id=broken", *BLIND, "resume=none", code=130)
    assert result(broken)["status"] == "stopped" and (broken / "checkpoints" / f"step-{reached:06d}").is_dir()
    resumed = learn(runs, *changes, *BLIND)
    assert resumed == broken
    assert curves(resumed) == curves(whole)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())


@pytest.mark.parametrize("reference", ["base", "start", "snapshot", "ema"])
@pytest.mark.slow
def test_each_reference_is_the_policy_that_it_names(runs: Runs, reference: str) -> None:
    """At the first update every reference is the trained policy, so the distance is 0; afterwards it is not, but for an adapter
    that began as nothing base and start stay one and the same."""
    held = ("task=grpo", "task.kl_weight=1", "optimizer.ema=0.9", "rollout.updates=1", "rollout.batch_size=8", "train.batch_size=8",
            "train.epochs=2", *BLIND)  # fmt: skip
    run = learn(runs, *held, f"rollout.reference={reference}")
    first, second = (float(row["kl"]) for row in curves(run))
    assert first == 0.0
    assert (second == 0.0) == (reference == "ema")  # one update old: an average takes the first weights whole
    if reference == "start":
        base = learn(runs, *held, "rollout.reference=base", "resume=none", "run_id=base")
        assert float(curves(base)[1]["kl"]) == pytest.approx(second, rel=1e-4)


@pytest.mark.slow
def test_guided_rollouts_cache_the_empty_caption_and_train_the_guided_velocity(runs: Runs) -> None:
    run = learn(runs, "task=grpo", "rollout.sampler.guidance=2", "train.epochs=1", *BLIND)
    assert float(curves(run)[0]["ratio_off_first"]) == 0.0
    assert "negative_text" in (run / "plan.txt").read_text()


@pytest.mark.slow
def test_whole_weights_learn_too(runs: Runs) -> None:
    run = learn(runs, "task=nft", "adapter=none", "train.epochs=1", *BLIND)
    assert (run / "model" / "transformer" / "config.json").is_file()


def test_a_falling_reward_ends_the_run_with_the_weights_before_the_fall(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrun.stages.evaluation import Evaluation

    means = iter((0.9, 0.8, 0.1))
    monkeypatch.setattr(Evaluation, "scores", lambda self, drawn: {"samples/red": 0.0, "samples/nearest": next(means)})
    run = learn(runs, "task=grpo", "rollout.stop.fall={nearest: 0.2}", "sample.every=2", "train.checkpoint_every=2", "train.epochs=4")
    told = result(run)
    assert told["steps"] == 4 and told["stopped_by"] == "nearest of the samples fell from 0.9 to 0.1, by more than 0.2"
    checkpoint = load_file(run / "checkpoints" / "step-000002" / "trained.safetensors")
    average = load_file(run / "checkpoints" / "step-000002" / "average.safetensors")
    assert checkpoint.keys() and len(average) == len(checkpoint)
    saved = weights(run)
    for (name, _), value in zip(checkpoint.items(), [average[str(i)] for i in range(len(average))], strict=False):
        assert name.split(".")[0] == "transformer" and value.shape
    assert sorted(float(v.double().sum()) for v in saved.values()) == pytest.approx(
        sorted(float(v.double().sum()) for v in average.values()), abs=1e-6
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        (("task=grpo", "reward=[]"), ["reward", "chooses none", "reward=[red]"]),
        (("task=sft_split", "train.epochs=1"), ["reward", "learns from data"]),
        (("task=grpo", "rollout.sampler.dynamics=ode", "rollout.sampler.eta=0"), ["rollout.sampler.dynamics", "no log-probabilities"]),
        (("task=grpo", "rollout.sampler.dynamics=ode"), ["rollout.sampler.eta", "injects no noise"]),
        (("task=grpo", "rollout.batch_size=6"), ["rollout", "do not divide", "rollout.batch_size=4 or 8"]),
        (("task=grpo", "rollout.prompts_per_epoch=5", "rollout.batch_size=20"), ["rollout.prompts_per_epoch", "4 rows", "held out"]),
        (("task=grpo", "train.accumulate=2"), ["train.accumulate", "rollout.updates"]),
        (("task=grpo", "train.remainder=drop"), ["train.remainder: is drop", "set it to short"]),
        (("task=grpo", "adapter.dropout=0.1"), ["adapter.dropout", "ratio"]),
        (("task=grpo", "stage=train"), ["stage", "stage=rollout"]),
        (("task=sft_split", "reward=[]", "train.epochs=1"), ["rollout.prompts_per_epoch, rollout.group_size, rollout.batch_size, rollout.",
                                                             "are set, but task=sft_split learns from data", "e.g. task=grpo"]),
        (("task=grpo", "train.epochs=null", "train.steps=5"), ["train.steps", "4 or 6"]),
        (("task=grpo", "rollout.stop.kl=1"), ["rollout.stop.kl", "task.kl_weight"]),
        (("task=grpo", "rollout.stop.fall={blue: 0.1}"), ["rollout.stop.fall.blue", "red, nearest"]),
        (("task=grpo", "rollout.sampler.window.size=4"), ["rollout.sampler.window.size", "at most 3"]),
        (("task=grpo", "rollout.gruop_size=4"), ["rollout.gruop_size", "group_size"]),
        (("task=grpo", "adapter.lora_base_model=[text_encoder]"), ["adapter.lora_base_model", "no denoiser"]),
        (("task=grpo", "task.kl_weight=1", "rollout.reference=ema", "optimizer.ema=0"), ["rollout.reference", "optimizer.ema"]),
    ],
)
def test_mistakes_are_named_before_anything_starts(runs: Runs, capsys: pytest.CaptureFixture, changes: tuple, said: list[str]) -> None:
    assert cli.main([*SMALL, *GROUPS, *changes]) == 2
    line = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flowrun: ")][-1]
    assert all(part in line for part in said), line
    assert not (runs.folder / "outputs" / "runs").exists()
