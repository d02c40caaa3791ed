"""The conditions of the empty caption, beside those of a row's own: what classifier-free guidance subtracts.

Only what follows from the caption has another value for it: `negative_NAME`. A unit that reads a row's pictures too makes
that value for each row; one that reads the caption alone makes one for all rows.
"""

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

CAPTION = "prompt"


def negative_units(pipeline: Pipeline) -> tuple[Unit, ...]:
    """The pipeline's units on the way from the caption to its conditions, on the empty caption."""
    units, named = _of_caption(pipeline)
    return tuple(_negative(unit, named) for unit in units)


def negative_conditions(pipeline: Pipeline) -> tuple[str, ...]:
    """Names of the conditions that the empty caption changes."""
    _, named = _of_caption(pipeline)
    return tuple(f"{NEGATIVE}{name}" for name in pipeline.conditions if name in named)


def negative_of(pipeline: Pipeline, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Condition -> its values for the empty caption, [B, ...]; of those that the caption does not reach, the row's own."""
    own = {name: f"{NEGATIVE}{name}" for name in pipeline.conditions}
    return {name: batch[negative if negative in batch else name] for name, negative in own.items()}


def _of_caption(pipeline: Pipeline) -> tuple[list[Unit], set[str]]:
    """Units that the conditions need and that the caption reaches, in order; the names that it reaches through them."""
    units, found, named = pipeline.units(), [], set()
    for i in sorted(UnitGraph(units).needed_for([("shared", name) for name in pipeline.conditions])):
        if {CAPTION, *named} & set(units[i].input_params):
            found.append(units[i])
            named |= set(units[i].output_params)
    return found, named


def _negative(unit: Unit, named: set[str]) -> Unit:
    return replace(
        unit,
        name=f"{NEGATIVE}{unit.name}",
        input_params=tuple(f"{NEGATIVE}{n}" if n in named else n for n in unit.input_params if n != CAPTION),
        output_params=tuple(f"{NEGATIVE}{name}" for name in unit.output_params),
        process=_OnNothing(unit),
        process_rows=None,
        settings={"unit": code_identity(unit).hex()},
    )


class _OnNothing:
    """A unit's process with the empty caption, the names that follow from it prefixed."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __call__(self, ctx: Any, **inputs: Any) -> dict[str, Any]:
        given = {name.removeprefix(NEGATIVE): value for name, value in inputs.items()}
        caption = {CAPTION: ""} if CAPTION in self.unit.input_params else {}
        returned = self.unit.process(ctx, **given, **caption)
        return {f"{NEGATIVE}{name}": value for name, value in returned.items()}
