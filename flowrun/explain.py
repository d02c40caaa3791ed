"""The plan of an assembled run: rows, units and where each runs, models per stage, cache, steps, results."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from math import ceil
from typing import TYPE_CHECKING

from flowrun import frozen, online, rundir
from flowrun.adapters.config import Kind, Variant
from flowrun.cache.pace import Work
from flowrun.config import Remainder, Run, Stage
from flowrun.plan import Plan, amount, columns, names, pixels, unit_table
from flowrun.prompts import Prompts
from flowrun.remembered import Remembered

if TYPE_CHECKING:
    from flowrun.run import Assembly

SHOWN = 20  # skipped rows listed by name
VARIANTS = {
    Variant.lora: "LoRA", Variant.rslora: "rsLoRA", Variant.dora: "DoRA", Variant.lokr: "LoKr", Variant.loha: "LoHa",
}  # fmt: skip


def explain(assembly: Assembly) -> Plan:
    run, task = assembly.run, assembly.task
    shown = [stage for stage in assembly.stages if stage is not Stage.cache or _to_do(assembly)]
    plan = Plan(f"flowrun {task.name} on {run.model['name']}: {' then '.join(stage.value for stage in shown)}")
    plan.add("data", _data(assembly))
    plan.add("units", unit_table(assembly.split))
    plan.add("models", _models(assembly, Stage.cache in shown))
    if assembly.pipeline.holdings:
        plan.add("memory", _memory(assembly))
    plan.add("cache", _cache(assembly))
    if assembly.learned is not None:
        plan.add("rollout", online.told(assembly.learned, run, assembly.algorithm))
    plan.add("train", _train(assembly))
    for slot, lines in assembly.accelerated.items():
        plan.add(slot, lines)
    plan.add("samples", _samples(assembly))
    plan.add("results", [_place(assembly, stage) for stage in shown])
    return plan


def _place(assembly: Assembly, stage: Stage) -> str:
    """The stage's directory: the one that the run goes on with, or a new one."""
    found = rundir.find(assembly.run, stage.value, assembly.data_stamp) if stage is not Stage.cache else None
    if found is None:
        return str(rundir.place(assembly.run, stage.value))
    return f"{found}, goes on" + (" (resume=none starts anew)" if assembly.run.resume == "auto" else "")


def _data(assembly: Assembly) -> list[str]:
    source = assembly.source
    lines = []
    if isinstance(source, Remembered):
        lines.append(f"the data are gone: rows as listed in {source.manifest.path}")
    lines += [
        f"{amount(len(assembly.rows), 'row')} from {assembly.run.data['source']}"
        + (f", {amount(source.ignored, 'other file')} ignored" if source.ignored else "")
    ]
    lines += [f"skipped {row}: {why}" for row, why in source.skipped[:SHOWN]]
    if len(source.skipped) > SHOWN:
        lines.append(f"and {len(source.skipped) - SHOWN} more skipped")
    if assembly.batches is None:
        return lines + [f"{pixels(shape)}: {amount(count, 'row')}" for shape, count in Counter(row.shape for row in assembly.rows).items()]
    return lines + [_bucket(assembly, size, count) for size, count in assembly.batches.buckets.items()]


def _bucket(assembly: Assembly, shape: tuple[int, ...], count: int) -> str:
    """How many rows have the shape; what becomes of those that fill no batch, by name where all of them do not."""
    train, line, left = assembly.run.train, f"{pixels(shape)}: {amount(count, 'row')}", assembly.batches.left_over[shape]
    if count * train.repeat < train.batch_size:
        rows = names([row.id for row in assembly.rows if row.shape == shape])
        what = "in short batches" if train.remainder is Remainder.short else "drawn again until it is full"
        return f"{line}, less than a batch of {train.batch_size}, so {what}: {rows}"
    if not left:
        return line
    return line + {
        Remainder.short: f", of which {left} make a short batch in each epoch",
        Remainder.repeat: f", of which {assembly.batches.lacking(shape)} are drawn again in each epoch",
        Remainder.drop: f", of which {left} are left out, others in each epoch",
    }[train.remainder]


