"""What a train process holds: its peak memory with and without a cache, and which networks of transformers it makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from figure import Figure

JOB = ("model=emoji", "tracker=[csv]", "sample.prompts=[]", "train.steps=5", "train.checkpoint_every=1000")
# Runs one command and ends with a line that lists the classes of transformers that were instantiated.
CHILD = """
import json, sys, torch
from flowrun import cli
made, init = set(), torch.nn.Module.__init__
def recorded(self, *arguments, **named):
    made.add(f"{type(self).__module__}.{type(self).__name__}")
    init(self, *arguments, **named)
torch.nn.Module.__init__ = recorded
code = cli.main(sys.argv[1:])
print(json.dumps(sorted(name for name in made if name.startswith("transformers."))))
raise SystemExit(code)
"""


@dataclass(frozen=True)
class Process:
    """peak: resident bytes at most. networks: classes of transformers that were made."""

    peak: int
    networks: list[str]


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        caching = _command(Path(folder), "task=sft_split", "stage=cache")
        split = _command(Path(folder), "task=sft_split", "stage=train")
        whole = _command(Path(folder), "task=sft")
    assert caching.networks and whole.networks, "what is looked for must be seen where it is"
    value = f"{split.peak / 1e6:.0f} MB, without a cache {whole.peak / 1e6:.0f} MB"
    made = ", ".join(split.networks) or "none"
    return [
        Figure("peak memory of stage 2, emoji job", value, "less", split.peak < whole.peak, "ru_maxrss of the two processes"),
        Figure("networks of transformers in stage 2", f"{made} (without a cache {len(whole.networks)} classes)", "none", not split.networks, made),
    ]


def _command(folder: Path, *overrides: str) -> Process:
    child = subprocess.Popen([sys.executable, "-c", CHILD, *JOB, *overrides], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = child.stdout.read(), child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(errors)
    return Process(usage.ru_maxrss * 1024, json.loads(output.splitlines()[-1]))
