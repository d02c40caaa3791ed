"""What the train loop costs beside the arithmetic: per step on a tiny network, and as a share on the emoji job."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from figure import Figure
from job import bare_loop, in_turns, training

from flowrun.progress import Progress

MOST_MS = 0.5
LIMIT = (0.95, 1.05)


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return [_overhead(Path(folder)), _limit(Path(folder))]


def _overhead(folder: Path) -> Figure:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network is slower on several
    ours, bare = _both(folder, ("model=emoji_tiny", "train.batch_size=4"), steps=50, rounds=15)
    torch.set_num_threads(threads)
    added = (ours - bare) * 1e3
    return Figure("train loop on a tiny network, batch 4", f"+{added:.2f} ms a step (bare loop {bare * 1e3:.2f} ms)", f"<= {MOST_MS} ms", added <= MOST_MS)


def _limit(folder: Path) -> Figure:
    ours, bare = _both(folder, ("model=emoji",), steps=5, rounds=9)
    share = bare / ours
    value = f"{share:.1%} of the limit ({ours * 1e3:.0f} ms a step, inputs in memory and bare loop {bare * 1e3:.0f} ms)"
    return Figure("stage 2 of the emoji job, batch 32", value, "95-105 %", LIMIT[0] <= share <= LIMIT[1])


def _both(folder: Path, overrides: tuple[str, ...], steps: int, rounds: int) -> tuple[float, float]:
    made = training(folder, *overrides)
    bare = bare_loop(made, batches=8)
    with Progress("bench", 10**9, "step") as bar:
        # _step is one turn of the training's own loop: update, metrics, trackers, progress.
        return in_turns(lambda i: made._step(i, bar), bare, range(steps), rounds)