def _models(assembly: Assembly, encoding: bool) -> list[str]:
    """Every component, and the stages that load its weights."""
    cache = {*assembly.split.models_cached, *assembly.prompt_split.models_cached} if encoding else ()
    rows = []
    for name in assembly.pipeline.components():
        loaded = [
            stage.value
            for stage, names in ((Stage.cache, cache), (assembly.stages[-1], assembly.train_models))
            if name in names
        ]
        rows.append((name, assembly.pipeline.describe(name), f"loaded in: {', '.join(loaded) or 'no stage'}"))
    return columns(rows)


def _memory(assembly: Assembly) -> list[str]:
    """What the weights take that are not held in full."""
    components, held = assembly.pipeline.components(), assembly.pipeline.holdings
    return frozen.told(held, {name: components[name].outline() for name in held}, assembly.dtype)


def _cache(assembly: Assembly) -> list[str]:
    library = assembly.library
    if library is None:
        return ["not used: every unit is live"]
    keys, missing = library.all_keys(), library.missing()
    jobs = library.work(missing)
    there = f"{amount(len(keys) - len(missing), 'value')} there, {len(missing):,} to make, from {amount(len(jobs), 'row')}"
    if unread := library.sources.unread:
        there += f"; {amount(unread, 'file')} not read yet, which a dry run leaves so (cache.verify=full reads all)"
    return [str(library.root), there, *([_forecast(library.forecast(jobs), len(jobs), assembly.run.processes)] if jobs else [])]


def _forecast(work: Work, rows: int, processes: int) -> str:
    if not work.rows:
        return "how much that is and how long it takes shows after the first rows"
    part = "" if work.rows == rows else f" for {work.rows:,} of them"
    size = f"{work.bytes / 1e9:.1f} GB" if work.bytes > 1e9 else f"{work.bytes / 1e6:.1f} MB"
    time = timedelta(seconds=ceil(work.seconds / processes))
    return f"about {size} and {time} (h:mm:ss){part}, going by earlier runs"


def _to_do(assembly: Assembly) -> bool:
    """Whether the cache stage gets a directory: it does when it has something to make, or was asked for by name."""
    return assembly.run.stage is Stage.cache or bool(assembly.library.missing())


def _train(assembly: Assembly) -> list[str]:
    run, batches = assembly.run, assembly.batches
    adapter = assembly.adapter
    how = f"{VARIANTS[adapter.variant]} rank {adapter.rank}" if adapter.kind is Kind.lora else "all weights"
    least, greatest = assembly.pipeline.trained_range
    part = [] if (least, greatest) == (0.0, 1.0) else [f"noise levels from {least:.4g} to {greatest:.4g}, where it is asked"]
    return [
        f"{', '.join(assembly.trained)}: {how}, {run.precision.value}",
        *part,
        *(f"adapter on {line}" for line in assembly.carriers),
        f"{amount(assembly.steps, 'step')}" + (f" of {_rows(run)}, {batches.epoch_of(assembly.steps):.1f} epochs" if batches else ""),
        f"{run.optimizer.name} lr {run.optimizer.lr:g}, {run.optimizer.schedule}, average of weights {run.optimizer.ema:g}",
    ]


def _rows(run: Run) -> str:
    return f"{run.train.batch_size} rows x {run.train.accumulate} accumulated x {run.processes} processes"


def _samples(assembly: Assembly) -> list[str]:
    sample, drawn = assembly.run.sample, assembly.drawn
    count = len(drawn.prompts) if isinstance(drawn, Prompts) else min(sample.rows, len(assembly.rows))
    if not count:
        return ["none: sample.prompts is empty and sample.rows is 0"]
    what = amount(count, "prompt" if isinstance(drawn, Prompts) else "row")
    return [
        f"{what} x {amount(len(sample.seeds), 'seed')}, {amount(sample.steps, 'solver step')}, guidance "
        f"{sample.guidance:g}, at step 0, every {sample.every} and at the end"
    ]
