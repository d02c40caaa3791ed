"""Several ranks that run one command after another, in one launch: most of a command's time is starting Python.

python -m tests.ranks PLAN   with RANK and WORLD_SIZE set; PLAN holds the commands as JSON, see `launch`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Told:
    """Of one command: exit codes, what was written to stderr and the captions that were encoded, by rank."""

    codes: list[int]
    errors: list[str]
    encoded: list[list[str]]

    def lines(self) -> list[str]:
        """What the command said of its end, over all ranks."""
        return [line for text in self.errors for line in text.splitlines() if line.startswith("flowrun: ")]


def launch(folder: Path, commands: Sequence[dict], world: int = 2, timeout: float = 300) -> dict[str, Told]:
    """Run `commands` in `folder` on `world` ranks; each has a name, words for the command line, and maybe the name of a
    disturbance, a function below. Results by name."""
    with ExitStack() as held:
        ports = [held.enter_context(_port()) for _ in commands]
        plan = folder / "plan.json"
        plan.write_text(json.dumps([{**c, "port": port} for c, port in zip(commands, ports, strict=True)]))
        common = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                  "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
        ranks = [
            subprocess.Popen([sys.executable, "-m", "tests.ranks", str(plan)], cwd=folder,
                             env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world)
        ]  # fmt: skip
        try:
            assert [rank.wait(timeout) for rank in ranks] == [0] * world
        finally:
            for rank in ranks:
                rank.kill()
    return {c["name"]: _told(folder, c["name"], world) for c in commands}


def _told(folder: Path, name: str, world: int) -> Told:
    parts = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(world)]
    return Told(*([part[key] for part in parts] for key in ("code", "errors", "encoded")))


@contextmanager
def _port() -> Iterator[int]:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _rank(plan: Path) -> None:
    import torch
    from accelerate.state import AcceleratorState

    from flowrun import cli
    from flowrun.pipelines._minilm import MiniLM

    torch.set_num_threads(1)
    encoded: list[str] = []
    encode = MiniLM.forward
    MiniLM.forward = lambda self, prompt: encoded.append(prompt) or encode(self, prompt)
    rank = os.environ["RANK"]
    for command in json.loads(plan.read_text()):
        encoded.clear()
        os.environ |= {"MASTER_PORT": str(command["port"]), "FLOWRUN_RUN_ID": command["name"]}
        errors = plan.parent / f"{command['name']}.{rank}.err"
        with open(errors, "w", encoding="utf-8") as file, redirect_stderr(file), ExitStack() as undo:
            if "disturbance" in command:
                undo.enter_context(globals()[command["disturbance"]](int(rank)))
            try:
                code = cli.main(command["words"])
            except Exception:
                traceback.print_exc()
                code = 1
            if torch.distributed.is_initialized():  # as the end of the process would
                torch.distributed.destroy_process_group()
            AcceleratorState._reset_state(reset_partial_state=True)
        told = {"code": code, "errors": errors.read_text(encoding="utf-8"), "encoded": encoded}
        (plan.parent / f"{command['name']}.{rank}.json").write_text(json.dumps(told))


@contextmanager
def _instead(owner: type, name: str, function: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def idle_parameter(rank: int) -> Iterator[None]:
    """The transformer has a trained parameter that nothing uses."""
    import torch

    from flowrun.dist import Dist

    prepare = Dist.prepare

    def with_idle(self: Dist, module: torch.nn.Module) -> torch.nn.Module:
        module.idle = torch.nn.Parameter(torch.zeros(3))
        return prepare(self, module)

    with _instead(Dist, "prepare", with_idle):
        yield


@contextmanager
def nan_on_rank_1(rank: int) -> Iterator[None]:
    """The third step's loss of the first row is not a number, on one rank."""
    import torch

    from flowrun.algorithms.sft import Sft

    calls, loss = [], Sft.loss

    def poisoned(self: Sft, *arguments: object) -> object:
        out = loss(self, *arguments)
        calls.append(out)
        if rank == 1 and len(calls) == 3:
            out.per_row[0], out.loss = torch.nan, out.loss * torch.nan
        return out

    with _instead(Sft, "loss", poisoned):
        yield


def _at_third_step(act: object) -> object:
    from flowrun.stages.trainer import Trainer

    step = Trainer.step

    def disturbed(self: Trainer, number: int) -> dict[str, float]:
        if number == 2:
            act()
        return step(self, number)

    return _instead(Trainer, "step", disturbed)


@contextmanager
def bug_on_rank_1(rank: int) -> Iterator[None]:
    def break_down() -> None:
        if rank == 1:
            raise LookupError("a bug of rank 1")

    with _at_third_step(break_down):
        yield


@contextmanager
def signal_to_rank_1(rank: int) -> Iterator[None]:
    def press() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with _at_third_step(press):
        yield


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
