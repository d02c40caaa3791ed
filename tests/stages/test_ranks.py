"""Two ranks: what they compute is what one process computes, each value is made by one of them, and whatever befalls one
of them ends both with one message. All commands share one launch.   pytest tests/stages/test_ranks.py"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flowrun import cli
from flowrun.cache import Cache
from tests.conftest import result
from tests.ranks import Told, launch
from tests.stages.test_resume import stop_at

pytestmark = pytest.mark.slow

SIZES = [(32, 32)] * 5 + [(48, 32)] * 4  # in batches of two: 3 and 2 batches, 5 an epoch
LONG = "a blue card on a very old and very wide table"
CAPTIONS = ["a red card", "a green card", LONG] * 3
COMMON = (
    "model=emoji_tiny", "data=folder", "data.path=pictures", "data.check=headers", "data.geometry.mode=keep",
    "data.geometry.size=null", "tracker=[csv]", "sample.prompts=[]", "train.log_every=1", "train.batch_size=2",
    "train.checkpoint_every=100", "task.caption_dropout=0.3", "resume=none",
)  # fmt: skip
EPOCHS = ("train.steps=null", "train.epochs=3", "optimizer=sgd", "optimizer.lr=0.05", "optimizer.clip=0.02")
ADAPTER = (
    "train.epochs=1", "adapter=lora", "adapter.lora_base_model=[transformer,text_encoder]", "adapter.targets=all-linear",
    "adapter.dropout=0.1",
)  # fmt: skip
SAMPLES = ("sample.prompts=[a red card,a blue one,a card]", "sample.every=2", "sample.steps=1", "tracker=[csv,tensorboard]")


class Work:
    """A folder with runs of one process and of two, and what the two said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[str, Told] = {}

    def alone(self, name: str, *words: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            return cli.main([*COMMON, *words, f"run_id={name}"])

    def run(self, name: str, stage: str = "train") -> Path:
        (found,) = (self.folder / "outputs" / "runs" / stage).glob(f"*/{name}")
        return found

    def column(self, name: str, key: str) -> list[float]:
        with open(self.run(name) / "metrics.csv", encoding="utf-8") as file:
            return [float(row[key]) for row in csv.DictReader(file)]

    def log(self, name: str, stage: str = "train") -> str:
        return (self.run(name, stage) / "flowrun.log").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    folder = tmp_path_factory.mktemp("ranks")
    for name, spoilt in (("pictures", ()), ("broken", (1, 5))):
        (folder / name).mkdir()
        for i, (size, caption) in enumerate(zip(SIZES, CAPTIONS, strict=True)):
            file = folder / name / f"{i}.png"
            Image.effect_noise(size, 60 + i).convert("RGB").save(file)
            if i in spoilt:
                file.write_bytes(file.read_bytes()[:-300])
            file.with_suffix(".txt").write_text(caption, encoding="utf-8")
    found = Work(folder)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(2, patch)
        assert found.alone("grown", "stage=null", "train.steps=8", "cache.root=own") == 130
    grown = found.run("grown").relative_to(folder)
    commands = [
        {"name": "cached", "words": ["stage=cache"]},
        {"name": "pair", "words": [*EPOCHS, "train.accumulate=2", *SAMPLES]},
        {"name": "adapted", "words": [*EPOCHS, *ADAPTER, "train.accumulate=2"], "disturbance": "idle_parameter"},
        {"name": "few", "words": ["data=emoji", "data.captions=[pear]", "train.steps=2", "train.batch_size=16",
                                   "optimizer.warmup_steps=5"]},
        {"name": "grown2", "words": ["train.steps=8", "cache.root=own", f"resume={grown}"]},
        {"name": "shrunk", "words": ["train.steps=8"], "disturbance": "signal_to_rank_1"},
        {"name": "shrunk_epochs", "words": EPOCHS, "disturbance": "signal_to_rank_1"},
        {"name": "faulty", "words": ["data.path=broken", "cache.root=faulty"]},
        {"name": "done", "words": ["train.steps=8", "cache.root=own", f"resume={grown}"]},
        {"name": "nan", "words": ["train.steps=8", "train.checkpoint_every=2"], "disturbance": "nan_on_rank_1"},
        {"name": "bug", "words": ["train.steps=8"], "disturbance": "bug_on_rank_1"},
    ]
    found.told = launch(folder, [{**c, "words": _merged([*COMMON, *c["words"]])} for c in commands])
    return found


def _merged(words: list[str]) -> list[str]:
    """The last word for each key; with other data than the folder, without the words about it."""
    last = {word.split("=")[0]: word for word in words}
    if last.get("data", "data=folder") == "data=folder":
        return list(last.values())
    return [word for word in last.values() if not word.startswith(("data.path", "data.check", "data.geometry"))]


def test_each_value_is_made_once_and_by_one_rank(work: Work) -> None:
    told = work.told["cached"]
    assert told.codes == [0, 0] and told.lines() == []
    assert Counter(caption for part in told.encoded for caption in part) == dict.fromkeys({*CAPTIONS, ""}, 1)
    assert result(work.run("cached", "cache"))["rows"] == 10  # 9 pictures, and the empty caption once
    cache = Cache(work.folder / "outputs" / "cache")
    assert cache.verify() == []
    assert result(work.run("cached", "cache"))["bytes"] > 9 * 3 * 32 * 32 * 4


def close(work: Work, pair: str, alone: str, weights: str) -> None:
    for key in ("loss", "grad_norm", "lr", "epoch"):
        assert work.column(pair, key) == pytest.approx(work.column(alone, key), rel=2e-4), key
    ours, theirs = (load_file(work.run(name) / "model" / weights) for name in (pair, alone))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-6, rtol=2e-4)


