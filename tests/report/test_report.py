"""The page of a run or a sweep: whole without any other file, and true to what was left behind."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from flowrun.config import ConfigError
from flowrun.report import write
from flowrun.report.__main__ import main
from flowrun.report.curves import draw, panels, running_mean

VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """text: what is shown, without drawings. addresses: of everything that a browser would load. open: tags that are not closed."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source, self.text, self.addresses, self.tags, self.open = file.read_text(encoding="utf-8"), "", [], [], []
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data if "svg" not in self.open else ""

    @property
    def drawings(self) -> list[ElementTree.Element]:
        return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)]


def left(folder: Path, **given: str) -> Path:
    """A run's directory with these files; `result` and `metrics` short for result.json and metrics.csv."""
    names = {"result": "result.json", "metrics": "metrics.csv", "plan": "plan.txt", "log": "flowrun.log"}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    for name, text in given.items():
        (folder / names[name]).write_text(text)
    return folder


def grid(folder: Path, kind: str, number: int, colour: str) -> None:
    (folder / kind).mkdir(exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(folder / kind / f"{'step' if kind == 'samples' else 'epoch'}-{number:06d}.png")


METRICS = "step,loss,probe/log_prob_max,probe/log_prob_p99,probe/floor_log_prob_max,probe/floor_log_prob_p99\n"
PROBED = "0,,0.25,0.125,0.001,0.0005\n1,2.0,,,,\n2,1.5,,,,\n"


def test_a_page_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    result = {"status": "finished", "task": "grpo", "model": "m", "loss": 0.123456789, "stopped_by": ""}
    run = left(tmp_path / "run", result=json.dumps(result), metrics=METRICS + PROBED,
               plan="rollout     3 epochs of <b>cats & dogs</b>\n", log="a line\n")  # fmt: skip
    for step in range(0, 90, 10):
        grid(run, "samples", step, "red")
    grid(run, "rollouts", 7, "blue")
    page = Page(write(run))
    assert page.open == [] and all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"@import|url\(|<script", page.source.replace("url(#", ""))
    for said in ("grpo m", "finished", "0.1235", "<b>cats & dogs</b>", "a line", "seed: 0", "epoch 7"):
        assert said in page.text
    assert "stopped_by" not in page.text and "<b>" not in page.source
    shown = re.findall(r"step (\d+)\n?", page.text)
    assert shown == ["0", "20", "40", "60", "80"], "first, last and some between"
    assert "0.25" in page.text and "0.0005" in page.text and len(page.drawings) == 2, "the loss, and the probe's bars"


def test_a_run_that_has_not_ended_is_shown_as_far_as_it_came(tmp_path: Path) -> None:
    run = left(tmp_path / "run", metrics="step,loss,dead\n1,2.0,7.0\n2,nan,7.0\n3,1.0,7.0\n4,0.")
    page = Page(write(run, tmp_path / "new" / "page.html"))
    assert "not finished" in page.text and "no result.json" in page.text and len(page.drawings) == 1
    assert "The same at every step: dead 7." in page.text
    assert not (run / "report.html").exists()
    empty = Page(write(left(tmp_path / "begun")))
    assert "Nothing was logged" in empty.text and empty.drawings == []


def test_a_sweep_shows_its_jobs_also_those_that_left_nothing(tmp_path: Path) -> None:
    for job, end in ((0, 1.0), (1, 0.5)):
        run = left(tmp_path / "old" / f"{job}-lr={end}", metrics=f"step,loss,reward/red\n1,2.0,0.1\n2,{end},0.2\n", plan=f"plan {job}\n")
        grid(run, "samples", 2, "red")
    Image.new("RGB", (9, 9)).save(tmp_path / "old" / "sweep.png")
    with open(tmp_path / "old" / "sweep.csv", "w", newline="") as handle:
        table = csv.writer(handle)
        table.writerow(("job", "optimizer.lr", "model", "status", "seconds", "result.loss", "result.reason", "directory"))
        for job, lr in enumerate((1.0, 0.5)):
            table.writerow((job, lr, "tiny", "ok", 3.5, lr, "", f"/gone/{job}-lr={lr}"))
        table.writerow((2, 9.0, "tiny", "refused", 1.0, "", "optimizer.lr is <too> large", ""))
    (tmp_path / "old" / "conclusion.txt").write_text("lr=0.5 is best\n")
    (tmp_path / "old").rename(tmp_path / "moved")
    page = Page(write(tmp_path / "moved"))
    assert page.open == [] and len(page.addresses) == 3 and len(page.drawings) == 2, "the sweep's picture, two grids; loss and reward"
    assert "lr=0.5 is best" in page.text and "2 of 3 ended well" in page.text
    for said in ("optimizer.lr is <too> large", "0 lr=1.0", "1 lr=0.5", "plan 0", "plan 1", "refused"):
        assert said in page.text
    assert "tiny" not in page.text, "what is the same in all jobs tells nothing"


@pytest.mark.parametrize(("make", "said"), [(False, "is no directory"), (True, "neither a run's config.yaml nor a sweep's sweep.csv")])
def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture, make: bool, said: str) -> None:
    if make:
        (tmp_path / "a").mkdir()
    assert main([str(tmp_path / "a")]) == ConfigError.exit_code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("**/*.html"))


def test_the_command_prints_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = left(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = left(tmp_path / "run", metrics="step,loss\n1,2.0\n2,1.5\n3,1.0\n")
    assert write(run).read_bytes() == write(run).read_bytes()


def test_curves_of_one_kind_share_a_panel_and_steady_numbers_have_none() -> None:
    two, one, same = [(0.0, 1.0), (1.0, 2.0)], [(0.0, 1.0)], [(0.0, 3.0), (1.0, 3.0)]
    curves = {"loss": two, "reward/red": two, "samples/red": two, "samples/size": two, "reward/red/group_std": two, "seconds/update": two,
              "seconds/rollout": two, "probe/max": one, "dead_groups": same, "epoch": two}  # fmt: skip
    assert panels(curves) == {
        "loss": {"loss": two},
        "red": {"reward": two, "samples": two},
        "size": {"samples": two},
        "group_std": {"reward red": two},
        "seconds": {"update": two, "rollout": two},
    }


def test_a_running_mean_is_that_of_each_window() -> None:
    values = np.random.default_rng(0).normal(size=30)
    steps, means = running_mean(np.arange(30.0), values, 4)
    assert np.allclose(means, [values[i : i + 4].mean() for i in range(27)]) and np.allclose(steps, np.arange(27) + 1.5)


def test_a_long_curve_is_drawn_with_its_running_mean() -> None:
    def paths(points):
        tree = ElementTree.fromstring(draw("loss", {"loss": points}))
        return [e for e in tree.iter() if e.get("id", "").startswith("line2d_") and e.find("{*}path[@clip-path]") is not None]

    assert len(paths([(i, i % 3) for i in range(60)])) == 1 and len(paths([(i, i % 3) for i in range(300)])) == 2
