"""Which accelerator may stand in which slot for which algorithm: a pure function of the three."""

from __future__ import annotations

from flowrun.accelerators._accelerator import SLOTS, Accelerator
from flowrun.config import ConfigError
from flowrun.paradigm import Paradigm, Rereads
from flowrun.spelling import suggest


def validate(slot: str, accelerator: type[Accelerator], algorithm: type | None) -> list[str]:
    """Warnings about this class of accelerator in `slot`, shared or rollout, for this class of algorithm; None: a stage
    without one, and without rollouts. Says nothing of settings.

    Raises ConfigError when it must not be, TypeError when `accelerator` is no class of accelerators."""
    if slot not in SLOTS.values():
        raise ConfigError(f"acceleration.{slot}", "is no slot", suggest(slot, SLOTS.values()))
    if not (isinstance(accelerator, type) and issubclass(accelerator, Accelerator)):
        raise TypeError(f"{accelerator!r} is no class of accelerators; derive it from flowrun.accelerators.Accelerator")
    name, key = accelerator.called(), f"acceleration.{slot}.{accelerator.called()}"
    if SLOTS[accelerator.stage] != slot:
        what = "works in rollouts only" if slot == "shared" else "changes training too, so as a change of rollouts it would do nothing"
        raise ConfigError(key, what, f"choose it with 'acceleration/{SLOTS[accelerator.stage]}=[{name}]'")
    if slot == "rollout" and not _rolls_out(algorithm):
        told = "this stage" if algorithm is None else _name(algorithm)
        raise ConfigError(key, f"{told} has no rollouts, so it would do nothing", "set 'acceleration/rollout=[]'")
    if accelerator.safety == "lossless":
        return []
    return _lossy_shared(key, algorithm) if slot == "shared" else _lossy_rollout(key, algorithm)


def _lossy_shared(key: str, algorithm: type | None) -> list[str]:
    paradigm = _paradigm(algorithm)
    if paradigm is None and _rolls_out(algorithm):
        raise _undeclared(key, algorithm)
    if paradigm is not Paradigm.coupled:
        return []
    return [f"{key}: is lossy: the importance ratio of an unchanged policy is about 1, not exactly 1"]


def _lossy_rollout(key: str, algorithm: type) -> list[str]:
    paradigm, rereads = _paradigm(algorithm), getattr(algorithm, "rereads", None)
    rescored = getattr(algorithm, "rescores", False) and rereads != Rereads.transitions
    if paradigm is None:
        raise _undeclared(key, algorithm)
    exact = "leave it out; acceleration.shared changes rollout and training alike"
    if paradigm is Paradigm.coupled and not rescored:
        what = f"is lossy, and {_name(algorithm)} takes log-probabilities from its rollouts: it biases the importance ratio"
        raise ConfigError(key, what, f"{exact}; task=grpo_rescored weighs for it, and tasks that do without log-probabilities may have it")
    if rereads is not None and Rereads(rereads).stepwise and not rescored:
        what = f"is lossy, and {_name(algorithm)} computes {_words(Rereads(rereads))} of its rollouts once more and compares"
        raise ConfigError(key, what, exact)
    if paradigm is Paradigm.coupled:
        return [f"{key}: is lossy: the log-probabilities of the rollout are only a truncated weight here; watch weight/ess and weight/lost"]
    return [f"{key}: is lossy: rollouts come from another distribution; watch the rewards' mean and standard deviation"]


def _rolls_out(algorithm: type | None) -> bool:
    """What says nothing is taken to sample."""
    return algorithm is not None and getattr(algorithm, "rereads", None) != Rereads.nothing


def _paradigm(algorithm: type | None) -> Paradigm | None:
    found = getattr(algorithm, "paradigm", None)
    return None if found is None else Paradigm(found)


def _undeclared(key: str, algorithm: type) -> ConfigError:
    what = f"is lossy, and {_name(algorithm)} declares no paradigm"
    return ConfigError(key, what, f"give {_name(algorithm)} one: paradigm = Paradigm.{'|'.join(Paradigm.__members__)}")


def _name(algorithm: type) -> str:
    return getattr(algorithm, "__name__", repr(algorithm))


def _words(rereads: Rereads) -> str:
    return "steps" if rereads is Rereads.transitions else "log-probabilities"