def test_two_ranks_compute_what_one_process_does_with_twice_the_accumulation(work: Work) -> None:
    """15 batches, in two sizes and with short ones: the last of 4 updates has three of them."""
    assert work.told["pair"].codes == [0, 0] and work.told["pair"].lines() == []
    assert work.alone("alone", *EPOCHS, "train.accumulate=4") == 0
    assert len(work.column("alone", "loss")) == 4 and max(work.column("alone", "grad_norm")) > 0.02
    close(work, "pair", "alone", "transformer/diffusion_pytorch_model.safetensors")


def test_the_rate_follows_its_curve_over_the_updates_and_not_over_the_ranks_batches(work: Work) -> None:
    """Warm-up of two updates, then the cosine of two more to the floor, which the last update starts half-way to."""
    lr, floor, warmup, steps = 0.05, 0.03, 2, 4
    cosine = [floor + (1 - floor) * (1 + math.cos(math.pi * (n - warmup) / (steps - warmup))) / 2 for n in range(warmup, steps)]
    assert work.column("pair", "lr") == pytest.approx([0, lr / 2, *(lr * share for share in cosine)])
    assert len(work.column("shrunk", "lr")) == 3, "and it is stopped before the end"
    many = [0, 0.5, *(floor + (1 - floor) * (1 + math.cos(math.pi * (n - 2) / 6)) / 2 for n in range(2, 3))]
    assert work.column("shrunk", "lr") == pytest.approx([1e-3 * share for share in many])


def test_one_log_one_curve_and_samples_once(work: Work) -> None:
    run = work.run("pair")
    assert [path.name for path in work.folder.glob("outputs/runs/train/*/pair*")] == ["pair"]
    assert [path.name for path in run.glob("*.log")] == ["flowrun.log"]
    assert sorted(path.name for path in run.glob("samples/*.png")) == [f"step-{n:06d}.png" for n in (0, 2, 4)]
    for step in (0, 2, 4):  # three prompts: a number that two ranks cannot share evenly
        assert sorted(path.name for path in (run / f"samples/step-{step:06d}").glob("*.png")) == ["000.png", "001.png", "002.png"]
    assert len(list(run.glob("tensorboard/events*"))) == 1
    text = work.log("pair")
    for words in ("flowrun sft_split on emoji_tiny", "samples of step 4:", "trained weights:"):
        assert sum(part.count(words) for part in work.told["pair"].errors) == 1, words
    assert text.count("samples of step 4:") == text.count("trained weights:") == 1
    assert "Warning" not in "".join(work.told["pair"].errors)


def test_gradients_outside_the_wrapper_are_averaged_and_idle_parameters_are_named_once(work: Work) -> None:
    assert work.told["adapted"].codes == [0, 0]
    assert work.alone("adapted_alone", *_merged([*EPOCHS, *ADAPTER, "train.accumulate=4"])) == 0
    close(work, "adapted", "adapted_alone", "pytorch_lora_weights.safetensors")
    (line,) = [line for line in work.log("adapted").splitlines() if "got no gradient" in line]
    assert "transformer.idle" in line and "text_encoder.network.pooler.dense.lora_A" in line
    assert sum(part.count("got no gradient") for part in work.told["adapted"].errors) == 1


