"""What the train loop costs beside the arithmetic: per step on a tiny network, and as a share on the emoji job."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import torch
from figure import Figure, best
from job import BareLoop, in_turns, training

MOST_MS = 0.5
LIMIT = (0.95, 1.05)


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return [_overhead(Path(folder)), _limit(Path(folder))]


def _overhead(folder: Path) -> Figure:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network is slower on several
    pairs, reading = _measured(folder, ("model=emoji_tiny", "train.batch_size=4"), steps=40, rounds=25)
    torch.set_num_threads(threads)
    added, bare = median(ours - bare for ours, bare in pairs) * 1e3, median(bare for _, bare in pairs) * 1e3
    value = f"+{added:.2f} ms a step (bare loop {bare:.2f} ms)"
    return Figure("train loop, tiny network, batch 4", value, f"<= {MOST_MS} ms", added <= MOST_MS, reading)


def _limit(folder: Path) -> Figure:
    pairs, reading = _measured(folder, ("model=emoji",), steps=3, rounds=9)
    ours, bare = median(ours for ours, _ in pairs), median(bare for _, bare in pairs)
    value = f"{bare / ours:.1%} of the limit ({ours * 1e3:.0f} ms a step, bare loop {bare * 1e3:.0f} ms)"
    return Figure("stage 2 of the emoji job, batch 32", value, "95-105 %", LIMIT[0] <= bare / ours <= LIMIT[1], reading)


def _measured(folder: Path, overrides: tuple[str, ...], steps: int, rounds: int) -> tuple[list[tuple[float, float]], str]:
    """Seconds per step of both loops, window by window; and a word on the largest part of the difference."""
    made = training(folder, *overrides)
    pairs = in_turns(made, BareLoop(made, batches=8).step, steps, rounds)
    feed, visits = made.trainer.feed, made.trainer.batches.window(0)[0]
    return pairs, f"reading a batch takes {best(lambda: feed.batch(visits), 20) * 1e3:.2f} ms"
