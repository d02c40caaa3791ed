"""What the train loop costs beside the arithmetic: per step on a small network, and as a share on the emoji job."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import small
import torch
from figure import Figure, best
from job import BareLoop, Velocity, flux, in_turns, training

MOST_MS, OF_MS = 0.5, 3.5  # as a share, since one machine's milliseconds are not another's
LIMIT = (0.95, 1.05)
SMALL = ("model=emoji_tiny", "model.pipeline=small:Small", "train.batch_size=4")


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return [_overhead(Path(folder)), _limit(Path(folder))]


def _overhead(folder: Path) -> Figure:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network is slower on several
    pairs, reading = _measured(folder, SMALL, small.velocity, steps=10, rounds=300)
    torch.set_num_threads(threads)
    added, bare = median(ours - bare for ours, bare in pairs) * 1e3, median(bare for _, bare in pairs) * 1e3
    value = f"+{added:.2f} ms a step, {added / bare:.1%} (bare loop {bare:.2f} ms)"
    most = f"<= {MOST_MS} ms on {OF_MS} ms, {MOST_MS / OF_MS:.1%}"
    return Figure("train loop on a small network, batch 4", value, most, added / bare <= MOST_MS / OF_MS, reading)


def _limit(folder: Path) -> Figure:
    pairs, reading = _measured(folder, ("model=emoji",), flux, steps=1, rounds=30)
    ours, bare = median(ours for ours, _ in pairs), median(bare for _, bare in pairs)
    value = f"{bare / ours:.1%} of the limit ({ours * 1e3:.0f} ms a step, bare loop {bare * 1e3:.0f} ms)"
    return Figure("stage 2 of the emoji job, batch 32", value, "95-105 %", LIMIT[0] <= bare / ours <= LIMIT[1], reading)


Pairs = list[list[float]]  # seconds per step of (training, bare loop), window by window


def _measured(
    folder: Path, overrides: tuple[str, ...], velocity: Velocity, steps: int, rounds: int
) -> tuple[Pairs, str]:
    """The pairs, and a word on what the difference is made of."""
    made = training(folder, *overrides)
    pairs = in_turns(made, [BareLoop(made, velocity).step], steps, rounds)
    feed, visits = made.trainer.feed, made.trainer.batches.window(0)[0]
    return pairs, f"of it reading a batch {best(lambda: feed.batch(visits), 50) * 1e3:.2f} ms"
