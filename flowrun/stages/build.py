"""From an assembled run to a training that is ready to start: weights, what is trained, feed, trackers, checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import OmegaConf

from flowrun import adapters
from flowrun.checkpoint import Checkpoint, Checkpoints
from flowrun.config import ConfigError
from flowrun.dist import Dist
from flowrun.feed import Feed, NoRecords
from flowrun.graph import Executor, Unit
from flowrun.optim.kept import Kept
from flowrun.policies import Standing
from flowrun.prompts import Asked, encode
from flowrun.rollout_settings import Reference
from flowrun.stages.evaluation import Evaluation
from flowrun.stages.learner import Learner
from flowrun.stages.preview import Preview
from flowrun.stages.probe import Probe
from flowrun.stages.rescoring import Rescoring
from flowrun.stages.roller import Roller
from flowrun.stages.rollout import OLD, SNAPSHOT, START, Learning
from flowrun.stages.train import Training
from flowrun.stages.trainer import Trainer
from flowrun.stages.updates import Updates, wrapped
from flowrun.stages.work import Work
from flowrun.tracking import Tracked, Trackers

if TYPE_CHECKING:
    from flowrun.run import Assembly

log = logging.getLogger(__name__)

Started = TypeVar("Started", bound=Work)


def build_training(assembly: Assembly, dist: Dist, folder: Path, resume_from: Path | None) -> Training:
    """Load weights and put everything together. folder: the run's directory. resume_from: the one to go on from.

    Raises ConfigError for names that only the loaded networks know to be wrong, and for an unfit checkpoint."""
    _load(assembly, dist)
    updates = Updates(assembly.run, assembly.pipeline, assembly.algorithm, dist, assembly.steps)
    feed = _feed(assembly, dist)
    trainer = Trainer(assembly.run, assembly.pipeline, assembly.algorithm, feed, assembly.batches, dist, updates, assembly.end)
    checkpoints = Checkpoints((resume_from or folder) / "checkpoints", assembly.run.train.keep)
    start = _resume(trainer.load, updates, checkpoints) if resume_from else 0
    return _started(Training(trainer=trainer, **_results(assembly, updates, checkpoints, folder)), assembly, start)


def build_learning(assembly: Assembly, dist: Dist, folder: Path, resume_from: Path | None) -> Learning:
    """The same for a run that learns from rollouts; the rewards load their weights too."""
    run, made, pipeline, algorithm = assembly.run, assembly.learned, assembly.pipeline, assembly.algorithm
    _load(assembly, dist)
    for name in pipeline.denoisers:
        pipeline.models[name].eval()  # as in sampling: dropout would be noise in the ratio of probabilities
    dist.each(lambda: [chosen.reward.prepare(dist.device, assembly.source) for chosen in made.rewards.values()])
    updates = Updates(run, pipeline, algorithm, dist, assembly.steps)
    kept = Kept(list(updates.parameters.values()))
    if algorithm.asks_reference and made.settings.reference in (Reference.start, Reference.base):
        kept.keep(START)
    if algorithm.keeps_old:
        kept.keep(OLD)
    roller = Roller(pipeline, algorithm, _feed(assembly, dist), made.rows, made.settings, made.deal, dist, run.seed)
    learner = Learner(
        pipeline, algorithm, updates, made.deal, dist, run.seed, made.settings.sampler.guidance,
        _reference(assembly, updates, kept), partial(kept.applied, OLD),
    )  # fmt: skip
    checkpoints = Checkpoints((resume_from or folder) / "checkpoints", run.train.keep)
    rescoring = Rescoring(learner) if algorithm.rescores else None
    learning = Learning(
        settings=made.settings, roller=roller, learner=learner, kept=kept, rewards=made.rewards,
        evaluation=Evaluation(made.rewards, made.settings.stop), faster=assembly.accelerators.rollout,
        probe=Probe(roller, learner, rescoring, run.acceleration.bound) if run.acceleration.probe else None, rescoring=rescoring,
        **_results(assembly, updates, checkpoints, folder),
    )  # fmt: skip
    return _started(learning, assembly, _resume(learning.load, updates, checkpoints) if resume_from else 0)


def _reference(assembly: Assembly, updates: Updates, kept: Kept) -> Standing:
    """Context in which the reference policy's weights stand in the model."""
    which, adapter = assembly.learned.settings.reference, assembly.adapter
    if which is Reference.ema:
        return updates.averaged
    if which is Reference.snapshot:
        return partial(kept.applied, SNAPSHOT)
    if which is Reference.start or adapter.kind is adapters.Kind.none:
        return partial(kept.applied, START)
    return partial(adapters.without, assembly.pipeline.models)


