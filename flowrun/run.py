"""assemble(run): everything checked and built on one page, before any weight is loaded. execute(run): then the stages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from flowrun import accelerators, adapters, frozen, rundir, tracking
from flowrun.algorithms import Algorithm, Online
from flowrun.batches import Batches
from flowrun.cache.key import digest
from flowrun.checks import (
    check_batch,
    check_called,
    check_inputs,
    check_merged,
    check_single,
    check_sizes,
    check_trained,
    make_batches,
)
from flowrun.compose import compose
from flowrun.config import ConfigError, Model, Run, Stage, Task
from flowrun.data import Row, Source, make_source
from flowrun.feed import live_inputs
from flowrun.graph import Unit, UnitGraph
from flowrun.library import Library
from flowrun.machine import check_placed, check_precision, check_processes
from flowrun.online import Learned, learned, make_algorithm
from flowrun.optim import check_optimizer
from flowrun.outputs import outputs
from flowrun.pipelines import Pipeline
from flowrun.pipelines._precision import DTYPES
from flowrun.plan import Plan
from flowrun.prompts import Drawn
from flowrun.registry import PIPELINES, checked, common
from flowrun.remembered import Remembered
from flowrun.rows import drawn_of, looks_of, rows_of
from flowrun.splitters import Split, split
from flowrun.uncollected import set_apart, uncollected
from flowrun.variants import Variants

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    """A checked run. rows: of the data; drawn, prompts: what is sampled from, and its rows. trained: names that get gradients.
    carriers: a line on the layers with an adapter, for each of their components.

    split: of the units that the loss needs; prompt_split: of those among them that a prompt alone needs.
    cached_first: the cache stage reads every picture to its end.
    learned: how it learns from rollouts; None: from data, in `batches`.
    accelerated: slot -> what its accelerators do, a line each, if they come to it.
    stages: what this command does, in order. end: batches after which the epochs asked for are complete, else None."""

    run: Run
    task: Task
    source: Source
    rows: list[Row]
    drawn: Drawn
    prompts: list[Row]
    pipeline: Pipeline
    algorithm: Algorithm
    adapter: adapters.Config
    trackers: tracking.Choice
    trained: tuple[str, ...]
    carriers: list[str]
    split: Split
    prompt_split: Split
    batches: Batches | None
    learned: Learned | None
    stages: tuple[Stage, ...]
    steps: int
    end: int | None
    cached_first: bool
    accelerators: accelerators.Chosen
    accelerated: dict[str, list[str]]
    warnings: list[str]

    @cached_property
    def library(self) -> Library | None:
        """The cached values of this run; None when every unit is live. Hashes the data's files at first use."""
        if not self.split.cached:
            return None
        return Library(
            self.run,
            self.pipeline,
            self.source,
            self.rows,
            self.drawn,
            self.prompts,
            self.variants,
            self.split,
            self.prompt_split,
        )

    @cached_property
    def variants(self) -> Variants:
        return Variants(self.source, self.algorithm.variants(), self.algorithm.choose)

    @cached_property
    def data_stamp(self) -> str:
        """Equal for equal rows in equal order; with a cache also for equal content, which is known then."""
        rows = [(row.id, row.prompt, *row.shape) for row in self.rows]
        content = [self.library.rows.stamp(i) for i in range(len(rows))] if self.library is not None else []
        return digest(*(part for row in rows for part in row), *content).hex()

    @cached_property
    def plan(self) -> Plan:
        from flowrun.explain import explain

        return explain(self)

    @property
    def dtype(self) -> torch.dtype:
        """Precision in which weights are held."""
        return DTYPES[common("model", Model, self.run.model).dtype]

    @property
    def train_models(self) -> tuple[str, ...]:
        """Components whose weights the train or rollout stage loads: for live units, for what is trained, for the loss and samples."""
        names = {
            *self.split.models_live,
            *self.prompt_split.models_live,
            *(name.split(".")[0] for name in self.trained),
            *self.algorithm.networks(self.pipeline),
            *((*self.pipeline.decoders, *self.pipeline.denoisers) if self.prompts or self.learned else ()),
        }
        return tuple(sorted(names))


