"""Splitting 10,000 units: for each splitter the slowest of graphs that differ in what makes an algorithm slow."""

from __future__ import annotations

from figure import Figure, seconds

from flowrun.graph import Unit
from flowrun.splitters import split

COUNT = 10_000
MOST_S = 1.0


def measure() -> list[Figure]:
    graphs = {
        "a chain": [_unit(i, [f"p{i - 1}"], [f"p{i}"]) for i in range(COUNT)],
        "one name updated by all": [_unit(i, ["x"], ["x"]) for i in range(COUNT)],
        "one name perhaps written by all": [_unit(i, ["x"], ["x"], may_write=True) for i in range(COUNT)],
        "a tree with shared names": [
            _unit(i, [f"p{i - 1}", f"p{i // 2}"], [f"p{i}", f"q{i % 7}"], may_write=i % 5 == 0) for i in range(COUNT)
        ],
    }
    split("none", graphs["a chain"][:1], {"m"})  # imports
    return [_slowest(name, graphs) for name in ("none", "ordered", "replay", "closure")]


def _unit(i: int, reads: list[str], writes: list[str], may_write: bool = False) -> Unit:
    models = ("m",) if i == COUNT // 2 else ()
    return Unit(name=f"u{i}", input_params=reads, output_params=writes, onload_model_names=models, may_write=may_write)


def _slowest(name: str, graphs: dict[str, list[Unit]]) -> Figure:
    taken = {graph: seconds(lambda units=units: split(name, units, {"m"}, live_out=[])) for graph, units in graphs.items()}
    worst = max(taken, key=taken.get)
    return Figure(f"splitting {COUNT:,} units, {name}", f"{taken[worst]:.2f} s", f"< {MOST_S:.0f} s", taken[worst] < MOST_S, f"on {worst}")
