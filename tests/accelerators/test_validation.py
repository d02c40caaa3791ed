"""Which accelerator may stand where, for which algorithm: the whole table.   pytest tests/accelerators/test_validation.py"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from flowrun.accelerators import Accelerator, validate
from flowrun.algorithms import Algorithm, Paradigm, Rereads
from flowrun.config import ConfigError


class SharedLossless(Accelerator):
    stage, safety = "both", "lossless"


class SharedLossy(Accelerator):
    stage, safety = "both", "lossy"


class RolloutLossless(Accelerator):
    stage, safety = "rollout", "lossless"


class RolloutLossy(Accelerator):
    stage, safety = "rollout", "lossy"


ALL = (SharedLossless, SharedLossy, RolloutLossless, RolloutLossy)


def algorithm(paradigm: Paradigm | None, rereads: Rereads, rescores: bool = False) -> type[Algorithm]:
    markers = {"rereads": rereads, "rescores": rescores} | ({} if paradigm is None else {"paradigm": paradigm})
    return type("Some", (Algorithm,), markers)


COUPLED = algorithm(Paradigm.coupled, Rereads.log_probs)
DECOUPLED = algorithm(Paradigm.decoupled, Rereads.final_latent)
DISTILLATION = algorithm(Paradigm.distillation, Rereads.states)
UNDECLARED = algorithm(None, Rereads.final_latent)
NO_ROLLOUTS = algorithm(Paradigm.decoupled, Rereads.nothing)
NEITHER = algorithm(None, Rereads.nothing)
ALGORITHMS = (COUPLED, DECOUPLED, DISTILLATION, UNDECLARED, NO_ROLLOUTS, NEITHER, None)
PASS, RATIO, WATCH, ABOUT_1 = "", "biases the importance ratio", "watch the rewards' mean and standard deviation", "about 1, not exactly 1"
IDLE, UNDECLARED_ERROR = "it would do nothing", "declares no paradigm"

TABLE = [  # slot, accelerator, algorithm, "warning"|"error"|"pass", part of the message
    *[("shared", cls, a, "error", "works in rollouts only; choose it with 'acceleration/rollout=[") for cls in ALL[2:] for a in ALGORITHMS],
    *[("shared", SharedLossless, a, "pass", PASS) for a in ALGORITHMS],
    ("shared", SharedLossy, COUPLED, "warning", ABOUT_1),
    *[("shared", SharedLossy, a, "pass", PASS) for a in (DECOUPLED, DISTILLATION, NO_ROLLOUTS, NEITHER, None)],
    ("shared", SharedLossy, UNDECLARED, "error", UNDECLARED_ERROR),
    *[("rollout", cls, a, "error", "as a change of rollouts it would do nothing; choose it with 'acceleration/shared=[") for cls in ALL[:2]
      for a in ALGORITHMS],
    *[("rollout", cls, a, "error", IDLE) for cls in ALL[2:] for a in (NO_ROLLOUTS, NEITHER, None)],
    *[("rollout", RolloutLossless, a, "pass", PASS) for a in (COUPLED, DECOUPLED, DISTILLATION, UNDECLARED)],
    ("rollout", RolloutLossy, UNDECLARED, "error", UNDECLARED_ERROR),
    ("rollout", RolloutLossy, COUPLED, "error", RATIO),
    *[("rollout", RolloutLossy, a, "warning", WATCH) for a in (DECOUPLED, DISTILLATION)],
    # whatever the paradigm says
    *[("rollout", RolloutLossy, algorithm(p, Rereads.transitions), "error", "computes steps of its rollouts once more")
      for p in (Paradigm.decoupled, Paradigm.distillation)],
    *[("rollout", RolloutLossy, algorithm(p, Rereads.log_probs), "error", "computes log-probabilities of its rollouts once more")
      for p in (Paradigm.decoupled, Paradigm.distillation)],
    ("rollout", RolloutLossy, algorithm(Paradigm.coupled, Rereads.log_probs, rescores=True), "warning", "only a truncated weight"),
    ("rollout", RolloutLossy, algorithm(Paradigm.coupled, Rereads.transitions, rescores=True), "error", RATIO),
    ("rollout", RolloutLossy, algorithm(Paradigm.distillation, Rereads.transitions, rescores=True), "error", "once more and compares"),
    ("shared", SharedLossy, algorithm(Paradigm.coupled, Rereads.log_probs, rescores=True), "warning", ABOUT_1),
    *[(slot, cls, a, "error", f"acceleration.{slot}: is no slot; ") for slot in ("sharde", "train") for cls in ALL for a in ALGORITHMS],
]  # fmt: skip


def test_every_cell_of_the_table_is_asked() -> None:
    asked = {(slot, cls, a) for slot, cls, a, *_ in TABLE}
    assert asked >= {(slot, cls, a) for slot in ("shared", "rollout") for cls in ALL for a in ALGORITHMS}


@pytest.mark.parametrize(("slot", "cls", "algorithm", "result", "message"), TABLE)
def test_the_table(slot: str, cls: type[Accelerator], algorithm: type | None, result: str, message: str) -> None:
    if result == "error":
        with pytest.raises(ConfigError) as error:
            validate(slot, cls, algorithm)
        assert message in str(error.value)
        return
    warnings = validate(slot, cls, algorithm)
    assert len(warnings) == (result == "warning")
    assert all(message in warning and f"acceleration.{slot}.{cls.__name__}" in warning for warning in warnings)


def test_an_algorithm_that_says_nothing_of_its_rollouts_is_taken_to_have_some() -> None:
    plain = type("Plain", (), {"paradigm": "decoupled"})  # of another program; names serve for the markers
    (warning,) = validate("rollout", RolloutLossy, plain)
    assert WATCH in warning
    with pytest.raises(ConfigError, match=UNDECLARED_ERROR):
        validate("shared", SharedLossy, type("Bare", (), {}))


@pytest.mark.parametrize("thing", [Algorithm, dict, SharedLossy(None), "torch_compile", None])
def test_what_is_no_class_of_accelerators_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match="no class of accelerators"):
        validate("shared", thing, None)


MARKERS = {"stage": "both", "safety": "lossy"}


@pytest.mark.parametrize(
    ("markers", "message"),
    [
        ({"stage": None}, "Wrong.stage is None; it must be one of both, rollout"),
        ({"stage": "shared"}, "Wrong.stage is 'shared'"),
        ({"safety": None}, "Wrong.safety is None; it must be one of lossless, lossy"),
        ({"safety": "exact"}, "Wrong.safety is 'exact'"),
        ({"safety": ["lossy"]}, "Wrong.safety is"),
        ({"before": "torch_compile"}, "Wrong.before is 'torch_compile'; it must be a tuple of names"),
        ({"conflicts": (Accelerator,)}, "Wrong.conflicts is"),
        ({"Config": dict}, "Wrong.Config must be a dataclass"),
    ],
)
def test_markers_are_checked_when_the_class_is_defined(markers: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as error:
        type("Wrong", (Accelerator,), MARKERS | markers)
    assert message in str(error.value)


def test_a_class_without_markers_is_refused_and_one_inherits_them() -> None:
    with pytest.raises(TypeError, match=r"Bare\.stage is None"):

        class Bare(Accelerator):
            pass

    @dataclass(kw_only=True, slots=True)
    class Config:
        k: int

    child = type("Child", (RolloutLossy,), {"Config": Config})
    assert (child.stage, child.safety) == ("rollout", "lossy")
