"""metrics.csv through growth, kills and resumption; wandb by a stub, once for real offline, and never fatal."""

import csv
import json
import logging
import math
import os
import sys
import time
import types
from pathlib import Path

import pytest

from flowrun.config import ConfigError, Failure
from flowrun.tracking import Swept, Tracked, Tracker, Trackers, choose, gather


def tracked(folder, start=0, plan="the plan <1>"):
    return Tracked(directory=folder, stage="train", config={"seed": 0, "train": {"steps": 5}}, plan=plan, start=start)


def opened(folder, settings=None, start=0):
    return Trackers(choose(settings), tracked(folder, start))


def lines(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_read_back_exactly(tmp_path):
    values = {"loss": 0.1 + 0.2, "lr": 1e-4 / 3, "big": 1e300, "count": 12345678901234567890, "bad": math.nan}
    opened(tmp_path).log(10, values)
    (row,) = lines(tmp_path)
    assert row["step"] == "10"
    assert float(row["loss"]) == values["loss"] and float(row["lr"]) == values["lr"] and float(row["big"]) == 1e300
    assert int(row["count"]) == values["count"] and math.isnan(float(row["bad"]))


def test_a_new_figure_adds_a_column_and_keeps_the_earlier_lines(tmp_path):
    trackers = opened(tmp_path)
    trackers.log(1, {"loss": 1.0})
    trackers.log(2, {"loss": 0.5, "grad, norm": 2.0})
    trackers.log(3, {"grad, norm": 3.0})
    assert lines(tmp_path) == [
        {"step": "1", "loss": "1.0", "grad, norm": ""},
        {"step": "2", "loss": "0.5", "grad, norm": "2.0"},
        {"step": "3", "loss": "", "grad, norm": "3.0"},
    ]


def test_resuming_drops_the_lines_after_the_checkpoint(tmp_path):
    trackers = opened(tmp_path)
    for step in (10, 20, 30):
        trackers.log(step, {"loss": step / 10})
    trackers = opened(tmp_path, start=20)
    assert [row["step"] for row in lines(tmp_path)] == ["10", "20"]
    trackers.log(30, {"loss": 9.0})
    assert [(row["step"], row["loss"]) for row in lines(tmp_path)] == [("10", "1.0"), ("20", "2.0"), ("30", "9.0")]
    opened(tmp_path, start=0)
    assert lines(tmp_path) == []


def test_a_line_cut_by_a_kill_is_no_line(tmp_path):
    trackers = opened(tmp_path)
    trackers.log(10, {"loss": 1.0})
    trackers.log(120, {"loss": 2.0})
    file = tmp_path / "metrics.csv"
    file.write_text(file.read_text()[: -len("0,2.0\n")])  # "12": as if it were step 12
    opened(tmp_path, start=100).log(110, {"loss": 3.0})
    assert [row["step"] for row in lines(tmp_path)] == ["10", "110"]


def test_an_empty_file_is_begun_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("")
    opened(tmp_path).log(1, {"loss": 1.0})
    assert lines(tmp_path) == [{"step": "1", "loss": "1.0"}]


def test_a_full_disk_ends_the_run_with_its_reason(tmp_path):
    trackers = opened(tmp_path)
    trackers.log(1, {"loss": 1.0})
    os.replace(tmp_path / "metrics.csv", tmp_path / "kept")
    (tmp_path / "metrics.csv").symlink_to("/dev/full")
    with pytest.raises(Failure, match="disk was full while saving metrics"):
        trackers.log(2, {"loss": 1.0})


class Run:
    def __init__(self, log):
        self.lines, self.summary, self.ended = log, {}, None

    def log(self, data, step=None):
        self.lines.append((step, data))

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def stub(monkeypatch):
    """A module in wandb's place that records what it is given."""
    module = types.ModuleType("wandb")
    module.inits, module.runs, module.lines = [], [], []

    def init(**given):
        module.inits.append(given)
        module.runs.append(Run(module.lines))
        return module.runs[-1]

    module.init = init
    module.Settings = lambda **given: given
    module.Html = lambda data, inject: ("html", data)
    module.Image = lambda path: ("image", path)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "FLOWRUN_SWEEP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    return module


WANDB = {"wandb": {"mode": "auto", "project": "flowrun"}}


def test_wandb_gets_configuration_plan_curves_pictures_and_summary(tmp_path, stub, monkeypatch):
    monkeypatch.setenv("FLOWRUN_SWEEP", "sweep-1")
    folder = tmp_path / "run-1"
    folder.mkdir()
    trackers = opened(folder, WANDB)
    trackers.log(10, {"loss": 1.0})
    trackers.pictures(10, folder / "grid.png")
    trackers.summary({"steps": 5})
    trackers.close()
    (given,) = stub.inits
    assert given["project"] == "flowrun" and given["group"] == "sweep-1" and given["name"] == "run-1"
    assert given["job_type"] == "train" and given["config"] == {"seed": 0, "train": {"steps": 5}} and given["dir"] == str(folder)
    assert stub.lines == [
        (0, {"plan": ("html", "<pre>the plan &lt;1&gt;</pre>")}),
        (10, {"loss": 1.0}),
        (10, {"samples": ("image", str(folder / "grid.png"))}),
    ]
    assert stub.runs[0].summary == {"steps": 5} and stub.runs[0].ended == 0
    assert lines(folder) == [{"step": "10", "loss": "1.0"}]


def test_a_failed_run_is_marked(tmp_path, stub):
    opened(tmp_path, WANDB).close(failed=True)
    assert stub.runs[0].ended == 1


def test_a_resumed_run_is_the_same_run(tmp_path, stub):
    opened(tmp_path, WANDB).close()
    opened(tmp_path, WANDB, start=10).close()
    (tmp_path / "other").mkdir()
    opened(tmp_path / "other", WANDB).close()
    first, second, other = stub.inits
    assert first["id"] == second["id"] != other["id"]
    assert first["resume"] == second["resume"] == "allow"
    assert [step for step, data in stub.lines if "plan" in data] == [0, 0]  # not again on resuming


@pytest.mark.parametrize("mode, environment, netrc, wanted", [
    ("auto", {}, None, "offline"),
    ("auto", {"WANDB_API_KEY": "x"}, None, "online"),
    ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, None, "offline"),
    ("auto", {}, "machine api.wandb.ai login user password x", "online"),
    ("auto", {}, "machine example.org login user password x", "offline"),
    ("auto", {"WANDB_BASE_URL": "http://example.org:80/"}, "machine example.org login user password x", "online"),
    ("offline", {"WANDB_API_KEY": "x"}, None, "offline"),
    ("online", {}, None, "online"),
])  # fmt: skip
def test_it_is_online_when_there_is_a_key(tmp_path, stub, monkeypatch, mode, environment, netrc, wanted):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / "netrc").write_text(netrc)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    opened(tmp_path, {"wandb": {"mode": mode, "project": "p"}})
    assert stub.inits[0]["mode"] == wanted


