"""Two stages against one, over 5 epochs of the emoji job's data: whole commands, start-up and caching included."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figure import Figure

EPOCHS = ("train.steps=null", "train.epochs=5", "tracker=[csv]", "sample.prompts=[]", "train.batch_size=8", "model=emoji")


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        split = _command(Path(folder) / "split", "task=sft_split", "stage=cache")
        second = _command(Path(folder) / "split", "task=sft_split", "stage=train")
        whole = _command(Path(folder) / "whole", "task=sft")
    per_step = whole["s_per_step"] / second["s_per_step"]
    together = whole["wall"] / (split["wall"] + second["wall"])
    return [
        Figure("unsplit / split, s per step, 5 epochs", f"{per_step:.2f}x ({whole['s_per_step'] * 1e3:.0f} against {second['s_per_step'] * 1e3:.0f} ms)"),
        Figure("unsplit / split, both stages with start-up", f"{together:.2f}x ({whole['wall']:.0f} against {split['wall'] + second['wall']:.0f} s)"),
        Figure("peak memory of training, split", f"{second['memory_gb']:.2f} GB, unsplit {whole['memory_gb']:.2f} GB",
               "less than unsplit", second["memory_gb"] < whole["memory_gb"]),
    ]


def _command(folder: Path, *overrides: str) -> dict[str, float]:
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flowrun", *EPOCHS, *overrides], check=True, cwd=folder, capture_output=True)
    wall = time.perf_counter() - began
    newest = max(folder.glob("outputs/runs/*/*/*/result.json"), key=lambda path: path.stat().st_mtime_ns)
    return {"wall": wall, **json.loads(newest.read_text())}
