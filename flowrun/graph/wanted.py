"""Walking the order backward: which parameters hold a value that is still read later."""

from __future__ import annotations

from collections.abc import Collection

from flowrun.graph.unit import Param, Unit


class Wanted:
    """A set of parameters, or everything but a set: the latter after barriers and when all is read at the end."""

    def __init__(self, params: Collection[Param] | None) -> None:
        """params: read after the last unit; None: everything."""
        self._everything = params is None
        self._params = set(params or ())  # the exceptions when everything is wanted

    def __contains__(self, param: Param) -> bool:
        return (param in self._params) != self._everything

    def __bool__(self) -> bool:
        return self._everything or bool(self._params)

    def isdisjoint(self, params: Collection[Param]) -> bool:
        return not any(param in self for param in params)

    def outputs(self, unit: Unit) -> list[Param]:
        """Declared outputs of `unit` that are read later. A barrier declares none: ask for truth instead."""
        return sorted(param for param in unit.writes if param in self)

    def before(self, unit: Unit) -> None:
        """Step back over `unit`: what it surely writes was not wanted before it, what it reads was."""
        if unit.is_barrier:
            self._everything, self._params = True, set()
            return
        self.replaced_by(unit)
        (self._params.difference_update if self._everything else self._params.update)(unit.reads)

    def replaced_by(self, unit: Unit) -> None:
        """Values from before `unit` of what it surely writes are not read later."""
        (self._params.update if self._everything else self._params.difference_update)(unit.certain_writes)
