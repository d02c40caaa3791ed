"""The true commands with two ranks: `accelerate launch`, and a rank that is killed.   pytest tests/stages/test_launchers.py"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import SMALL, Runs, losses, result

ROOT = Path(__file__).parents[2]
LONG = (*SMALL, "train.steps=100000", "train.checkpoint_every=20", "resume=none")


def started(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=environment, start_new_session=True)  # fmt: skip


def training(runs: Runs, process: subprocess.Popen[str], steps: int) -> Path:
    """Wait until a run has done `steps` updates; its directory."""
    deadline = time.monotonic() + 240
    while not ((run := runs.newest("train")) and (run / "metrics.csv").exists() and len(losses(run)) > steps):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    return run


@pytest.mark.parametrize(
    ("number", "send"),
    [
        pytest.param(signal.SIGINT, os.killpg, id="ctrl-c", marks=pytest.mark.slow),  # a terminal's goes to the whole group
        pytest.param(signal.SIGTERM, os.kill, id="sigterm", marks=pytest.mark.slow),
    ],
)
def test_a_stop_of_accelerate_launch_is_one_stop_and_one_process_goes_on(runs: Runs, number: int, send: Callable) -> None:
    launch = ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no",
              "--dynamo_backend=no")  # fmt: skip
    process = started(*launch, "-m", "flowrun", *LONG)
    run = training(runs, process, 3)
    send(process.pid, number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1  # accelerate's own, with a traceback of its own
    (line,) = [line for line in said.splitlines() if line.startswith("flowrun: stopped after step ")]
    step = int(line.split()[4])
    assert said.count("\ndata        4 rows from emoji") == said.count("finishing this step") == 1
    assert len(list(runs.folder.glob("outputs/runs/*/*/*"))) == 2  # cache and train, of one run id
    assert len({path.name for path in runs.folder.glob("outputs/runs/*/*/*")}) == 1
    assert result(run)["status"] == "stopped" and result(run)["reason"] == line.removeprefix("flowrun: ")
    assert (run / "checkpoints" / f"step-{step:06d}").is_dir()
    assert runs(*LONG, f"train.steps={step + 2}", f"resume={run}") == run
    assert len(losses(run)) == step + 2


@pytest.mark.slow
def test_a_killed_rank_ends_the_command_and_the_checkpoint_goes_on(runs: Runs) -> None:
    process = started("flowrun", *LONG, "processes=2")
    run = training(runs, process, 25)
    (victim,) = [child for child in psutil.Process(process.pid).children() if child.environ()["RANK"] == "1"]
    victim.kill()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "flowrun: rank 1 was ended by SIGKILL; the others cannot go on" in said and "Traceback" not in said
    assert result(run)["status"] == "failed"
    step = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert runs(*LONG, f"train.steps={step + 2}", f"resume={run}") == run
    assert len(losses(run)) == step + 2
