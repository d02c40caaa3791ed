"""From the slots of the configuration to checked accelerators, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from flowrun.accelerators._accelerator import SLOTS, Accelerator
from flowrun.accelerators._validate import validate
from flowrun.config import Acceleration, ConfigError
from flowrun.paradigm import Rereads
from flowrun.registry import ACCELERATORS

if TYPE_CHECKING:
    from flowrun.pipelines import Pipeline


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Accelerators of each slot in the order of application, and warnings about them."""

    shared: tuple[Accelerator, ...] = ()
    rollout: tuple[Accelerator, ...] = ()
    warnings: tuple[str, ...] = ()

    def check(self, pipeline: Pipeline) -> dict[str, list[str]]:
        """Slot -> what its accelerators do to each component, for the plan; without the slots that are empty.

        Raises ConfigError for what this pipeline or this machine cannot do."""
        slots = {"shared": self.shared, "rollout": self.rollout}
        return {slot: [line for one in chosen for line in _lines(one, pipeline)] for slot, chosen in slots.items() if chosen}


def choose(acceleration: Acceleration, algorithm: type | None) -> Chosen:
    """Raises ConfigError for unknown names and settings, wrong slots and order, and what the algorithm does not admit."""
    slots = {slot: _classes(slot, getattr(acceleration, slot) or {}) for slot in ("shared", "rollout")}
    warnings = [text for slot, found in slots.items() for cls, _ in found for text in validate(slot, cls, algorithm)]
    _refuse_conflicts([cls for found in slots.values() for cls, _ in found])
    for slot, found in slots.items():
        _check_order(slot, [cls for cls, _ in found])
    rereads = Rereads(getattr(algorithm, "rereads", Rereads.nothing))
    made = {slot: tuple(_make(cls, node, rereads) for cls, node in found) for slot, found in slots.items()}
    return Chosen(**made, warnings=tuple(warnings))


def _lines(accelerator: Accelerator, pipeline: Pipeline) -> list[str]:
    head = f"{accelerator.called()} ({accelerator.safety})"
    return [f"{head}: {line}" for line in accelerator.check(pipeline)] or [head]


def _classes(slot: str, chosen: Mapping[str, Mapping[str, Any]]) -> list[tuple[type[Accelerator], dict[str, Any]]]:
    """(class, settings) of each entry. Settings may name a class of the user's own as `target`."""
    found = []
    for name, settings in chosen.items():
        key = f"acceleration.{slot}.{name}"
        cls = ACCELERATORS.find(_with_colon(str(settings.get("target", name))), key)
        if cls in (other for other, _ in found):
            raise ConfigError(key, f"{cls.called()} is chosen twice", "name each accelerator once")
        found.append((cls, {field: value for field, value in settings.items() if field != "target"}))
    return found


def _with_colon(name: str) -> str:
    """pkg.module.Class -> pkg.module:Class."""
    module, _, last = name.rpartition(".")
    return f"{module}:{last}" if module and ":" not in name else name


def _make(cls: type[Accelerator], settings: Mapping[str, Any], rereads: Rereads) -> Accelerator:
    own = {field.name for field in fields(cls.Config)}
    further = {name: value for name, value in settings.items() if name not in own}
    node = {name: value for name, value in settings.items() if name in own}
    if isinstance(rest := node.get(cls.rest), Mapping):
        node[cls.rest] = {name: value for name, value in rest.items() if value is not None}  # null: as the library has it
    if further and cls.rest is not None:
        given = node.get(cls.rest) or {}
        if twice := sorted(further.keys() & given.keys()):
            raise ConfigError(f"{cls.key()}.{twice[0]}", f"stands in {cls.rest} too", "give it once")
        further = {cls.rest: {**given, **further}}
    return cls(ACCELERATORS.build(cls.key(), cls, {**node, **further}), rereads)


def _refuse_conflicts(classes: Sequence[type[Accelerator]]) -> None:
    for cls in classes:
        for other in classes:
            if other.called() in cls.conflicts:
                raise ConfigError(cls.key(), f"cannot be together with {other.called()}", "choose one of the two")


def _check_order(slot: str, classes: Sequence[type[Accelerator]]) -> None:
    """`before` and `after` hold. Raises ConfigError that shows the right order."""
    late = [(cls, other) for i, cls in enumerate(classes) for other in classes[i + 1 :] if _precedes(other, cls)]
    if late:
        cls, other = late[0]
        right = ", ".join(one.called() for one in _sorted(classes))
        what = f"{other.called()} must come before {cls.called()}"
        raise ConfigError(f"acceleration.{slot}", what, f"the right order is [{right}]")


def _precedes(one: type[Accelerator], other: type[Accelerator]) -> bool:
    return other.called() in one.before or one.called() in other.after


def _sorted(classes: Sequence[type[Accelerator]]) -> list[type[Accelerator]]:
    """As given, but for what must come before. Raises ConfigError when that is a circle."""
    left, order = list(classes), []
    while left:
        free = next((cls for cls in left if not any(_precedes(other, cls) for other in left if other is not cls)), None)
        if free is None:
            names = ", ".join(cls.called() for cls in left)
            raise ConfigError(f"acceleration.{SLOTS[left[0].stage]}", f"each of {names} must come before another", "leave one out")
        left.remove(free)
        order.append(free)
    return order
