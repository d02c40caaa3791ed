"""Which device a job runs on while others run beside it. No torch.

The job's process sees its own device alone, so that nothing in it has to know where it is.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowrun.config import CPU, ConfigError
from flowrun.launch import PLACED

FILE = ".devices"  # in the sweep's folder; byte i is locked while a job holds device i
POLL_S = 0.1


@dataclass(frozen=True)
class Placed:
    """device: as named; empty where jobs are not placed. environment: variables for the job."""

    device: str
    environment: dict[str, str]


@contextmanager
def placed(devices: Sequence[str] | None, job: int, folder: Path) -> Iterator[Placed]:
    """Job i holds device i modulo their number, or the next one that is free; while none is, it waits.

    Raises ConfigError for a number that CUDA_VISIBLE_DEVICES does not have."""
    if not devices:
        yield Placed("", {})
        return
    confined = [_environment(device, len(devices)) for device in devices]
    with open(folder / FILE, "ab") as file:
        place = _free(file.fileno(), [(job + i) % len(devices) for i in range(len(devices))])
        yield Placed(devices[place], confined[place])


def _free(handle: int, places: Sequence[int]) -> int:
    """The first that no other process holds; it is held until the file is closed."""
    while True:
        for place in places:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except (BlockingIOError, PermissionError):  # which of the two is the system's choice
                continue
            return place
        time.sleep(POLL_S)


def _environment(device: str, side_by_side: int) -> dict[str, str]:
    """For GPUs those of the shell count: with CUDA_VISIBLE_DEVICES=4,5 number 1 is 5. On the CPU jobs share the cores."""
    if device.partition(":")[0] == CPU:
        threads = max(1, (os.cpu_count() or 1) // side_by_side)
        return {
            PLACED: device,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in device.split(",")]
    if visible is not None:
        names = [_among(visible.split(","), name) for name in names]
    return {PLACED: device, "CUDA_VISIBLE_DEVICES": ",".join(names)}


def _among(visible: Sequence[str], name: str) -> str:
    if not name.isdigit():
        return name
    if int(name) >= len(visible):
        what = f"names GPU {name}, but CUDA_VISIBLE_DEVICES={','.join(visible)} shows {len([v for v in visible if v])}"
        raise ConfigError("multirun.devices", what, "count them from 0")
    return visible[int(name)]
