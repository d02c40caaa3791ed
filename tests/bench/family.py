"""A real family: both stages and the sampling of an SD3-class network, each against doing its arithmetic by hand."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import sd3
import torch
from figure import Figure, interleaved, seconds
from job import BareLoop, in_turns, loaded, training

from flowrun.cache.writer import Writer
from flowrun.dist import make_dist
from flowrun.sampling import pictures
from flowrun.stages.cache import fill

LIMIT, MOST_CACHING, MOST_SAMPLING = 0.95, 0.03, 1.05
MOST_STORING, MOST_WAITING, STEP_MS = 0.01, 0.01, 75  # of stage 1; of a step of stage 2
STEPS, GUIDANCE, PROMPTS = 8, 4.0, ("a red apple",)  # of sampling


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        job = sd3.job(root / "rows")
        return [
            *_training(root, "LoRA", (*job, "adapter=lora"), rounds=40),
            *_training(root, "all weights", job, rounds=30),
            *_caching(root, job, rounds=3),
            _sampling(job, rounds=15),
        ]


def _training(root: Path, what: str, job: tuple[str, ...], rounds: int) -> list[Figure]:
    """Stage 2 against the bare loop and against an update without a cache, in turns."""
    split, whole = training(root, *job), training(root, *job, "task=sft")
    epoch = [split.trainer.batches.window(step)[0] for step in range(sd3.ROWS)]
    waiting = median(seconds(lambda visits=visits: split.trainer.feed.batch(visits)) for visits in epoch)
    found = in_turns(split, [BareLoop(split, sd3.velocity).step, whole.trainer.step], 1, rounds)
    ours, bare, live = (median(column) for column in zip(*found, strict=True))
    value = f"{bare / ours:.1%} of the limit ({ours * 1e3:.0f} ms a step, bare loop {bare * 1e3:.0f} ms)"
    cause = f"of it reading a batch {waiting * 1e3:.2f} ms"
    against = f"{live / ours:.2f}x ({live * 1e3:.0f} against {ours * 1e3:.0f} ms)"
    return [
        Figure(f"stage 2 of SD3, {what}", value, f">= {LIMIT:.0%}", bare / ours >= LIMIT, cause),
        Figure(f"waiting for a batch in it, of a step of {STEP_MS} ms", f"{waiting * 1e3:.2f} ms, {waiting / STEP_MS * 1e3:.2%}",
               f"<= {MOST_WAITING:.0%}", waiting * 1e3 <= MOST_WAITING * STEP_MS, "look-ups, checksums, copies, from a fresh reader"),
        Figure(f"one stage / two stages, an update of SD3, {what}", against),
    ]  # fmt: skip


def _caching(root: Path, job: tuple[str, ...], rounds: int) -> list[Figure]:
    """Stage 1 into an empty cache against encoding the same rows and keeping what comes out in memory, in turns.

    All read the pictures from their files and encode row by row, with weights that are there already."""
    assembly = loaded(*job)
    whole, dist = sd3.as_diffusers(assembly.pipeline), make_dist(assembly.run.precision)
    bare, hand = sd3.by_pipeline(whole), sd3.by_hand(whole)

    storing: list[float] = []  # shares

    def stage() -> float:
        with tempfile.TemporaryDirectory(dir=root) as cache, _clocked() as stored:
            fresh = loaded(*job, f"cache.root={cache}", models=assembly.pipeline.models)
            taken = seconds(lambda: fill(fresh, fresh.library.work(), dist))
        storing.append(sum(stored) / taken)
        return taken

    acts = (stage, lambda: seconds(lambda: bare(assembly.rows)), lambda: seconds(lambda: hand(assembly.rows)))
    interleaved(*acts, rounds=1)  # warms all up
    ours, theirs, least = interleaved(*acts, rounds=rounds)
    value = f"{ours / theirs - 1:+.1%} ({ours:.2f} s for {sd3.ROWS} rows, the loop {theirs:.2f} s)"
    share = median(storing)
    cause = f"per row {(ours - theirs) / sd3.ROWS * 1e3:.1f} ms of keys, checks, copies and writing"
    return [
        Figure("stage 1 of SD3 over a loop of encode_prompt and vae.encode", value, f"<= {MOST_CACHING:.0%}",
               ours / theirs <= 1 + MOST_CACHING, cause),
        Figure("the store's share of it", f"{share:.2%} ({share * ours / sd3.ROWS * 1e3:.2f} ms a row)", f"<= {MOST_STORING:.0%}",
               share <= MOST_STORING, "of it most is waiting for the disk"),
        Figure("the same over its tokenizers and networks alone", f"{ours / least - 1:+.1%} ({least:.2f} s)"),
    ]  # fmt: skip


@contextmanager
def _clocked() -> Iterator[list[float]]:
    """Seconds that writers take inside the block: copying, checking, hashing, writing, syncing."""
    taken, acts = [], {name: getattr(Writer, name) for name in ("put", "close")}

    def clocked(act: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return act(*arguments)
            finally:
                taken.append(time.perf_counter() - began)

        return timed

    for name, act in acts.items():
        setattr(Writer, name, clocked(act))
    try:
        yield taken
    finally:
        for name, act in acts.items():
            setattr(Writer, name, act)


def _sampling(job: tuple[str, ...], rounds: int) -> Figure:
    """Our loop and decoding against the call of diffusers' pipeline, both from encoded prompts, in turns."""
    pipeline = loaded(*job).pipeline
    whole, captions = sd3.as_diffusers(pipeline), [*PROMPTS, ""]
    with torch.no_grad():
        embeds, _, pooled, _ = whole.encode_prompt(captions, None, None, do_classifier_free_guidance=False,
                                                   max_sequence_length=sd3.TOKENS)  # fmt: skip
    encoded = {c: dict(zip(pipeline.conditions, pair, strict=True)) for c, *pair in zip(captions, embeds, pooled, strict=True)}
    size, count = (sd3.SIDE, sd3.SIDE), len(PROMPTS)
    given = {
        "prompt_embeds": embeds[:count], "negative_prompt_embeds": embeds[count:].repeat(count, 1, 1),
        "pooled_prompt_embeds": pooled[:count], "negative_pooled_prompt_embeds": pooled[count:].repeat(count, 1),
        "height": size[0], "width": size[1], "num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "pt",
    }  # fmt: skip
    acts = (lambda: seconds(lambda: pictures(pipeline, encoded, PROMPTS, [0], size, STEPS, GUIDANCE)),
            lambda: seconds(lambda: whole(**given)))  # fmt: skip
    interleaved(*acts, rounds=1)  # warms both up
    ours, theirs = interleaved(*acts, rounds=rounds)
    value = f"{ours / theirs:.2f}x ({ours * 1e3:.0f} ms, the call {theirs * 1e3:.0f} ms)"
    return Figure(f"{STEPS} guided steps of SD3 and decoding, against its pipeline's call", value, f"<= {MOST_SAMPLING}x",
                  ours / theirs <= MOST_SAMPLING, "what the loop adds")  # fmt: skip
