"""How near a distilled run comes to its teacher, from noises that neither was trained on:

    python -m flowrun.distilled STUDENT_RUN TEACHER_RUN --seeds 1000 1001 1002 1003

Reference: the teacher's picture of the same noise with its own number of steps. Compared with it, in pixels in [-1, 1]:
the student in its few steps, and the teacher itself in as few.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from flowrun.config import ConfigError, UserError
from flowrun.files import write_atomic
from flowrun.finished import Finished, saved_run
from flowrun.nearest import pictures_of, score
from flowrun.plan import columns
from flowrun.utf8 import speak_utf8


@dataclass(frozen=True)
class Gain:
    """Mean squared errors to the reference. mean: of (teacher's - student's error), pair by pair; error: of that mean."""

    student: float
    teacher: float
    mean: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """accuracy: share of pictures nearest to that of their own caption; None when the data have no pictures."""

    pictures: int
    steps: int
    reference_steps: int
    gain: Gain
    accuracy_student: float | None
    accuracy_teacher: float | None
    accuracy_reference: float | None


def compare(student_run: Path, teacher_run: Path, seeds: Sequence[int]) -> Comparison:
    """Over every caption of the teacher's data and each of `seeds`. Saved in the student's directory as distilled.json.

    Raises ConfigError when the student was not distilled."""
    run, sample = saved_run(student_run), saved_run(teacher_run).sample
    if run.task["algorithm"] != "distill":
        raise ConfigError("STUDENT_RUN", f"{student_run} was trained by {run.task['algorithm']}", "give a distilled run")
    steps = run.task["steps"]
    teacher = Finished(teacher_run, [], sample.guidance)
    student = Finished(student_run, teacher.prompts, guidance=1.0)
    wanted = [(prompt, seed) for seed in seeds for prompt in teacher.prompts]
    reference, few = (teacher.pictures(wanted, n) for n in (sample.steps, steps))  # [P, (F,) 3, H, W] each
    drawn = student.pictures(wanted, steps)
    assembly = teacher.assembly
    known = pictures_of(assembly.source, teacher.shape) if "image" in assembly.source.names else None
    accuracy = [score(x, [prompt for prompt, _ in wanted], *known).accuracy if known else None for x in (drawn, few, reference)]
    result = Comparison(pictures=len(wanted), steps=steps, reference_steps=sample.steps, gain=gain(drawn, few, reference),
                        accuracy_student=accuracy[0], accuracy_teacher=accuracy[1], accuracy_reference=accuracy[2])  # fmt: skip
    report = json.dumps({**asdict(result), "seeds": list(seeds)}, indent=2) + "\n"
    write_atomic(student_run / "distilled.json", report.encode())
    return result


def gain(student: Tensor, teacher: Tensor, reference: Tensor) -> Gain:
    """Pictures [P, 3, H, W], or videos [P, F, 3, H, W], of the same P noises. The standard error is that of the mean of P
    paired differences."""
    ours, theirs = ((x - reference).square().flatten(1).mean(1).double() for x in (student, teacher))  # [P]
    difference = theirs - ours
    error = float(difference.std() / math.sqrt(len(difference)))
    return Gain(float(ours.mean()), float(theirs.mean()), float(difference.mean()), error)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowrun.distilled", description=__doc__.partition(":")[0])
    parser.add_argument("student_run", type=Path, metavar="STUDENT_RUN", help="a run of task=distill_split or distill")
    parser.add_argument("teacher_run", type=Path, metavar="TEACHER_RUN", help="the run whose pairs it was distilled from")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000, 1001, 1002, 1003], help="not those of the pairs")
    given = parser.parse_args(arguments)
    try:
        found = compare(given.student_run, given.teacher_run, given.seeds)
    except UserError as error:
        sys.stderr.write(f"flowrun: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{_told(found)}\n")
    return 0


def _told(c: Comparison) -> str:
    g = c.gain
    rows = [
        ("", "mse to the reference", "accuracy"),
        (f"teacher, {c.reference_steps} steps (the reference)", "0", c.accuracy_reference),
        (f"teacher, {c.steps} steps", f"{g.teacher:.4f}", c.accuracy_teacher),
        (f"student, {c.steps} steps", f"{g.student:.4f}", c.accuracy_student),
    ]
    table = columns([[cell if isinstance(cell, str) else "-" if cell is None else f"{cell:.3f}" for cell in row] for row in rows])
    ratio = f"{g.mean / g.error:.1f} standard errors" if g.error else "no spread"
    return "\n".join([*table, f"nearer by {g.mean:.4f} +- {g.error:.4f} ({ratio}), over {c.pictures} pairs"])


if __name__ == "__main__":
    speak_utf8()
    sys.exit(main())
