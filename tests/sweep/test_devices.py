"""Jobs side by side, one for each device."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flowrun.config import ConfigError, SweepSettings
from flowrun.machine import check_placed
from flowrun.sweep.devices import placed

HOLDER = """
import sys
from pathlib import Path
from flowrun.sweep.devices import placed
with placed(sys.argv[2].split(), int(sys.argv[3]), Path(sys.argv[1])) as place:
    print(place.device, flush=True)
    sys.stdin.read()
"""


class Holder:
    """Another process that holds a device until it is released."""

    def __init__(self, folder: Path, devices: str, job: int) -> None:
        words = [sys.executable, "-c", HOLDER, str(folder), devices, str(job)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.device = self.process.stdout.readline().strip()

    def release(self) -> None:
        self.process.communicate()


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_gets_the_device_of_its_number(tmp_path: Path, visible: None) -> None:
    found = []
    for job in range(5):
        with placed(["0", "1", "7"], job, tmp_path) as place:
            found.append((place.device, place.environment["CUDA_VISIBLE_DEVICES"]))
    assert found == [("0", "0"), ("1", "1"), ("7", "7"), ("0", "0"), ("1", "1")]


def test_a_device_in_use_is_left_to_its_job_and_the_next_one_taken(tmp_path: Path, visible: None) -> None:
    holder = Holder(tmp_path, "0 1", 0)
    assert holder.device == "0"
    with placed(["0", "1"], 2, tmp_path) as place:
        assert place.device == "1"
    holder.release()
    with placed(["0", "1"], 2, tmp_path) as place:
        assert place.device == "0"


def test_a_job_waits_while_every_device_is_in_use(tmp_path: Path, visible: None) -> None:
    holder, entered = Holder(tmp_path, "0", 0), threading.Event()

    def take() -> None:
        with placed(["0"], 1, tmp_path):
            entered.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    assert not entered.wait(0.5)
    holder.release()
    waiting.join(30)
    assert entered.is_set()


def test_gpus_are_counted_among_those_that_the_shell_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with placed(["1,2"], 0, tmp_path) as place:
        assert place.environment["CUDA_VISIBLE_DEVICES"] == "5,6"
    with (
        pytest.raises(ConfigError, match="names GPU 3, but CUDA_VISIBLE_DEVICES=4,5,6 shows 3"),
        placed(["3"], 0, tmp_path),
    ):
        pass


def test_jobs_on_the_cpu_see_no_gpu_and_share_its_cores(
    tmp_path: Path, visible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with placed(["cpu", "cpu"], 1, tmp_path) as place:
        assert (place.environment["CUDA_VISIBLE_DEVICES"], place.environment["OMP_NUM_THREADS"]) == ("", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with placed(["cpu", "cpu"], 1, tmp_path) as place:
        assert place.environment["OMP_NUM_THREADS"] == "3"


def test_without_devices_nothing_is_changed(tmp_path: Path) -> None:
    with placed(None, 1, tmp_path) as place:
        assert (place.device, place.environment) == ("", {})
    assert not list(tmp_path.iterdir())


def test_a_job_whose_gpu_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run on the CPU without a word."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setenv("FLOWRUN_DEVICE", "1")
    with pytest.raises(ConfigError, match="multirun.devices: names 1, and there is no such GPU"):
        check_placed()
    monkeypatch.setenv("FLOWRUN_DEVICE", "cpu:1")
    check_placed()


@pytest.mark.parametrize("settings, said", [
    ({"devices": ["gpu 1"]}, "multirun.devices: has 'gpu 1'"),
    ({"figure": "memory_gb"}, "multirun.best: is not given"),
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SweepSettings(**settings)
