"""From an assembled run to a training that is ready to start: weights, what is trained, feed, trackers, checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from flowrun import adapters
from flowrun.checkpoint import Checkpoints
from flowrun.config import ConfigError
from flowrun.dist import Dist
from flowrun.feed import Feed, NoRecords
from flowrun.graph import Executor
from flowrun.prompts import Asked, encode
from flowrun.stages.preview import Preview
from flowrun.stages.train import Training
from flowrun.stages.trainer import Trainer, wrapped
from flowrun.tracking import Tracked, Trackers

if TYPE_CHECKING:
    from flowrun.run import Assembly

log = logging.getLogger(__name__)


def build_training(assembly: Assembly, dist: Dist, folder: Path, resume_from: Path | None) -> Training:
    """Load weights and put everything together. folder: the run's directory. resume_from: the one to go on from.

    Raises ConfigError for names that only the loaded networks know to be wrong, and for an unfit checkpoint."""
    run, pipeline = assembly.run, assembly.pipeline
    _load(assembly, dist)
    names = assembly.algorithm.reads(pipeline)
    configs = {name: component.configure() for name, component in pipeline.components().items()}
    executor = partial(
        Executor, models=pipeline.models, configs=configs, trained=assembly.trained, autocast=dist.autocast
    )
    feed = Feed(
        assembly.rows,
        assembly.source,
        assembly.split,
        executor(assembly.split.units),
        assembly.library or NoRecords(),
        names,
        [name for name in names if pipeline.is_ragged(name)],
        assembly.variants,
        run.seed,
        dist.device,
    )
    trainer = Trainer(run, pipeline, assembly.algorithm, feed, assembly.batches, dist, assembly.steps, assembly.end)
    checkpoints = Checkpoints((resume_from or folder) / "checkpoints", run.train.keep)
    start = _resume(trainer, checkpoints) if resume_from else 0
    trackers = Trackers(assembly.trackers, _tracked(assembly, folder, start)) if dist.is_main else None
    preview = Preview(run.sample, pipeline, _asked(assembly, executor(assembly.prompt_split.units)), folder / "samples")
    return Training(
        trainer, preview, checkpoints, trackers, folder, assembly.task.trainable_models, assembly.adapter, start,
        assembly.accelerators.shared,
    )


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


def _resume(trainer: Trainer, checkpoints: Checkpoints) -> int:
    """Updates already done."""
    step = trainer.dist.on_main(checkpoints.newest_step)
    if step is None:
        log.info("no complete checkpoint in %s: starting at step 0", checkpoints.directory)
        return 0
    trainer.load(checkpoints.load(step))
    log.info("going on after step %d of %d", step, trainer.steps)
    return step


def _tracked(assembly: Assembly, folder: Path, start: int) -> Tracked:
    config = OmegaConf.to_container(OmegaConf.structured(assembly.run), enum_to_str=True)
    return Tracked(directory=folder, config=config, plan=str(assembly.plan), start=start)


def _asked(assembly: Assembly, executor: Executor) -> Callable[[], list[Asked]]:
    """What is drawn, with its conditions: computed once when nothing in them is trained, else anew each time."""
    a, library = assembly, assembly.library
    records = library.prompt_records() if library else [{} for _ in a.prompts]
    fresh = partial(encode, a.drawn, a.prompts, a.prompt_split, executor, records, a.pipeline.conditions, a.run.seed)
    if executor.gradient_units:
        return lambda: a.drawn.asked(fresh())
    encoded = fresh()
    return lambda: a.drawn.asked(encoded)
