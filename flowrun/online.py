"""What a run that learns from rollouts needs beside others: the section `rollout`, rewards, rows to sample, the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

from torch import Tensor

from flowrun import adapters
from flowrun.algorithms import Algorithm, Online, Paradigm
from flowrun.compose import changed
from flowrun.config import ConfigError, Remainder, Run, Task
from flowrun.data import Row, Source
from flowrun.dealing import Deal, deal
from flowrun.flow.policy import nats, std_of
from flowrun.pipelines import Pipeline
from flowrun.plan import amount, pixels
from flowrun.registry import ALGORITHMS, checked
from flowrun.rewards import Chosen, choose
from flowrun.rollout_settings import Reference, RolloutSettings, Sampler

# Of section train, what such a run has no use for: the value that says so, and why.
WITHOUT = {
    "accumulate": (1, "rollout.updates says how many pictures an update takes"),
    "repeat": (1, "an epoch samples its prompts anew"),
    "remainder": (Remainder.short, "numbers that do not divide are refused"),
}


@dataclass(frozen=True)
class Learned:
    """rows: numbers of those among the data's that are sampled. held_out: those that sample.prompts keeps out. nats: of a coupled
    algorithm, the least and the most of a latent's whole likelihood in one unit of a noisy step's log-probability."""

    settings: RolloutSettings
    rewards: Mapping[str, Chosen]
    rows: Sequence[int]
    held_out: int
    deal: Deal
    nats: tuple[float, float] | None
    steps: int
    warnings: list[str]


def make_algorithm(run: Run, task: Task) -> Algorithm:
    """Raises ConfigError for settings that it cannot work with."""
    cls = ALGORITHMS.find(task.algorithm, "task.algorithm")
    config = ALGORITHMS.build("task", cls, run.task, beside=Task)
    if issubclass(cls, Online):
        return cls(config, checked("rollout", RolloutSettings, run.rollout))
    if run.reward:
        what = f"names {', '.join(run.reward)}, but task={task.name} learns from data and not from rewards"
        raise ConfigError("reward", what, "leave it out, or choose a task with rollouts, e.g. task=grpo")
    if odd := changed("rollout", run.rollout):
        what = f"{'is' if len(odd) == 1 else 'are'} set, but task={task.name} learns from data and has no rollouts, so nothing would follow"
        fix = "leave it out, or choose a task with rollouts, e.g. task=grpo; how pictures are drawn to look at stands in sample"
        raise ConfigError(", ".join(odd), what, fix)
    return cls(config)


def learned(run: Run, algorithm: Algorithm, pipeline: Pipeline, source: Source, rows: Sequence[Row],
            adapter: adapters.Config) -> Learned | None:  # fmt: skip
    """None for an algorithm that learns from data. Raises ConfigError."""
    if not isinstance(algorithm, Online):
        return None
    settings, train = algorithm.rollout, run.train
    for name, (none, why) in WITHOUT.items():
        if (value := getattr(train, name)) != none:
            what = f"is {_plain(value)} in a run that samples what it learns from"
            raise ConfigError(f"train.{name}", what, f"set it to {_plain(none)}: {why}")
    _check_trained(run, pipeline, adapter, algorithm)
    rewards = choose(run.reward, source)
    if not rewards:
        raise ConfigError("reward", f"chooses none, and task.algorithm={run.task['algorithm']} learns from them",
                          "choose some, e.g. 'reward=[red]'; conf/reward lists them")  # fmt: skip
    for name in settings.stop.fall or {}:
        if name not in rewards:
            raise ConfigError(f"rollout.stop.fall.{name}", "is no chosen reward", f"name one of {', '.join(rewards)}")
    if settings.stop.fall and not (run.sample.prompts or run.sample.rows):
        raise ConfigError("rollout.stop.fall", "is measured on the samples, and none are drawn", "name sample.prompts")
    sampled, held_out = _sampled(run, settings, rows)
    shape = rows[sampled[0]].shape
    schedule = pipeline.schedule(settings.sampler.steps, shape)
    algorithm.check(schedule)
    _check_asked(pipeline, adapter, algorithm.levels(schedule), algorithm.levels_by)
    made = deal(settings, train.batch_size, run.processes)
    units = _nats(settings.sampler, schedule, prod(pipeline.latent_shape(shape))) if algorithm.paradigm is Paradigm.coupled else None
    return Learned(settings, rewards, sampled, held_out, made, units, _steps(run, settings), _warnings(algorithm, settings))


def _nats(sampler: Sampler, schedule: Tensor, elements: int) -> tuple[float, float]:
    stds = (std_of(sampler.dynamics, sampler.eta, *schedule[i : i + 2], schedule[1]) for i in sampler.candidates)
    found = [nats(sampler.log_prob, std, elements) for std in stds]
    return min(found), max(found)


def _plain(value: int | Enum) -> Any:
    return value.value if isinstance(value, Enum) else value


def _check_trained(run: Run, pipeline: Pipeline, adapter: adapters.Config, algorithm: Online) -> None:
    settings = algorithm.rollout
    for name in pipeline.trained:
        if name.split(".")[0] not in pipeline.denoisers:
            what = f"{name} is no denoiser, and rollouts train what takes their steps"
            raise ConfigError(_named_in(name, adapter), what, f"train {', '.join(pipeline.denoisers)}")
    if algorithm.paradigm is Paradigm.coupled and adapter.dropout:
        what = f"is {adapter.dropout:g}, but sampling drops nothing, so that the ratio of probabilities would be noise"
        raise ConfigError("adapter.dropout", what, "set it to 0")
    if not algorithm.asks_reference:
        if settings.stop.kl is not None:
            raise ConfigError("rollout.stop.kl", "needs a distance from the reference, and task.kl_weight is 0", "set task.kl_weight")
    elif settings.reference is Reference.ema and not run.optimizer.ema:
        raise ConfigError("rollout.reference", "is ema, but optimizer.ema is 0, which keeps no average", "set optimizer.ema, e.g. 0.99")


def _check_asked(pipeline: Pipeline, adapter: adapters.Config, levels: Tensor, set_by: str) -> None:
    """What is trained takes part in every loss: one expert of several is called at its own noise levels alone. Raises ConfigError."""
    least, greatest = pipeline.trained_range
    if bool(((levels < least) | (levels > greatest)).any()):
        what = (f"{', '.join(pipeline.trained)} is called at noise levels from {least:.9g} to {greatest:.9g} alone, and this task learns "
                f"from levels of {levels.min():.4g} to {levels.max():.4g}")  # fmt: skip
        fix = f"train {' and '.join(pipeline.denoisers)}, or keep to its levels by {set_by}"
        raise ConfigError(_named_in(pipeline.trained[0], adapter), what, fix)


def _named_in(name: str, adapter: adapters.Config) -> str:
    """The setting that says it is trained."""
    return "adapter.lora_base_model" if name in adapter.lora_base_model else "task.trainable_models"


def _sampled(run: Run, settings: RolloutSettings, rows: Sequence[Row]) -> tuple[list[int], int]:
    """(numbers of the rows to sample, how many are held out). Raises ConfigError."""
    held = set(run.sample.prompts) if settings.hold_out else set()
    found = [number for number, row in enumerate(rows) if row.prompt not in held]
    shapes = sorted({rows[number].shape for number in found})
    if len(shapes) > 1:
        what = f"rows have several sizes, {pixels(shapes[0])} and {pixels(shapes[-1])} among them, and rollouts sample one"
        raise ConfigError("data", what, "give rows of one size")
    if len(found) < settings.prompts_per_epoch:
        what = f"is {settings.prompts_per_epoch}, but there are {amount(len(found), 'row')} to sample"
        if len(found) < len(rows):
            what += f", {len(rows) - len(found)} being held out by sample.prompts (rollout.hold_out)"
        raise ConfigError("rollout.prompts_per_epoch", what, f"give at most {len(found)}" if found else "hold out fewer prompts")
    return found, len(rows) - len(found)


def _steps(run: Run, settings: RolloutSettings) -> int:
    """Updates of the whole run: whole epochs."""
    if run.train.epochs is not None:
        return run.train.epochs * settings.updates_per_epoch
    steps, per_epoch = run.train.steps, settings.updates_per_epoch
    if steps % per_epoch:
        near = [n for n in (steps - steps % per_epoch, steps - steps % per_epoch + per_epoch) if n]
        what = f"is {steps}, but an epoch has {per_epoch} updates (rollout.updates x rollout.inner_epochs)"
        raise ConfigError("train.steps", what, f"give {' or '.join(map(str, near))}, or train.epochs")
    return steps


def _warnings(algorithm: Online, settings: RolloutSettings) -> list[str]:
    if algorithm.paradigm is Paradigm.coupled and settings.updates_per_epoch == 1:
        return ["rollout: with one update an epoch the ratio is 1 by design and the clip never acts; rollout.updates=2 changes that"]
    return []


def told(made: Learned, run: Run, algorithm: Online) -> list[str]:
    """For the plan."""
    s, sampler = made.settings, made.settings.sampler
    window = sampler.window
    noisy = "" if not sampler.eta else (
        f", {sampler.dynamics.value} eta {sampler.eta:g} in "
        + (f"{window.size} {window.kind.value} ones" if window.kind.value != "all" else "all")
        + f" of steps {sampler.candidates.start + 1} to {sampler.candidates.stop}"
    )  # fmt: skip
    held = f"; {amount(made.held_out, 'row')} held out" if made.held_out else ""
    weights = [f"{name} x {chosen.weight:g}" if chosen.weight else f"{name} (measured only)" for name, chosen in made.rewards.items()]
    reference = f", held to {s.reference.value} by {algorithm.config.kl_weight:g}" if algorithm.asks_reference else ""
    again = " and computes them once more" if algorithm.rescores else ""
    epochs, rows = amount(made.steps // s.updates_per_epoch, "epoch"), amount(len(made.rows), "row")
    return [
        f"{epochs} of {s.prompts_per_epoch} prompts x {s.group_size} pictures, out of {rows}{held}",
        f"{amount(sampler.steps, 'solver step')}, guidance {sampler.guidance:g}{noisy}; {s.batch_size} pictures at once",
        f"rewards {', '.join(weights)}; advantages by {s.advantage.aggregate.value}, in deviations of the {s.advantage.spread.value}",
        f"{algorithm.paradigm.value}, re-reads {algorithm.rereads.value.replace('_', ' ')}{again}{reference}",
        *(_clip(made, run, algorithm) if made.nats is not None else []),
        f"{s.updates_per_epoch} updates an epoch, micro-batches of {run.train.batch_size}, {made.deal.world} processes",
    ]


def _clip(made: Learned, run: Run, algorithm: Online) -> list[str]:
    """How far the ratio may move, and where rounding is compared with it."""
    least, most = (f"{algorithm.clip * unit:.3g}" for unit in made.nats)
    floor = "acceleration.probe=false leaves it unmeasured"
    if run.acceleration.probe:
        floor = "the probe measures it once weights are there, and adds it to plan.txt"
    return [
        f"the clip leaves the ratio {algorithm.clip:g}, {least if least == most else f'{least} to {most}'} nats of a picture's likelihood",
        f"rounding moves log-probabilities too: {floor}",
    ]