def raises(*_, **__):
    raise ConnectionError("no route")


def test_a_tracker_that_cannot_open_is_reported_and_left_out(tmp_path, stub, caplog):
    stub.init = raises
    trackers = opened(tmp_path, WANDB)
    trackers.log(1, {"loss": 1.0})
    trackers.close()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "tracker wandb is off" in caplog.text and "ConnectionError: no route" in caplog.text
    assert len(lines(tmp_path)) == 1


def test_a_missing_package_is_reported_and_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    opened(tmp_path, WANDB).log(1, {"loss": 1.0})
    assert "tracker wandb is off" in caplog.text
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize("what", ["log", "finish"])
def test_a_tracker_that_fails_later_is_reported_once(tmp_path, stub, monkeypatch, caplog, what):
    trackers = opened(tmp_path, WANDB)
    monkeypatch.setattr(Run, what, raises)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 1.0})
    trackers.summary({})
    trackers.close()
    assert caplog.text.count("tracker wandb is off") == 1
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("settings, words", [
    ({"wanb": {}}, ["tracker.wanb", "wandb"]),
    ({"wandb": {"mode": "auto"}}, ["tracker.wandb.project"]),
    ({"wandb": {"mode": "later", "project": "p"}}, ["tracker.wandb.mode", "later"]),
    ({"wandb": {"mode": "auto", "project": "p", "entitty": "x"}}, ["tracker.wandb.entitty"]),
    ({"csv": {"file": "x"}}, ["tracker.csv.file"]),
    ({"wandb": True}, ["tracker.wandb", "True"]),
])  # fmt: skip
def test_wrong_settings_are_refused_before_anything_opens(settings, words):
    with pytest.raises(ConfigError) as caught:
        choose(settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Own(Tracker):
    seen: list = []

    def __init__(self, config, run):
        self.seen.append(run.start)

    def log(self, step, metrics):
        self.seen.append((step, dict(metrics)))


def test_a_class_of_ones_own_is_a_tracker(tmp_path):
    Own.seen.clear()
    opened(tmp_path, {f"{__name__}:Own": {}}, start=3).log(4, {"loss": 1.0})
    assert Own.seen == [3, (4, {"loss": 1.0})]


def test_a_real_offline_run_and_its_resumption_write_a_record(tmp_path, monkeypatch, caplog):
    from PIL import Image

    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "grid.png")
    settings = {"wandb": {"mode": "offline", "project": "flowrun"}}
    for start in (0, 10):
        trackers = opened(tmp_path, settings, start=start)
        trackers.log(start + 10, {"loss": 1.0})
        trackers.pictures(start + 10, tmp_path / "grid.png")
        trackers.summary({"steps": start + 10})
        trackers.close()
    assert "is off" not in caplog.text
    name = (tmp_path / "wandb_id").read_text()
    records = list(Path(tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert records
    until = time.monotonic() + 60  # wandb's own process writes them, on a busy machine after `finish` has returned
    while any(file.stat().st_size <= 500 for file in records) and time.monotonic() < until:
        time.sleep(0.2)
    assert all(file.stat().st_size > 500 for file in records)


def swept(folder, picture=True):
    if picture:
        from PIL import Image

        Image.new("RGB", (8, 8), "red").save(folder / "sweep.png")
    return Swept(directory=folder, name="sweep-1", config={"seed": 0}, columns=["job", "loss"], rows=[["0", "1.5"], ["1", ""]],
                 picture=folder / "sweep.png" if picture else None, conclusion="the first one")  # fmt: skip


def test_a_sweep_is_one_more_run_of_its_jobs_group_with_table_and_picture(tmp_path, stub):
    folder = tmp_path / "sweep-1"
    folder.mkdir()
    stub.Table = lambda columns, data: ("table", columns, data)
    for picture in (True, False):
        gather(choose(WANDB), swept(folder, picture))
    first, second = stub.inits
    assert (first["group"], first["job_type"], first["name"], first["dir"]) == ("sweep-1", "sweep", "sweep-1", str(folder))
    assert first["id"] == second["id"] and first["config"] == {"seed": 0}, "a sweep that goes on is the same run"
    table = ("table", ["job", "loss"], [["0", "1.5"], ["1", ""]])
    assert [data for _, data in stub.lines] == [{"table": table, "picture": ("image", str(folder / "sweep.png"))}, {"table": table}]
    assert [(run.summary, run.ended) for run in stub.runs] == [({"conclusion": "the first one"}, 0)] * 2
    assert not (folder / "metrics.csv").exists()


def test_a_tracker_that_cannot_take_the_sweep_is_reported(tmp_path, stub, caplog):
    stub.init = raises
    gather(choose(WANDB), swept(tmp_path))
    assert "tracker wandb has not got the sweep's table (ConnectionError: no route)" in caplog.text


def test_a_real_offline_sweep_writes_a_record(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    gather(choose({"wandb": {"mode": "offline", "project": "flowrun"}}), swept(tmp_path))
    assert "has not got" not in caplog.text
    (folder,) = Path(tmp_path / "wandb").glob(f"offline-run-*-{(tmp_path / 'wandb_id').read_text()}")
    tables = list((folder / "files" / "media" / "table").glob("table_*.json"))
    assert [json.loads(file.read_text())["data"] for file in tables] == [[["0", "1.5"], ["1", ""]]]
    assert list((folder / "files" / "media" / "images").glob("picture_*.png"))
