"""Sweeps: a child process per job, one table, and a stop that reaches the running job once."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrun import cli, sweep
from flowrun.config import SweepSettings


def rows(outputs="outputs"):
    (table,) = Path(outputs).glob("sweeps/*/sweep.csv")
    with open(table, newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.fixture
def commands(monkeypatch, runs):
    """Jobs are recorded instead of started; `commands.codes` holds their exit codes, then 0."""

    class Commands(list):
        codes = []
        stopped = False

    found = Commands()

    def run_children(started, asked):
        found.extend(started)
        return [found.codes.pop(0) if found.codes else 0], found.stopped

    monkeypatch.setattr(sweep, "run_children", run_children)
    return found


def test_a_sweep_end_to_end(children, capfd, elsewhere):
    """Seeds 1 and 2 fail in the stand-in: the job after them still runs."""
    assert cli.main(["-m", "seed=1,2,8", "task=sft", "train.steps=5"]) == 1
    told = [json.loads(line) for line in children.read_text().splitlines()]
    table = rows()
    (folder,) = Path("outputs/sweeps").iterdir()

    assert [row["job"] for row in table] == ["0", "1", "2"]
    assert [row["seed"] for row in table] == ["1", "2", "8"]
    assert {row["task"] for row in table} == {"sft"}
    assert {row["train.steps"] for row in table} == {"5"}
    assert [row["status"] for row in table] == ["failed", "refused", "ok"]
    assert [row["result.loss"] for row in table] == ["", "", "1.0"]
    assert table[1]["result.reason"] == "data.path: is wrong; make it right" and table[1]["directory"] == ""
    assert table[2]["result.steps"] == "5" and Path(table[2]["directory"]).is_dir()
    assert "result.curve" not in table[0], "only single values are columns"
    assert all(float(row["seconds"]) > 0 for row in table)

    assert [run["FLOWRUN_SWEEP"] for run in told] == [folder.name] * 3
    assert [run["run_id"] for run in told] == [f"{folder.name}-{number}" for number in range(3)]
    directories = [Path(run["FLOWRUN_RUN_DIR"]) for run in told]
    assert [row["directory"] for row in table] == ["", "", str(directories[2])]
    assert [path.name for path in directories] == ["0-seed=1", "1-seed=2", "2-seed=8"]
    assert {path.parent for path in directories} == {elsewhere / folder}

    out, err = capfd.readouterr()
    progress = [line for line in out.splitlines() if line.startswith("job ") and "->" in line]
    assert progress == [f"job {n}: seed={s} -> {d}" for n, (s, d) in enumerate(zip((1, 2, 8), directories))]
    assert "job  seed  status " in out, "what all jobs share is not in the printed table"
    assert out.rstrip().endswith("sweep.csv")
    assert "RuntimeError: something broke" in err
    assert "flowrun: data.path: is wrong; make it right\n" in err


def test_a_sweep_of_list_valued_groups(commands):
    assert cli.main(["-m", "tracker=[csv],[csv,wandb]", "seed=4", "+optimizer.args.eps=1e-7"]) == 0
    assert [list(command.arguments) for command in commands] == [
        [f"tracker={tracker}", "seed=4", "+optimizer.args.eps=1e-07", "hydra.mode=RUN"]
        for tracker in ("[csv]", "[csv,wandb]")
    ]
    names = [Path(command.environment["FLOWRUN_RUN_DIR"]).name for command in commands]
    assert names == ["0-tracker=_csv", "1-tracker=_csv_wandb"]
    assert [row["tracker"] for row in rows()] == ["[csv]", "[csv,wandb]"]


def test_an_experiment_may_be_a_sweep(commands, options):
    text = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 4,5\n"
    folder = options({"experiment/grid": text})
    assert cli.main(["experiment=grid", "--config-dir", folder, "hydra.searchpath=[pkg://flowrun]"]) == 0
    assert [list(command.arguments) for command in commands] == [
        [
            "--config-dir",
            folder,
            f"seed={seed}",
            "experiment=grid",
            "hydra.searchpath=[pkg://flowrun]",
            "hydra.mode=RUN",
        ]
        for seed in (4, 5)
    ]
    assert [Path(command.environment["FLOWRUN_RUN_DIR"]).name for command in commands] == ["0-seed=4", "1-seed=5"]


def test_help_of_a_sweep_runs_nothing(commands, options, capfd):
    folder = options({"experiment/grid": "# @package _global_\nhydra: {mode: MULTIRUN}\n"})
    assert cli.main(["--help", "experiment=grid", "--config-dir", folder]) == 0
    assert cli.main(["-m", "--help", "seed=1"]) == 0
    assert not commands
    assert capfd.readouterr().out.count("Groups and their options") == 2


def test_odd_values_make_safe_directory_names(commands, tmp_path):
    jobs = sweep.Sweep("mine", tmp_path / "mine", [])
    for number, value in enumerate(('["a/b ../c"]', "[dog]", "x" * 200, "'一只猫'")):
        jobs.job(number, [f"sample.prompts={value}", "acceleration/shared=[]"], ["sample.prompts"], [], SweepSettings())
    names = [Path(command.environment["FLOWRUN_RUN_DIR"]).name for command in commands]
    assert names[:2] == ["0-prompts=_a_b_.._c", "1-prompts=_dog"]
    assert len(names[2]) == 80
    assert names[3] == "3-prompts=一只猫"


def test_the_table_grows_with_the_sweep(commands, tmp_path, capfd):
    """After each job the file is whole, and columns that later jobs bring are empty before."""
    jobs = sweep.Sweep("mine", tmp_path / "sweeps" / "mine", [])
    results = [{}, {"loss": 0.5, "note": None}, {"loss": 2.2839200496673584, "kid": 3}]
    commands.codes = [0, 137, 130]
    seen = []
    for number, result in enumerate(results):
        folder = tmp_path / "sweeps" / "mine" / f"{number}-seed={number}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result))
        jobs.job(number, [f"seed={number}"], ["seed"], [], SweepSettings())
        seen.append(rows(tmp_path))
    assert [len(table) for table in seen] == [1, 2, 3]
    assert [row["status"] for row in seen[2]] == ["ok", "failed", "stopped"]
    assert [row["result.loss"] for row in seen[2]] == ["", "0.5", "2.2839200496673584"]
    assert list(seen[2][0]) == ["job", "seed", "status", "seconds", "result.loss", "result.kid", "directory"]
    assert jobs.finish() == 1
    lines = capfd.readouterr().out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("job  "))
    assert lines[head].split() == ["job", "seed", "status", "seconds", "loss", "kid"]
    assert lines[head + 3].split()[:3] == ["2", "2", "stopped"]
    assert lines[head + 3].split()[4:] == ["2.28392", "3"]


def test_jobs_stand_in_the_order_of_their_numbers(commands, tmp_path):
    jobs = sweep.Sweep("mine", tmp_path / "mine", [])
    for number in (10, 9, 2):
        jobs.job(number, [f"seed={number}"], ["seed"], [], SweepSettings())
    assert [row["job"] for row in jobs.table.rows()] == ["2", "9", "10"]


def test_another_sweep_of_the_same_name_is_refused(commands, capfd):
    assert cli.main(["-m", "seed=0", "run_id=mine"]) == 0
    before = rows()
    capfd.readouterr()
    assert cli.main(["-m", "seed=2", "run_id=mine"]) == 2
    assert re.fullmatch("flowrun: run_id: .*/mine holds another sweep; leave .*\n", capfd.readouterr().err)
    assert list(commands[0].arguments) == ["seed=0", "hydra.mode=RUN"], "the name is the sweep's, not the job's"
    assert rows() == before
    assert len(commands) == 1


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_with_the_jobs_that_have_not_ended_well(commands, capfd):
    sweep_of_three = ["-m", "seed=0,1,2", "run_id=mine"]
    commands.codes = [0, 1, 0]
    assert cli.main(sweep_of_three) == 1
    assert cli.main(sweep_of_three) == 0
    started = [Path(command.environment["FLOWRUN_RUN_DIR"]).name for command in commands]
    assert started == ["0-seed=0", "1-seed=1", "2-seed=2", "1-seed=1"]
    assert [row["status"] for row in rows()] == ["ok", "ok", "ok"]
    assert cli.main(sweep_of_three) == 0
    assert len(commands) == 4
    out = capfd.readouterr().out
    assert out.count("job 0: is done") == 2 and out.count("sweep.csv") == 3


def test_a_job_that_outlived_its_killed_sweep_is_done(commands):
    """Its row was never written: the parent died before."""
    folder = Path("outputs/sweeps/mine/0-seed=0")
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"status": "finished", "loss": 0.5, "seconds": 3}))
    assert cli.main(["-m", "seed=0,1", "run_id=mine"]) == 0
    assert [Path(command.environment["FLOWRUN_RUN_DIR"]).name for command in commands] == ["1-seed=1"]
    assert [(row["status"], row["result.loss"]) for row in rows()] == [("ok", "0.5"), ("ok", "")]


def test_a_sweep_has_a_name_that_is_no_path(commands, capfd, elsewhere):
    assert cli.main(["-m", "seed=0,1", "run_id=../x"]) == 2
    assert capfd.readouterr().err.startswith("flowrun: run_id: is '../x'; it stands in a directory's name")
    assert not commands and not list(elsewhere.parent.rglob("multirun.yaml"))


def test_a_dry_sweep_writes_nothing(commands, capfd, elsewhere):
    commands.codes = [0, 2]
    assert cli.main(["-m", "seed=0,1", "dry_run=true"]) == 1
    assert not list(elsewhere.iterdir())
    out = capfd.readouterr().out
    assert f"{elsewhere}/outputs/sweeps/" in out, "the plan names the place where a real run's results would lie"
    assert [line.split()[:3] for line in out.splitlines()[-2:]] == [["0", "0", "ok"], ["1", "1", "refused"]]


def test_outputs_can_lie_elsewhere(commands, tmp_path, monkeypatch, elsewhere):
    monkeypatch.setenv("FLOWRUN_OUTPUTS", str(tmp_path / "results"))
    assert cli.main(["-m", "seed=0"]) == 0
    assert len(rows(tmp_path / "results")) == 1
    assert not list(elsewhere.iterdir())


def test_a_refused_sweep_leaves_outputs_as_they_were(commands, elsewhere):
    (elsewhere / "outputs").mkdir()
    assert cli.main(["-m", "seed=0,x"]) == 2
    assert list(elsewhere.rglob("*")) == [elsewhere / "outputs"]
    assert not commands


def test_no_sweep_inside_launched_ranks(commands, monkeypatch, capfd, elsewhere):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("FLOWRUN_RUN_ID", "x")
    assert cli.main(["-m", "seed=0,1"]) == 2
    assert capfd.readouterr().err == (
        "flowrun: -m: a sweep cannot run inside launched ranks; start it from one process; each job starts its own\n"
    )
    assert not commands
    assert not list(elsewhere.iterdir())


def test_a_stopped_job_ends_the_sweep(commands, capfd):
    commands.codes, commands.stopped = [130], True
    assert cli.main(["-m", "seed=0,1"]) == 130
    assert len(commands) == 1
    assert [row["status"] for row in rows()] == ["stopped"]
    out, err = capfd.readouterr()
    assert "stopped" in out
    assert err == "flowrun: stopped\n"


def test_ctrl_c_asks_the_running_job_once(children, elsewhere):
    """The signal goes to the whole foreground group, as from a terminal: without care the job is asked twice."""
    command = [sys.executable, "-m", "flowrun", "-m", "seed=9,0"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    ready, until = Path(f"{children}.readyNone"), time.monotonic() + 60
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == 130, err
    assert "flowrun: asked 1 time(s)\n" in err
    assert [row["status"] for row in rows()] == ["stopped"]
    assert len(children.read_text().splitlines()) == 1, "no further job was started"


JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "multirun.devices=[cpu:0,cpu:1]")


def test_joblib_runs_jobs_side_by_side_one_for_each_device(children):
    """Each of the two jobs ends only when the other has started."""
    assert cli.main(["-m", "seed=10,11", *JOBLIB]) == 0
    told = {run["seed"]: run for run in map(json.loads, children.read_text().splitlines())}
    assert [(told[seed]["FLOWRUN_DEVICE"], told[seed]["CUDA_VISIBLE_DEVICES"]) for seed in (10, 11)] == [("cpu:0", ""), ("cpu:1", "")]
    assert [(row["seed"], row["status"], row["device"]) for row in rows()] == [("10", "ok", "cpu:0"), ("11", "ok", "cpu:1")]
    (folder,) = Path("outputs/sweeps").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["0-seed=10", "1-seed=11", "conclusion.txt", "multirun.yaml", "sweep.csv"]


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False], ids=["as from a terminal", "this process alone"])
def test_jobs_side_by_side_are_each_asked_once_and_go_on_later(children, elsewhere, group):
    command = [sys.executable, "-m", "flowrun", "-m", "seed=9,19,0", "run_id=mine", *JOBLIB]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    ready, until = [Path(f"{children}.readyNone{more}") for more in ("", "b")], time.monotonic() + 60
    while not all(path.exists() for path in ready) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(parent.pid, signal.SIGINT) if group else parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == 130, err
    assert err.count("flowrun: asked 1 time(s)\n") == 2 and err.endswith("flowrun: stopped\n")
    left = [(row["seed"], row["status"], row["result.reason"]) for row in rows()]
    assert left == [(seed, "stopped", "asked 1 time(s)") for seed in ("9", "19")]
    assert len(children.read_text().splitlines()) == 2, "no further job was started"
    assert not list(Path("outputs/sweeps/mine").glob(".*"))


def test_a_sweep_says_its_best_setting_and_draws_it(commands, capfd):
    """Figures that earlier commands left: a row that is done is not run again, and counts."""
    for number, loss in enumerate((0.5, 0.25, 0.75)):
        folder = Path(f"outputs/sweeps/mine/{number}-lr={10.0 ** (number - 4):g}".replace("1e-04", "0.0001"))
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"status": "finished", "loss_mean": loss}))
    assert cli.main(["-m", "optimizer.lr=0.0001,0.001,0.01", "run_id=mine"]) == 0
    out = capfd.readouterr().out
    assert "best by least loss_mean: lr=0.001: loss_mean 0.25; then lr=0.0001: loss_mean 0.5\n" in out
    assert Path("outputs/sweeps/mine/conclusion.txt").read_text() in out
    assert Path("outputs/sweeps/mine/sweep.png").read_bytes().startswith(b"\x89PNG") and out.endswith("sweep.png\n")


def test_a_sweeper_is_told_the_figure_of_each_job_and_nothing_of_one_that_failed(commands, tmp_path):
    jobs, told = sweep.Sweep("mine", tmp_path / "mine", []), []
    commands.codes = [0, 1, 0]
    for number, loss in enumerate((0.5, 0.25, 0.75)):
        folder = tmp_path / "mine" / f"{number}-seed={number}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"loss_mean": loss, "memory_gb": 3.0}))
        told.append(jobs.job(number, [f"seed={number}"], ["seed"], [], SweepSettings()))
    assert told == [0.5, None, 0.75]
    memory = SweepSettings(figure="memory_gb", best=sweep.settings.Best.least)
    assert jobs.job(0, ["seed=0"], ["seed"], [], memory) == 3.0, "a job that is done answers at once"
    assert len(commands) == 3


def test_a_dry_look_at_a_stopped_sweep_leaves_it_as_it_was(commands, elsewhere):
    commands.codes = [0, 1]
    words = ["-m", "seed=0,1", "run_id=mine"]
    assert cli.main(words) == 1
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    assert cli.main([*words, "dry_run=true"]) == 0
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before
    assert cli.main(words) == 0 and [row["status"] for row in rows()] == ["ok", "ok"]


def test_a_dry_sweep_of_an_experiment_writes_nothing(commands, options, elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    text = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 4,5\n"
    assert cli.main(["experiment=grid", "--config-dir", options({"experiment/grid": text}), "dry_run=true"]) == 0
    assert len(commands) == 2
    assert not list(elsewhere.iterdir()) and not list((tmp_path / "temporary").iterdir())


def test_a_list_of_entries_reads_back_as_it_was_given(commands):
    value = "[{name: diffusers_cache, params: {policy: first_block, policy_params: {threshold: 0.2}}}]"
    assert cli.main(["-m", f"acceleration.rollout=[],{value}", "task=nft"]) == 0
    assert [row["acceleration.rollout"] for row in rows()] == ["[]", value]
