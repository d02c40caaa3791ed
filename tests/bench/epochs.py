"""Two stages against one, over 5 epochs of the emoji job's data."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from figure import Figure

JOB = ("model=emoji", "train.steps=null", "train.epochs=5", "tracker=[csv]", "sample.prompts=[]")
ROUNDS = 3


@dataclass(frozen=True)
class Command:
    """Seconds. stages: of the stages alone, loading included; wall: of the whole command; step: of one update."""

    stages: float
    wall: float
    step: float


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        places = [(Path(folder) / f"split{n}", Path(folder) / f"whole{n}") for n in range(ROUNDS)]
        pairs = [(_command(split, "task=sft_split"), _command(whole, "task=sft")) for split, whole in places]
    return [
        _ratio("one stage / two stages, 5 epochs, both stages' time", [(a.stages, b.stages) for a, b in pairs]),
        _ratio("one stage / two stages, 5 epochs, whole commands", [(a.wall, b.wall) for a, b in pairs]),
        _ratio("one stage / two stages, an update", [(a.step, b.step) for a, b in pairs]),
    ]


def _ratio(name: str, pairs: list[tuple[float, float]]) -> Figure:
    split, whole = median(a for a, _ in pairs), median(b for _, b in pairs)
    return Figure(name, f"{whole / split:.2f}x ({whole:.2f} against {split:.2f} s)")


def _command(folder: Path, *overrides: str) -> Command:
    folder.mkdir()
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flowrun", *JOB, *overrides], check=True, cwd=folder, capture_output=True)
    wall = time.perf_counter() - began
    results = [json.loads(path.read_text()) for path in folder.glob("outputs/runs/*/*/*/result.json")]
    return Command(sum(r["seconds"] for r in results), wall, next(r["s_per_step"] for r in results if r["stage"] == "train"))
