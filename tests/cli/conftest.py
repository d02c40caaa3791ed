"""Command-line tests call `cli.main` in process with a stand-in for the run itself; few start a true process."""

import gc
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hydra._internal.hydra import Hydra

from flowrun import cli

REPOSITORY = Path(__file__).resolve().parents[2]

# What child processes run in place of flowrun.run: it does what the seed says and leaves a result where it is told to.
STAND_IN = """
import json, os, pathlib, signal, sys, time, types

def execute(run):
    from flowrun.config import ConfigError, Failure, Stopped
    names = ("FLOWRUN_RUN_DIR", "FLOWRUN_SWEEP", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FLOWRUN_DEVICE",
             "CUDA_VISIBLE_DEVICES")
    seen = {name: os.environ.get(name) for name in names}
    told = {"seed": run.seed, "run_id": run.run_id, "processes": run.processes, "task": run.task["name"], **seen}
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(json.dumps(told) + "\\\\n")
    if run.seed == 1:
        raise RuntimeError("something broke")
    if run.seed == 2:
        raise ConfigError("data.path", "is wrong", "make it right")
    if run.seed == 3 and seen["RANK"] == "1":
        raise Failure("rank 1 broke")
    if run.seed == 4:
        note = pathlib.Path(os.environ["STAND_IN_LOG"] + f".asked{seen['RANK']}")
        signal.signal(signal.SIGTERM, lambda number, frame: note.write_text(str(number)))
        listens, until = note.with_suffix(".listens"), time.monotonic() + 30
        if seen["RANK"] == "1":  # dies once the other one listens
            while not listens.exists() and time.monotonic() < until:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        listens.touch()
        while time.monotonic() < until:
            time.sleep(0.02)
    if run.seed in (10, 11):  # ends when the other one has started, too
        ready = [pathlib.Path(os.environ["STAND_IN_LOG"] + f".together{seed}") for seed in (run.seed, 21 - run.seed)]
        ready[0].touch()
        until = time.monotonic() + 60
        while not ready[1].exists():
            if time.monotonic() > until:
                raise RuntimeError("the other one has not started")
            time.sleep(0.02)
    if run.seed == 6:
        raise KeyboardInterrupt
    if run.seed in (9, 19):
        asked = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: asked.append(number))
        pathlib.Path(os.environ["STAND_IN_LOG"] + f".ready{seen['RANK']}" + "b" * (run.seed == 19)).touch()
        until = time.monotonic() + 30
        while not asked and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.5)
        raise Stopped(f"asked {len(asked)} time(s)")
    if seen["FLOWRUN_RUN_DIR"]:
        folder = pathlib.Path(seen["FLOWRUN_RUN_DIR"])
        folder.mkdir(parents=True)
        result = {"loss": run.seed / 8, "status": "finished", "curve": [1, 2], "steps": run.train.steps}
        (folder / "result.json").write_text(json.dumps(result))

module = types.ModuleType("flowrun.run")
module.execute = execute
sys.modules["flowrun.run"] = module
"""


class Runs(list):
    """The runs that were executed; `error` is raised by each."""

    error = None

    def execute(self, run):
        self.append(run)
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module", autouse=True)
def composing_is_quick():
    """Nearly half of a composition's time would be the search for garbage in all that earlier tests imported."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The shell's directory is an empty one, and nothing is inherited from a surrounding run."""
    shell = tmp_path / "shell"
    shell.mkdir()
    monkeypatch.chdir(shell)
    for name in list(os.environ):
        if name.startswith("FLOWRUN_") or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    return shell


@pytest.fixture
def runs(monkeypatch):
    """Runs that `cli.main` hands over instead of doing them."""
    found = Runs()
    module = ModuleType("flowrun.run")
    module.execute = found.execute
    monkeypatch.setitem(sys.modules, "flowrun.run", module)
    return found


@pytest.fixture
def composed_once(monkeypatch):
    """Hydra composes everything twice, the first time only to see whether a file asks for a sweep."""
    monkeypatch.setattr(Hydra, "get_mode", lambda self, config_name, overrides: None)


@pytest.fixture
def refused(runs, elsewhere, capfd, composed_once):
    """Calls the command line with a mistake and returns the one line that it answers with."""

    def call(*arguments):
        assert cli.main(arguments) == 2
        out, err = capfd.readouterr()
        assert err.startswith("flowrun: ")
        assert err.count("\n") == 1, err
        assert err.endswith("\n")
        assert out == ""
        assert not runs, "a refused run was executed"
        assert not list(elsewhere.iterdir()), "a refused run left something behind"
        return err.removeprefix("flowrun: ").rstrip("\n")

    return call


@pytest.fixture
def options(tmp_path):
    """A folder of a user's options: `options({"experiment/x": text})` writes and returns it."""

    def write(files):
        for name, text in files.items():
            file = tmp_path / "options" / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(tmp_path / "options")

    return write


@pytest.fixture
def children(tmp_path, monkeypatch):
    """Child processes find flowrun, and the stand-in above instead of its run; returns the file where they log."""
    folder = tmp_path / "stand_in"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STAND_IN.replace("\\\\n", "\\n"))
    log = tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(REPOSITORY)]))
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    return log
