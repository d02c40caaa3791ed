"""By how much a run raised each of its rewards, on the prompts and noises that it draws: `python -m flowrun.raised RUN_DIR...`

The first samples are compared with the last ones, picture by picture: the same prompt from the same noise. With rollout.hold_out
these prompts were never sampled to learn from. Several runs, as those of several seeds, are lines of one table.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrun.config import ConfigError, UserError
from flowrun.data import make_source
from flowrun.files import write_atomic
from flowrun.finished import saved_run
from flowrun.nearest import read_samples, sample_folders
from flowrun.plan import columns
from flowrun.rewards import choose
from flowrun.scoring import score_drawn
from flowrun.stages.evaluation import PREFIX
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
    source = make_source(run.data)
    rewards = choose(run.reward, source)
    if not rewards:
        raise ConfigError("RUN_DIR", f"{run_dir} has no rewards", "give the directory of a rollout run")
    folders = sample_folders(run_dir)
    if len(folders) < 2:
        what = f"{run_dir} holds {len(folders)} steps of samples"
        raise ConfigError("RUN_DIR", what, "give a run that drew sample.prompts at least twice")
    (first, shown), (last, then) = (read_samples(folders[i]) for i in (0, -1))  # [P, 3, H, W] each
    if shown != then:
        what = f"{run_dir} drew other prompts or seeds at its end than at its beginning"
        raise ConfigError("RUN_DIR", what, "score a run that drew the same")
    for chosen in rewards.values():
        chosen.reward.prepare(torch.device("cpu"), source)
    prompts = [prompt for prompt, _ in shown]
    before, after = (score_drawn(rewards, (pictures + 1) / 2, prompts) for pictures in (first, last))
    result = {name: compared(before[name], after[name]) for name in rewards}
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


def curves(run_dirs: Sequence[Path]) -> str:
    """How the rewards of the drawn samples went, as csv: a line for each run, epoch and reward, in the order of the runs.

    Raises ConfigError for a run that has no metrics.csv, or drew no samples."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("task", "seed", "epoch", "reward", "mean"))
    for folder in run_dirs:
        run, file = saved_run(folder), folder / "metrics.csv"
        if not file.is_file():
            raise ConfigError("RUN_DIR", f"{folder} holds no metrics.csv", "give runs with tracker=[csv,...]")
        with open(file, newline="", encoding="utf-8") as handle:
            logged = list(csv.DictReader(handle))
        found = [(run.task["name"], run.seed, line["epoch"] or "0.0", name.removeprefix(PREFIX), value)
                 for line in logged for name, value in line.items() if name.startswith(PREFIX) and value]  # fmt: skip
        if not found:
            raise ConfigError("RUN_DIR", f"{folder} drew no samples on its way", "give runs with sample.every and rewards")
        table.writerows(found)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowrun.raised", description=__doc__.partition(":")[0])
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a rollout run's directory")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="write how the samples' rewards went, as csv, to this file")
    given = parser.parse_args(arguments)
    try:
        found = {folder: raised(folder) for folder in given.run_dirs}
        if given.curves is not None:
            text = curves(given.run_dirs)
            given.curves.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(given.curves, text.encode())
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
