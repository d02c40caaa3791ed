"""Several ranks: their environment, exit codes, signals, and the run id that they share."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from flowrun import cli, launch

pytestmark = pytest.mark.usefixtures("composed_once")


def told(children):
    return sorted((json.loads(line) for line in children.read_text().splitlines()), key=lambda run: run["RANK"] or "")


def test_ranks_share_what_they_must(children, capfd):
    assert cli.main(["processes=2", "seed=5", "task=sft"]) == 0
    ranks = told(children)
    assert [(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"]) for r in ranks] == [("0", "0", "2"), ("1", "1", "2")]
    assert [(r["seed"], r["task"], r["processes"]) for r in ranks] == [(5, "sft", 2)] * 2
    assert len({(r["run_id"], r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks}) == 1
    assert capfd.readouterr().err == ""


def test_a_mistake_found_by_the_ranks_is_said_once(children, capfd):
    assert cli.main(["processes=2", "seed=2"]) == 2
    assert capfd.readouterr().err == "flowrun: data.path: is wrong; make it right\n"
    assert len(told(children)) == 2


def test_a_failing_rank_fails_the_run(children, capfd):
    assert cli.main(["processes=2", "seed=3"]) == 1
    assert set(capfd.readouterr().err.splitlines()) == {
        "flowrun: rank 1 broke",
        "flowrun: rank 1 ended with exit code 1",
    }


def test_a_killed_rank_is_named_and_the_others_are_asked_to_stop_then_ended(children, capfd, monkeypatch):
    """The first rank waits for the killed one, as in a reduction on GPUs, and looks at no signal."""
    monkeypatch.setattr(launch, "ASK_S", 0.3)
    monkeypatch.setattr(launch, "GRACE_S", 0.8)
    assert cli.main(["processes=2", "seed=4"]) == 1
    assert capfd.readouterr().err == "flowrun: rank 1 was ended by SIGKILL; the others cannot go on\n"
    assert Path(f"{children}.asked0").read_text() == "15"


def test_an_interruption_before_the_work_is_said_once(children, capfd):
    assert cli.main(["processes=2", "seed=6"]) == 130
    assert capfd.readouterr().err == "flowrun: stopped\n"


def test_no_other_program_is_given_the_ranks_port():
    """Two launches at once: the port stays taken from before the ranks start until they have ended."""
    with launch._own_port() as port, launch._own_port() as other:
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False).set("key", "value")


def test_a_stop_reaches_each_rank_once(children):
    """As from a terminal: the signal goes to the parent's whole group."""
    command = [sys.executable, "-m", "flowrun", "processes=2", "seed=9"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 60
    while time.monotonic() < until and not all(Path(f"{children}.ready{rank}").exists() for rank in (0, 1)):
        time.sleep(0.05)
    os.killpg(parent.pid, signal.SIGTERM)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert err == "flowrun: asked 1 time(s)\n"


class Child(launch.Command):
    """A child that runs a line of Python."""

    def start(self):
        return subprocess.Popen([sys.executable, "-c", self.arguments[0]], start_new_session=True)


def test_exit_codes_come_in_order():
    kill = "import os; os.kill(os.getpid(), 9)"
    codes, stopped = launch.run_children([Child([text], {}) for text in ("pass", "raise SystemExit(3)", kill)])
    assert (codes, stopped) == ([0, 3, 137], False)


def test_a_rank_that_waits_for_a_dead_one_is_ended(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    began = time.monotonic()
    codes, _ = launch.run_children([Child(["raise SystemExit(3)"], {}), Child(["import time; time.sleep(60)"], {})])
    assert codes == [3, 137]
    assert time.monotonic() - began < 30


def test_the_third_signal_kills(tmp_path):
    """A child that ignores everything: asked, asked again, ended."""
    deaf = "import signal as s,time,pathlib;s.signal(2,s.SIG_IGN);pathlib.Path('up').touch();time.sleep(60)"
    program = f"""
import os, pathlib, signal, threading, time
from flowrun import launch
from tests_child import Child
def press():
    while not pathlib.Path("up").exists(): time.sleep(0.02)
    for _ in range(3):
        time.sleep(0.2); os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
print(launch.run_children([Child([{deaf!r}], {{}})]))
"""
    (tmp_path / "tests_child.py").write_text(
        "import subprocess, sys\nfrom flowrun import launch\nclass Child(launch.Command):\n"
        "    def start(self):\n"
        "        return subprocess.Popen([sys.executable, '-c', self.arguments[0]], start_new_session=True)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(launch.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "([137], True)\n", done.stderr


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    launch.run_children([Child(["pass"], {})])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_dry_run_starts_no_ranks(runs, monkeypatch):
    monkeypatch.setattr(cli.launch, "start_ranks", lambda *arguments: pytest.fail("ranks were started"))
    assert cli.main(["processes=2", "dry_run=true"]) == 0
    assert runs[0].processes == 2


def test_ranks_of_another_launcher_start_no_more(runs, monkeypatch, capfd):
    monkeypatch.setattr(cli.launch, "start_ranks", lambda *arguments: pytest.fail("ranks were started"))
    monkeypatch.setenv("FLOWRUN_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main([]) == 0
    assert cli.main(["processes=4"]) == 0
    assert [run.processes for run in runs] == [4, 4]
    assert cli.main(["processes=2"]) == 2
    assert capfd.readouterr().err == (
        "flowrun: processes: is 2, but 4 ranks were launched; leave it out under a launcher of your own\n"
    )


def test_ranks_of_another_launcher_agree_on_the_run_id(runs, monkeypatch):
    """Two children of one process get the same id, children of another process a different one."""
    program = "from flowrun.launch import new_run_id; print(new_run_id())"
    path = str(Path(launch.__file__).parents[1])
    environment = {**os.environ, "WORLD_SIZE": "2", "PYTHONPATH": path}

    def ids(count):
        starter = (
            f"import subprocess, sys\nfor _ in range({count}): subprocess.run([sys.executable, '-c', {program!r}])"
        )
        done = subprocess.run(
            [sys.executable, "-c", starter], env=environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout.split()

    first, second = ids(2)
    (other,) = ids(1)
    assert first == second
    assert first != other
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([]) == cli.main([]) == 0
    assert [run.run_id for run in runs] == [launch.new_run_id()] * 2


def test_ranks_on_several_hosts_need_a_run_id(runs, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cli.main([]) == 2
    assert capfd.readouterr().err == (
        "flowrun: FLOWRUN_RUN_ID: is not set although the ranks run on several hosts; export one value on all of them\n"
    )
    monkeypatch.setenv("FLOWRUN_RUN_ID", "shared")
    assert cli.main([]) == 0
    assert runs[0].run_id == "shared"
