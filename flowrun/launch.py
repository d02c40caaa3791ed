"""Child processes: the ranks of a run with `processes=N`, and signals that reach each child once. No torch.

Ranks find one another through the variables that `torch.distributed` reads (RANK, WORLD_SIZE, MASTER_ADDR, ...).
flowrun starts them itself because torch's own launcher turns every exit code into 1, gives ranks 30 s to save when
they are stopped, and stops the others as soon as the first has failed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowrun.config import ConfigError
from flowrun.stop import Signals

POLL_S = 0.05
GRACE_S = 30.0  # how long the other ranks may go on after one has failed; a rank that waits for it would wait for ever
ASK_S = 2.0  # after so much of that time they are asked to stop: one that is not waiting then saves what it has
STOPPED = 130  # exit code after Ctrl-C or SIGTERM
PLACED = "FLOWRUN_DEVICE"  # the device that a sweep gave to a job
OWN = {"own": True}  # `extra` of a log record about what one rank alone has met: shown though it is not the first rank


@dataclass(frozen=True)
class Command:
    """arguments: of `python -m flowrun`; environment: variables set in addition to our own."""

    arguments: Sequence[str]
    environment: dict[str, str]

    def start(self) -> subprocess.Popen[bytes]:
        """In a session of its own: a Ctrl-C in the terminal reaches only this process, which passes it on."""
        command = [sys.executable, "-m", "flowrun", *self.arguments]
        return subprocess.Popen(command, env={**os.environ, **self.environment}, start_new_session=True)


def run_children(commands: Sequence[Command], failed: list[int] | None = None,
                 asked: Callable[[], int] = int) -> tuple[list[int], bool]:  # fmt: skip
    """Run all at once until all have ended: exit codes in order (128 + signal for a killed one), and whether stopped.

    The first signal asks every child once, the second asks once more (a run then ends at once), the third kills.
    failed: filled with the places of the children that failed first. asked: how many signals another process got for us."""
    failed = [] if failed is None else failed
    with Signals() as signals:
        children: list[subprocess.Popen[bytes]] = []
        passed_on, told, failed_at = 0, False, 0.0
        try:
            for command in commands:
                children.append(command.start())
            while any(child.poll() is None for child in children):
                time.sleep(POLL_S)
                while passed_on < (times := max(len(signals.came), asked())):
                    number = (*signals.came, *[signal.SIGTERM] * times)[passed_on]
                    _signal(children, number if passed_on < 2 else signal.SIGKILL)
                    passed_on += 1
                if not failed:
                    failed += [place for place, child in enumerate(children) if child.poll() not in (None, 0, STOPPED)]
                    failed_at = time.monotonic()
                since = time.monotonic() - failed_at if failed else 0.0
                if since > GRACE_S:
                    _signal(children, signal.SIGKILL)
                elif since > ASK_S and not told and not passed_on:
                    told = True
                    _signal(children, signal.SIGTERM)
        finally:
            _signal(children, signal.SIGKILL)
    codes = [child.wait() for child in children]
    return [code if code >= 0 else 128 - code for code in codes], bool(signals.came) or passed_on > 0


def start_ranks(processes: int, arguments: Sequence[str], run_id: str) -> int:
    """Run `python -m flowrun <arguments>` as `processes` ranks on this machine. Returns the run's exit code."""
    first: list[int] = []
    with _own_port() as port:
        commands = [Command(arguments, _rank_environment(rank, processes, port, run_id)) for rank in range(processes)]
        codes, stopped = run_children(commands, first)
    if stopped:
        return STOPPED if any(codes) else 0
    if not first:
        return STOPPED if any(codes) else 0  # one that was asked on its own has stopped the others
    rank, code = first[0], codes[first[0]]
    if code > 128:
        sys.stderr.write(f"flowrun: rank {rank} was ended by {signal.Signals(code - 128).name}; the others cannot go on\n")
        return 1
    if codes[0] != code:
        sys.stderr.write(f"flowrun: rank {rank} ended with exit code {code}\n")
    return code


def quiet_torch() -> None:
    """Before torch is imported: every rank would say that looking for parameters without gradient costs time."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def inside_ranks() -> bool:
    """Whether this process is a rank, started by flowrun or by another launcher."""
    return "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def new_run_id() -> str:
    """FLOWRUN_RUN_ID, or a new one from the clock. Ranks must agree: theirs comes from their launcher's process.

    Raises ConfigError for ranks on several hosts, which have no parent in common."""
    given = os.environ.get("FLOWRUN_RUN_ID")
    if given is not None:
        return given
    if not inside_ranks():
        now = time.time()
        return time.strftime("%y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now % 1 * 1e6):06d}"
    world = os.environ["WORLD_SIZE"]
    if os.environ.get("LOCAL_WORLD_SIZE", world) != world:
        what = "is not set although the ranks run on several hosts"
        raise ConfigError("FLOWRUN_RUN_ID", what, "export one value on all of them")
    return f"{_start_of(os.getppid())}-{os.getppid()}"


def world(processes: int) -> int:
    """Number of ranks that the launcher started. Raises ConfigError when `processes` contradicts it."""
    ranks = int(os.environ["WORLD_SIZE"])
    if processes not in (1, ranks):
        what = f"is {processes}, but {ranks} ranks were launched"
        raise ConfigError("processes", what, "leave it out under a launcher of your own")
    return ranks


def _rank_environment(rank: int, processes: int, port: int, run_id: str) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // processes) if hasattr(os, "sched_getaffinity") else 1
    world = str(processes)
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FLOWRUN_RUN_ID": run_id,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }  # fmt: skip


@contextmanager
def _own_port() -> Iterator[int]:
    """A port that no other program is given: held here, without listening, while the first rank listens on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _start_of(process: int) -> str:
    """When a process started, to the second. Linux: boot time plus the 22nd field of /proc/PID/stat, in clock ticks."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text().splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    except FileNotFoundError as error:
        what = "is not set, and this system does not say when the launcher started"
        raise ConfigError("FLOWRUN_RUN_ID", what, "export one value for all ranks") from error
    return time.strftime("%y%m%d-%H%M%S", time.localtime(boot + ticks // os.sysconf("SC_CLK_TCK")))


def _signal(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)
