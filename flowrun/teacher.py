"""Draw from a finished run, and keep each noise with the latents it became: `python -m flowrun.teacher RUN_DIR FOLDER`.

What it writes is data to distil from: `python -m flowrun task=distill_split data=teacher data.path=FOLDER`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save

from flowrun.config import ConfigError, UserError
from flowrun.disk import saving
from flowrun.files import write_atomic
from flowrun.finished import Finished, saved_run
from flowrun.pairs import COLUMNS, FRAMES, TABLE
from flowrun.progress import Progress
from flowrun.sampling import CHUNK
from flowrun.utf8 import speak_utf8

ABOUT = "teacher.json"


def make(run_dir: Path, folder: Path, prompts: Sequence[str], seeds: Sequence[int], steps: int, guidance: float) -> int:
    """One row per seed and prompt (empty: every caption of the run's data). Pairs that are there are kept; returns how
    many were made. Raises ConfigError when the folder holds pairs made otherwise, Failure when the disk is full."""
    about = {"run": str(run_dir.absolute()), "steps": steps, "guidance": guidance}
    _check_folder(folder, about)
    teacher = Finished(run_dir, prompts, guidance)
    rows = [(f"{number:06d}", prompt, seed)
            for number, (seed, prompt) in enumerate((s, p) for s in seeds for p in teacher.prompts)]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / ABOUT, json.dumps(about, indent=2).encode())
    missing = [row for row in rows if not (folder / f"{row[0]}.safetensors").is_file()]
    with saving(folder, "the teacher's pairs"), Progress("teacher", len(missing), "row") as bar:
        for start in range(0, len(missing), CHUNK):
            _save_chunk(folder, teacher, missing[start : start + CHUNK], steps)
            bar.advance(count=min(CHUNK, len(missing) - start))
        write_atomic(folder / TABLE, _table(rows, teacher.shape).encode())
    return len(missing)


def _save_chunk(folder: Path, teacher: Finished, rows: Sequence[tuple[str, str, int]], steps: int) -> None:
    (walk,) = teacher.walks([(prompt, seed) for _, prompt, seed in rows], steps)
    for (name, *_), noise, latents in zip(rows, walk.noise.cpu(), walk.latents.cpu(), strict=True):
        pair = {"noise": noise.contiguous(), "latents": latents.contiguous()}
        write_atomic(folder / f"{name}.safetensors", save(pair))


def _table(rows: Sequence[tuple[str, str, int]], shape: tuple[int, ...]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    *frames, height, width = shape
    writer.writerow([*COLUMNS, *([FRAMES] if frames else [])])
    writer.writerows([*row, height, width, *frames] for row in rows)
    return text.getvalue()


def _check_folder(folder: Path, about: dict[str, Any]) -> None:
    if folder.is_dir() and not (folder / ABOUT).is_file() and any(folder.iterdir()):
        raise ConfigError("FOLDER", f"{folder} holds something else", "give a new or empty folder")
    there = json.loads((folder / ABOUT).read_text()) if (folder / ABOUT).is_file() else about
    if there != about:
        differ = ", ".join(f"{name}: {there.get(name)}, now {about[name]}" for name in about if there.get(name) != about[name])
        raise ConfigError("FOLDER", f"{folder} was made otherwise ({differ})", "give another folder")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowrun.teacher", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the teacher: a finished train run's directory")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the pairs go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one pair per seed and prompt (0)")
    parser.add_argument("--steps", type=int, help="solver steps (as the run sampled)")
    parser.add_argument("--guidance", type=float, help="classifier-free guidance (as the run sampled)")
    parser.add_argument("--prompts", nargs="+", default=[], help="captions (all of the run's data)")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        sample = saved_run(given.run_dir).sample
        steps = sample.steps if given.steps is None else given.steps
        guidance = sample.guidance if given.guidance is None else given.guidance
        made = make(given.run_dir, given.folder, given.prompts, given.seeds, steps, guidance)
    except UserError as error:
        sys.stderr.write(f"flowrun: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{made} pairs made in {given.folder}; distil from them: task=distill_split data=teacher data.path={given.folder}\n")
    return 0


if __name__ == "__main__":
    speak_utf8()
    sys.exit(main())
