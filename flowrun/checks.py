"""What an assembled run must agree on across its parts: names, networks, data, loss. Before any weight is loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from torch.nn import Module

from flowrun import adapters
from flowrun.algorithms import Algorithm
from flowrun.batches import Batches
from flowrun.config import ConfigError, Run, Task
from flowrun.data import Row, Source
from flowrun.graph.graph import same_branch
from flowrun.pipelines import Change, Component, Pipeline, Shape
from flowrun.plan import names, pixels
from flowrun.splitters import Split

LEAST_LATENTS = 8  # of the shorter side, which pictures need to show anything
# What brings the data of each name; any other is a further picture of each row.
BROUGHT_BY = {"image": "data=folder data.path=DIR", "video": "data=video data.path=DIR", "audio": "data=video data.path=DIR"}
PICTURE = "data=table data.path=FILE +data.columns.pictures.{0}=COLUMN, or data=folder data.path=DIR +data.pictures.{0}=DIR"


def check_trained(
    pipeline: Pipeline, trained: Sequence[str], task: Task, adapter: adapters.Config
) -> tuple[list[str], list[str]]:
    """Names of parts and layers, and an adapter to start from, against the networks without their weights.

    Returns warnings, and which layers carry an adapter."""
    components = pipeline.components()
    outlines = {name: _outline(name, components[name]) for name in dict.fromkeys(n.split(".")[0] for n in trained)}
    warnings = adapters.check(outlines, task.trainable_models, adapter, pipeline.lora_targets, pipeline.adapter_names)
    return warnings, adapters.told(outlines, adapter)


def check_merged(pipeline: Pipeline, adapter: adapters.Config) -> tuple[dict[str, Change], list[str]]:
    """The adapters that become part of the base, against the networks without their weights: component -> them. Warnings."""
    outline = {name: partial(_outline, name, component) for name, component in pipeline.components().items()}
    return adapters.merged(outline, adapter, pipeline.adapter_names)


def check_called(pipeline: Pipeline, task: Task, trained: Sequence[str], part: Split) -> None:
    """What is trained is called on the way to the loss, so that it gets gradients. Raises ConfigError."""
    called = {*pipeline.denoisers, *(model for unit in part.units for model in unit.onload_model_names)}
    for name in trained:
        idle = any(name == only or name.startswith(f"{only}.") for only in pipeline.decode_only)
        if idle or not any(same_branch(name, model) for model in called):
            key = "task.trainable_models" if name in task.trainable_models else "adapter.lora_base_model"
            what = f"{name} is called by nothing that the loss needs, so it would get no gradient"
            raise ConfigError(key, what, f"train what is called: {', '.join(sorted(called))}")


def check_inputs(pipeline: Pipeline, algorithm: Algorithm, part: Split, source: Source) -> list[str]:
    """The data give what the units take from them, and what the loss reads and no unit writes. Raises ConfigError.

    Returns a warning for what was named in the settings and nothing reads."""
    read = {name for unit in part.units for scope, name in unit.reads if scope == "shared"}
    written = {name for unit in part.units for scope, name in unit.writes if scope == "shared"}
    anything = any(unit.is_barrier for unit in part.units)  # may write any name
    needs = {name for unit in algorithm.units(pipeline) for scope, name in unit.reads if scope == "shared"} - written
    asked = read & {*pipeline.inputs, *needs} | (set() if anything else set(algorithm.reads(pipeline)) - written)
    if lacking := sorted(asked - set(source.names)):
        what = f"the data give {', '.join(source.names)}, and not {', '.join(lacking)}"
        bring = BROUGHT_BY.get(lacking[0]) or PICTURE.format(lacking[0])
        raise ConfigError("data.source", what, f"use data that have it, e.g. {bring}, or a task or model that does without")
    used = {*read, *algorithm.reads(pipeline), *Source.names}
    idle = [] if anything else [name for name in source.names if name not in used]
    return [f"data: {name} is read by nothing in this model and task" for name in idle]


def check_single(pipeline: Pipeline, algorithm: Algorithm, rows: Sequence[Row]) -> None:
    """A name that stands for one picture is given one by every row. Raises ConfigError."""
    single = {*pipeline.pictures, *(name for unit in algorithm.units(pipeline) for scope, name in unit.reads if scope == "shared")}
    for row in rows:
        if listed := sorted(name for name in single & set(row.files) if isinstance(row.files[name], tuple)):
            what = f"{listed[0]} is a list of {len(row.files[listed[0]])} pictures in row {row.id}, and this model and task take one"
            fix = "give each picture a column and a name of its own, as condition, condition_2 with model.conditions=2"
            raise ConfigError("data", what, fix)


def check_sizes(pipeline: Pipeline, weights: str | None, shapes: Collection[Shape]) -> list[str]:
    """A warning when a model with weights would learn from thumbnails alone: the options of data set sizes for tiny networks.

    Where nothing is decoded, latents are the pixels themselves, and any size will do."""
    if weights is None or not pipeline.decoders or any(min(shape[-2:]) >= LEAST_LATENTS * pipeline.reduction for shape in shapes):
        return []
    largest = max(shapes, key=lambda shape: min(shape[-2:]))
    height, width = (side // pipeline.reduction for side in largest[-2:])
    return [f"data: {pixels(largest)} are only {height}x{width} latents, far from what the model has learned; "
            "set the size, e.g. data.geometry.size=[1024,1024]"]  # fmt: skip


def make_batches(run: Run, rows: Sequence[Row]) -> Batches:
    """Raises ConfigError when some rows would be in no batch, ever."""
    train = run.train
    try:
        return Batches([row.shape for row in rows], train.batch_size, train.accumulate, train.repeat, run.seed,
                       run.processes, train.remainder)  # fmt: skip
    except ValueError as error:
        (shape,) = error.args
        lost = [row.id for row in rows if row.shape == shape]
        what = f"drop leaves out all rows of {pixels(shape)}, too few for a batch of {train.batch_size}: {names(lost)}"
        raise ConfigError("train.remainder", what, "use short or repeat, or smaller batches") from error


def check_batch(run: Run, part: Split) -> list[str]:
    """Encoding several rows at once is of use, and is said to change last bits. Raises ConfigError."""
    if run.cache.batch == 1:
        return []
    able = [part.units[i].name for i in part.needed if part.units[i].process_rows is not None]
    if not able:
        raise ConfigError("cache.batch", f"is {run.cache.batch}, but no cached unit can encode several rows at once", "give 1")
    return [
        f"cache: {', '.join(able)} encode {run.cache.batch} rows at once, so losses may differ in their last bits from those of one stage"
    ]


def _outline(name: str, component: Component) -> Module:
    try:
        return component.outline()
    except (ValueError, TypeError, AssertionError, ArithmeticError, IndexError, RuntimeError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"model.components.{name}", f"the network cannot be made ({said})", "change its settings") from error
