"""By how much a run raised each of its rewards, on the prompts and noises that it draws: `python -m flowrun.raised RUN_DIR...`

The first samples are compared with the last ones, picture by picture: the same prompt from the same noise. With rollout.hold_out
these prompts were never sampled to learn from. Several runs are also summed up, as runs of several seeds are.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrun.config import ConfigError, UserError
from flowrun.data import Row
from flowrun.files import write_atomic
from flowrun.finished import saved_run
from flowrun.nearest import read_picture
from flowrun.plan import columns
from flowrun.rewards import choose
from flowrun.rows import make_source
from flowrun.scoring import Scoring
from flowrun.utf8 import speak_utf8


@dataclass(frozen=True)
class Raised:
    """Means of one reward over the pictures that both steps have. gain: the mean difference; error: its standard error."""

    before: float
    after: float
    gain: float
    error: float
    pictures: int


def raised(run_dir: Path) -> dict[str, Raised]:
    """By reward. Saved in the run's directory as raised.json.

    Raises ConfigError for a run without rewards, or with fewer than two steps of samples."""
    run = saved_run(run_dir)
    source = make_source(run)
    rewards = choose(run.reward, source)
    if not rewards:
        raise ConfigError("RUN_DIR", f"{run_dir} has no rewards", "give the directory of a rollout run")
    for chosen in rewards.values():
        chosen.reward.prepare(torch.device("cpu"), source)
    (first, shown), (last, then) = _samples(run_dir)
    if shown != then:
        what = f"{run_dir} drew other prompts or seeds at its end than at its beginning"
        raise ConfigError("RUN_DIR", what, "score a run that drew the same")
    prompts = [prompt for prompt, _ in shown]
    groups = [prompts.index(prompt) for prompt in prompts]
    found = []
    for pictures in (first, last):
        rows = [Row(id=f"prompt/{prompt}", prompt=prompt, size=tuple(pictures.shape[-2:])) for prompt in prompts]
        with Scoring(rewards, groups.count(groups[0])) as scoring:
            scoring.submit(pictures, prompts, rows, groups)
            found.append(scoring.result())
    result = {name: compared(found[0][name], found[1][name]) for name in rewards}
    report = json.dumps({name: asdict(one) for name, one in result.items()}, indent=2) + "\n"
    write_atomic(run_dir / "raised.json", report.encode())
    return result


def compared(before: Tensor, after: Tensor) -> Raised:
    """Scores [P] of the same P prompts and noises. The error is that of the mean of the paired differences; pairs of which one
    has no score are left out."""
    both = before.isfinite() & after.isfinite()
    one, two = before[both].double(), after[both].double()
    difference = two - one
    error = float(difference.std() / math.sqrt(len(difference))) if len(difference) > 1 else math.nan
    return Raised(float(one.mean()), float(two.mean()), float(difference.mean()), error, len(difference))


def _samples(run_dir: Path) -> list[tuple[Tensor, list[tuple[str, str]]]]:
    """The first and the last step's: pictures [P, 3, H, W] in [0, 1], and (prompt, seed) of each."""
    tables = sorted(run_dir.glob("samples/step-*/samples.csv"), key=lambda table: int(table.parent.name.partition("-")[2]))
    if len(tables) < 2:
        what = f"{run_dir} holds {len(tables)} steps of samples"
        raise ConfigError("RUN_DIR", what, "give a run that drew sample.prompts at least twice")
    found = []
    for table in (tables[0], tables[-1]):
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if any(not row["file"].endswith(".png") for row in rows):
            raise ConfigError("RUN_DIR", f"the samples in {table.parent} are videos", "give a run that draws pictures")
        pictures = torch.stack([read_picture(table.parent / row["file"]) for row in rows])
        found.append(((pictures + 1) / 2, [(row["prompt"], row["seed"]) for row in rows]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowrun.raised", description=__doc__.partition(":")[0])
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a rollout run's directory")
    try:
        found = {folder: raised(folder) for folder in parser.parse_args(arguments).run_dirs}
    except UserError as error:
        sys.stderr.write(f"flowrun: {error}\n")
        return error.exit_code
    rows = [("run", "reward", "before", "after", "gain", "standard errors", "pictures")]
    for folder, rewards in found.items():
        rows += [(str(folder), name, *_cells(one)) for name, one in rewards.items()]
    sys.stdout.write("\n".join(columns(rows)) + "\n")
    return 0


def _cells(one: Raised) -> tuple[str, ...]:
    times = f"{one.gain / one.error:.1f}" if one.error > 0 else "no spread"
    return f"{one.before:.4f}", f"{one.after:.4f}", f"{one.gain:+.4f} +- {one.error:.4f}", times, str(one.pictures)


if __name__ == "__main__":
    speak_utf8()
    sys.exit(main())
