"""Short ways to declare a unit, to run a list of them on one row, and to have it refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from flowrun.graph import Draws, Executor, State, UndeclaredEffect, Unit

DRAWS = Draws(seed=0, row_id="row", epoch=0)


def unit(
    name: str,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    process: Callable[..., Any] | None = None,
    models: Sequence[str] = (),
    **flags: Any,
) -> Unit:
    """Shared names only; flags are other fields of Unit."""
    declared = {"input_params": tuple(reads), "output_params": tuple(writes), "onload_model_names": tuple(models)}
    return Unit(name=name, process=process, **declared, **flags)


def run(units: Sequence[Unit], models: Mapping[str, Any] | None = None, **shared: Any) -> dict[str, Any]:
    """The shared scope after all units have run on `shared`."""
    return Executor(units, models or {}).run(State(shared=shared), DRAWS).shared


def refusal(units: Sequence[Unit], models: Mapping[str, Any] | None = None, **shared: Any) -> str:
    """What is said when running `units` on `shared` is refused."""
    with pytest.raises(UndeclaredEffect) as caught:
        run(units, models, **shared)
    return str(caught.value)