def test_a_rank_without_a_row_and_a_batch_larger_than_the_rows(work: Work) -> None:
    assert work.told["few"].codes == [0, 0] and work.told["few"].lines() == []
    assert len(work.column("few", "loss")) == 2 and work.column("few", "epoch") == [2, 4]


def test_what_all_ranks_warn_of_is_said_once(work: Work) -> None:
    assert "".join(work.told["few"].errors).count("the learning rate never reaches optimizer.lr") == 1
    errors = " ".join("".join(work.told["cached"].errors).split())  # whatever the lines are broken at
    assert errors.count("all-MiniLM-L6-v2 takes 8 tokens and 1 of") == 1 and errors.count(f"{LONG!r} has 13") == 1


def test_a_signal_to_one_rank_stops_both_after_the_same_step_and_is_said_once(work: Work) -> None:
    told = work.told["shrunk"]
    assert told.codes == [130, 130]
    assert told.lines() == ["flowrun: stopped after step 3 of 8, which is saved; the same command goes on from there"]
    assert [path.name for path in (work.run("shrunk") / "checkpoints").iterdir()] == ["step-000003"]
    assert result(work.run("shrunk"))["status"] == "stopped"


def test_another_number_of_processes_goes_on_where_the_rows_were(work: Work) -> None:
    """5 batches an epoch: 3 steps of two, then 5 of one; and the other way round."""
    assert work.alone("shrunk", "train.steps=8", f"resume={work.run('shrunk')}") == 0
    assert work.column("shrunk", "epoch") == pytest.approx([0.4, 0.8, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2])
    assert work.told["grown2"].codes == [0, 0]
    assert work.column("grown", "epoch") == pytest.approx([0.2, 0.4, 0.6, 1.0, 1.4, 1.8, 2.2, 2.6])
    assert work.column("shrunk", "lr") == work.column("grown", "lr")
    assert "going on after step 3 of 8" in work.log("grown")


def test_the_epochs_asked_for_are_completed_by_another_number_of_processes(work: Work) -> None:
    """15 batches: 3 steps of two, then 9 of one."""
    assert work.told["shrunk_epochs"].codes == [130, 130]
    assert work.alone("shrunk_epochs", *EPOCHS, f"resume={work.run('shrunk_epochs')}") == 0
    assert work.column("shrunk_epochs", "epoch")[-1] == 3 and len(work.column("shrunk_epochs", "epoch")) == 12
    assert result(work.run("shrunk_epochs"))["steps"] == 12


def test_rows_that_one_rank_cannot_read_end_both_and_are_named_once(work: Work) -> None:
    told = work.told["faulty"]
    assert told.codes == [2, 2]
    assert len(told.lines()) == 1 and "Traceback" not in "".join(told.errors)
    assert all(sum(f"broken/{row}.png" in part for part in told.errors) == 1 for row in (1, 5))
    rows = [row for _, row in Cache(work.folder / "faulty").rows()]
    assert {row.id for row in rows if row.fault} == {"1.png", "5.png"}
    assert list((work.folder / "outputs" / "runs" / "train").glob("*/faulty")) == []


def test_a_mistake_that_the_first_rank_finds_ends_both(work: Work) -> None:
    """Only that one looks at the run to go on with."""
    told = work.told["done"]
    assert told.codes == [2, 2] and "Traceback" not in "".join(told.errors)
    (line,) = told.lines()
    assert "is finished after 8 steps, and 8 are asked for" in line


def test_a_loss_that_is_no_number_on_one_rank_ends_both_with_its_rows(work: Work) -> None:
    told = work.told["nan"]
    assert told.codes == [1, 1] and "Traceback" not in "".join(told.errors)
    (line,) = told.lines()
    assert line.startswith("flowrun: step 3: the loss is nan for ") and ".png" in line
    assert line.endswith("the checkpoint of step 2 is kept")
    found = result(work.run("nan"))
    assert (found["status"], f"flowrun: {found['reason']}") == ("failed", line)


def test_a_bug_on_one_rank_ends_the_other_and_its_traceback_is_in_the_log(work: Work) -> None:
    told = work.told["bug"]
    assert told.codes == [1, 1]
    assert told.lines() == ["flowrun: another process of this run has ended; its own message says why"]
    assert told.errors[1].count("LookupError: a bug of rank 1") == 1
    log = work.log("bug")
    assert "rank 1 ERROR" in log and "LookupError: a bug of rank 1" in log
    assert result(work.run("bug"))["status"] == "failed"