def assemble(run: Run | Sequence[str]) -> Assembly:
    """Build and check everything that a run needs except weights. run: a composed one, or command-line overrides.

    Raises ConfigError for settings, DataError for data."""
    run = run if isinstance(run, Run) else compose(run)
    check_placed()
    check_precision(run.precision)
    check_processes(run.processes)
    frozen.check_machine(run.memory)
    outputs()
    rundir.named(run)
    task = common("task", Task, run.task)
    pipeline, algorithm, source = make_pipeline(run), make_algorithm(run, task), make_source(run.data)
    if pipeline.sound is not None:
        source.listen(pipeline.sound)
    chosen = accelerators.choose(run.acceleration, type(algorithm))
    adapter = checked("adapter", adapters.Config, run.adapter)
    trained = adapters.trained_names(task.trainable_models, adapter, pipeline.components())
    pipeline.trained = trained
    fitting, carriers = check_trained(pipeline, trained, task, adapter)
    pipeline.changes, unsure = check_merged(pipeline, adapter)
    pipeline.holdings = frozen.holdings(run.memory, pipeline.components(), task.trainable_models)
    frozen.check_adapter(run.memory, adapter)
    trackers = tracking.choose(run.tracker)
    parts = _splits(task, pipeline, algorithm, trained)
    check_called(pipeline, task, trained, parts[0])
    frozen.check_backward(pipeline.holdings, algorithm.networks(pipeline), parts[0].units, trained)
    unread = check_inputs(pipeline, algorithm, parts[0], source)
    cached_first = not live_inputs(parts[0], algorithm.reads(pipeline), source) - {"prompt"}
    source.read_before_training = run.dry_run or cached_first
    with looks_of(run) as source.looks:
        source, rows = rows_of(run, source, parts[0])
    check_single(pipeline, algorithm, rows)
    online = isinstance(algorithm, Online)
    stages = _stages(run, task, parts[0], online, isinstance(source, Remembered))
    shapes = {row.shape for row in rows}
    for shape in shapes:
        pipeline.latent_shape(shape)
    lessons = learned(run, algorithm, pipeline, source, rows, adapter)
    batches = None if online else make_batches(run, rows)
    steps = lessons.steps if online else run.train.steps or batches.steps(run.train.epochs)
    end = None if online or run.train.epochs is None else batches.per_epoch * run.train.epochs
    drawn = drawn_of(run, pipeline, parts[1], source, rows)
    prompts = drawn.rows()
    return Assembly(
        run,
        task,
        source,
        rows,
        drawn,
        prompts,
        pipeline,
        algorithm,
        adapter,
        trackers,
        trained,
        carriers,
        *parts,
        batches,
        lessons,
        stages,
        steps,
        end,
        cached_first,
        chosen,
        chosen.check(pipeline) if stages[-1] is not Stage.cache else {},
        [*(lessons.warnings if lessons else []), *chosen.warnings, *fitting, *unsure, *unread,
         *check_sizes(pipeline, run.model.get("weights"), shapes), *check_batch(run, parts[0]),
         *check_optimizer(run.optimizer, steps), *pipeline.long_texts([row.prompt for row in (*rows, *prompts)])],
    )


def make_pipeline(run: Run) -> Pipeline:
    model = common("model", Model, run.model)
    cls = PIPELINES.find(model.pipeline, "model.pipeline")
    return cls(PIPELINES.build("model", cls, run.model, beside=Model), run.seed)


def _splits(task: Task, pipeline: Pipeline, algorithm: Algorithm, trained: tuple[str, ...]) -> tuple[Split, Split]:
    """Of all units for what the loss reads; and of those that a prompt alone needs. Without the units of no use."""
    units = _needed([*pipeline.units(), *algorithm.units(pipeline)], algorithm.reads(pipeline))
    return (
        split(task.splitter, units, trained, live_out=algorithm.reads(pipeline)),
        split(task.splitter, _needed(units, pipeline.conditions), trained, live_out=pipeline.conditions),
    )


def _needed(units: Sequence[Unit], names: Sequence[str]) -> list[Unit]:
    asked = UnitGraph(units).needed_for([("shared", name) for name in names])
    return [unit for i, unit in enumerate(units) if i in asked]


def _stages(run: Run, task: Task, parts: Split, online: bool, remembered: bool) -> tuple[Stage, ...]:
    own = Stage.rollout if online else Stage.train
    if run.stage not in (None, Stage.cache, own):
        how = "samples what it learns from" if online else "learns from data"
        raise ConfigError("stage", f"is {run.stage.value}, but task={task.name} {how}", f"use stage={own.value}, or leave it out")
    if run.stage is Stage.cache and not parts.needed:
        what = (
            "trains from live units"
            if not parts.cached
            else "leaves nothing to cache: every unit that is needed is live"
        )
        raise ConfigError(
            "stage",
            f"task.splitter={task.splitter} {what}, so stage=cache has nothing to do",
            "use task=sft_split, or leave stage out",
        )
    if run.stage is not None:
        return (run.stage,)
    return (Stage.cache, own) if parts.needed and not remembered else (own,)


def execute(run: Run) -> None:
    """Assemble, show the plan, and do the stages. A dry run ends at the plan. Raises UserError subclasses."""
    from flowrun.session import Session

    with Session(run) as session:
        with uncollected():
            assembly = assemble(run)
            session.show(assembly)
        if not run.dry_run:
            with set_apart():
                for stage in assembly.stages:
                    session.do(stage, assembly)
