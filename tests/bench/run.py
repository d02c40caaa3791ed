"""`make bench`: every figure, measured here and now. `run.py NAME...` measures some of them, by the names below."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from pathlib import Path

NAMES = ("splitting", "cache", "store", "rows", "startup", "loop", "memory", "epochs", "family", "accel", "rollout")


def main(names: list[str]) -> int:
    """Prints the table; returns 1 when a target was missed."""
    wrong = [name for name in names if name not in NAMES]
    if wrong:
        sys.stderr.write(f"bench: there is no {wrong[0]}; one of {', '.join(NAMES)}\n")
        return 2
    before, figures = os.getloadavg()[0], []
    for name in names or NAMES:
        sys.stderr.write(f"measuring {name} ...\n")
        figures += importlib.import_module(name).measure()
    rows = [("figure", "measured", "target", ""), *((f.name, f.value, f.target, f.verdict) for f in figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    sys.stdout.write(f"{_machine()}; load {before:.1f} at the start: the figures hold for a machine that does nothing else\n")
    return int(any(figure.reached is False for figure in figures))


def _machine() -> str:
    import torch

    return f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)  # for the commands that are started
    raise SystemExit(main(sys.argv[1:]))