def _feed(assembly: Assembly, dist: Dist) -> Feed:
    pipeline = assembly.pipeline
    names = assembly.algorithm.reads(pipeline)
    return Feed(
        assembly.rows,
        assembly.source,
        assembly.split,
        _executor(assembly, dist, assembly.split.units),
        assembly.library or NoRecords(),
        names,
        [name for name in names if pipeline.is_ragged(name)],
        assembly.variants,
        assembly.run.seed,
        dist.device,
    )


def _executor(assembly: Assembly, dist: Dist, units: Sequence[Unit]) -> Executor:
    pipeline = assembly.pipeline
    configs = {name: component.configure() for name, component in pipeline.components().items()}
    return Executor(units, models=pipeline.models, configs=configs, trained=assembly.trained, autocast=dist.autocast)


def _results(assembly: Assembly, updates: Updates, checkpoints: Checkpoints, folder: Path) -> dict[str, Any]:
    """Where the results of a `Work` go."""
    asked = _asked(assembly, _executor(assembly, updates.dist, assembly.prompt_split.units))
    return {
        "updates": updates,
        "preview": Preview(assembly.run.sample, assembly.pipeline, asked, folder / "samples"),
        "checkpoints": checkpoints,
        "folder": folder,
        "trainable": assembly.task.trainable_models,
        "adapter": assembly.adapter,
        "accelerators": assembly.accelerators.shared,
    }


def _started(work: Started, assembly: Assembly, start: int) -> Started:
    """start: updates done before."""
    work.start = start
    if work.updates.dist.is_main:
        work.trackers = Trackers(assembly.trackers, _tracked(assembly, work.folder, start))
    return work


def _load(assembly: Assembly, dist: Dist) -> None:
    pipeline = assembly.pipeline

    def load() -> None:
        pipeline.load(assembly.train_models, dist.device, assembly.dtype)
        adapters.attach(
            pipeline.models, assembly.task.trainable_models, assembly.adapter, pipeline.lora_targets, assembly.run.seed,
            pipeline.adapter_names,
        )
        pipeline.settle(dist.device)
        if assembly.run.train.gradient_checkpointing:
            for name in {name.split(".")[0] for name in assembly.trained}:
                _checkpoint_gradients(name, pipeline.models[name])

    dist.each(load)
    # Units call an encoder once per row, so its gradients are averaged by hand: see Trainer.
    if (name := wrapped(assembly.algorithm, pipeline)) is not None:
        pipeline.models[name] = dist.prepare(pipeline.models[name])


def _checkpoint_gradients(name: str, model: Any) -> None:
    switch = getattr(model, "enable_gradient_checkpointing", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if switch is None:
        raise ConfigError(
            "train.gradient_checkpointing", f"{name} ({type(model).__name__}) does not support it", "set it to false"
        )
    switch()


def _resume(load: Callable[[Checkpoint], None], updates: Updates, checkpoints: Checkpoints) -> int:
    """Updates already done."""
    step = updates.dist.on_main(checkpoints.newest_step)
    if step is None:
        log.info("no complete checkpoint in %s: starting at step 0", checkpoints.directory)
        return 0
    load(checkpoints.load(step))
    log.info("going on after step %d of %d", step, updates.steps)
    return step


def _tracked(assembly: Assembly, folder: Path, start: int) -> Tracked:
    config = OmegaConf.to_container(OmegaConf.structured(assembly.run), enum_to_str=True)
    return Tracked(directory=folder, stage=assembly.stages[-1].value, config=config, plan=str(assembly.plan), start=start)


def _asked(assembly: Assembly, executor: Executor) -> Callable[[], list[Asked]]:
    """What is drawn, with its conditions: computed once when nothing in them is trained, else anew each time."""
    a, library = assembly, assembly.library
    records = library.prompt_records() if library else [{} for _ in a.prompts]
    fresh = partial(encode, a.drawn, a.prompts, a.prompt_split, executor, records, a.pipeline.conditions, a.run.seed)
    if executor.gradient_units:
        return lambda: a.drawn.asked(fresh())
    encoded = fresh()
    return lambda: a.drawn.asked(encoded)
