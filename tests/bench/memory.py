"""What a train process holds: its peak memory with and without a cache, and which models of transformers it makes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from figure import Figure

JOB = ("model=emoji", "tracker=[csv]", "sample.prompts=[]", "train.steps=5", "train.checkpoint_every=1000")
# Runs one command and ends with a line: peak memory in GB, and the classes of transformers' models that were made.
CHILD = """
import json, sys, torch
from flowrun import cli
from flowrun.progress import peak_memory_gb
made, init = set(), torch.nn.Module.__init__
def recorded(self, *arguments, **named):
    made.add(f"{type(self).__module__}.{type(self).__name__}")
    init(self, *arguments, **named)
torch.nn.Module.__init__ = recorded
code = cli.main(sys.argv[1:])
print(json.dumps([peak_memory_gb(), sorted(name for name in made if name.startswith("transformers.models."))]))
raise SystemExit(code)
"""


@dataclass(frozen=True)
class Process:
    """peak: resident GB at most. networks: classes of transformers' models that were made."""

    peak: float
    networks: list[str]


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        caching = command(Path(folder), *JOB, "task=sft_split", "stage=cache")
        split = command(Path(folder), *JOB, "task=sft_split", "stage=train")
        whole = command(Path(folder), *JOB, "task=sft")
    assert caching.networks and whole.networks, "what is looked for must be seen where it is"
    value = f"{split.peak * 1e3:.0f} MB, without a cache {whole.peak * 1e3:.0f} MB"
    made = f"{len(split.networks)} (without a cache {len(whole.networks)})"
    cause = ", ".join(split.networks)
    return [
        Figure("peak memory of stage 2, emoji job", value, "less", split.peak < whole.peak, "what it holds beside"),
        Figure("modules of transformers' models in stage 2", made, "none", not split.networks, cause),
    ]


def command(folder: Path, *overrides: str) -> Process:
    """What the command held, run in `folder`."""
    child = [sys.executable, "-c", CHILD, *overrides]
    done = subprocess.run(child, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Process(*json.loads(done.stdout.splitlines()[-1]))
