"""Whole processes: `--cfg job` and `--help` against the smallest Hydra application that has a schema and a conf folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from figure import Figure, interleaved, seconds

MINIMAL = {
    "app.py": """\
from dataclasses import dataclass
import hydra
from hydra.core.config_store import ConfigStore
@dataclass
class Config:
    steps: int = 1
ConfigStore.instance().store(name="schema", node=Config)
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg): pass
main()
""",
    "conf/config.yaml": "defaults: [schema, _self_]\nsteps: 2\n",
}
ROUNDS = 9
MOST = 1.5


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in MINIMAL.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return [_compare(flags, folder) for flags in (["--cfg", "job"], ["--help"])]


def _compare(flags: list[str], folder: str) -> Figure:
    acts = (lambda: _command(["-m", "flowrun", *flags], folder), lambda: _command(["app.py", *flags], folder))
    ours, minimal = interleaved(*acts, rounds=ROUNDS)
    value = f"{ours / minimal:.2f}x ({ours:.2f} s, minimal Hydra app {minimal:.2f} s)"
    cause = "see python -X importtime -m flowrun --help"
    return Figure(f"start-up, {' '.join(flags)}", value, f"<= {MOST}x", ours / minimal <= MOST, cause)


def _command(words: list[str], folder: str) -> float:
    return seconds(lambda: subprocess.run([sys.executable, *words], check=True, cwd=folder, stdout=subprocess.DEVNULL))
