"""The conditions of the empty caption, beside those of a row's own: what classifier-free guidance subtracts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flowrun.cache.code import code_identity
from flowrun.graph import Unit, UnitGraph
from flowrun.pipelines import NEGATIVE

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline


def negative_units(pipeline: Pipeline) -> tuple[Unit, ...]:
    """The pipeline's units that make its conditions, on the empty caption. They read no data, so all rows share one value."""
    units = pipeline.units()
    needed = sorted(UnitGraph(units).needed_for([("shared", name) for name in pipeline.conditions]))
    return tuple(_negative(units[i]) for i in needed)


def negative_conditions(pipeline: Pipeline) -> tuple[str, ...]:
    return tuple(f"{NEGATIVE}{name}" for name in pipeline.conditions)


def negative_of(pipeline: Pipeline, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Condition -> its values for the empty caption, [B, ...]."""
    return {name: batch[f"{NEGATIVE}{name}"] for name in pipeline.conditions}


def _negative(unit: Unit) -> Unit:
    return replace(
        unit,
        name=f"{NEGATIVE}{unit.name}",
        input_params=tuple(f"{NEGATIVE}{name}" for name in unit.input_params if name != "prompt"),
        output_params=tuple(f"{NEGATIVE}{name}" for name in unit.output_params),
        process=_OnNothing(unit),
        process_rows=None,
        settings={"unit": code_identity(unit).hex()},
    )


class _OnNothing:
    """A unit's process with the empty caption, its names prefixed."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __call__(self, ctx: Any, **inputs: Any) -> dict[str, Any]:
        given = {name.removeprefix(NEGATIVE): value for name, value in inputs.items()}
        prompt = {"prompt": ""} if "prompt" in self.unit.input_params else {}
        returned = self.unit.process(ctx, **given, **prompt)
        return {f"{NEGATIVE}{name}": value for name, value in returned.items()}
