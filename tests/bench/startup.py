"""Whole processes: `--cfg job` and `--help` against the smallest Hydra application."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figure import Figure, interleaved

MINIMAL = '''
from dataclasses import dataclass
import hydra
from hydra.core.config_store import ConfigStore
@dataclass
class Config:
    steps: int = 1
ConfigStore.instance().store(name="config", node=Config)
@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg): pass
main()
'''
ROUNDS = 9
MOST = 1.5


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "app.py"
        app.write_text(MINIMAL)
        return [_compare(flags, app, folder) for flags in (["--cfg", "job"], ["--help"])]


def _compare(flags: list[str], app: Path, folder: str) -> Figure:
    ours, minimal = interleaved(lambda: _seconds(["-m", "flowrun", *flags], folder), lambda: _seconds([str(app), *flags], folder), ROUNDS)
    value = f"{ours / minimal:.2f}x ({ours:.2f} s, minimal Hydra app {minimal:.2f} s)"
    return Figure(f"start-up, {' '.join(flags)}", value, f"<= {MOST}x", ours / minimal <= MOST)


def _seconds(words: list[str], folder: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began
