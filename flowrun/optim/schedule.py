"""The learning rate over the optimiser updates: any schedule of transformers, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from flowrun import config
from flowrun.config import ConfigError
from flowrun.optim.optimizer import make_optimizer
from flowrun.spelling import suggest

# These look at a validation score; training here has none to give them.
NEED_A_SCORE = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
# Filled from the run. num_stable_steps follows from the others.
OWN_ARGUMENTS = ("optimizer", "num_warmup_steps", "num_training_steps", "num_stable_steps", "last_epoch")


def make_schedule(settings: config.Optimizer, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """The configured schedule over `total_steps` optimiser updates; step it once after each.

    Raises ConfigError for an unknown name, an argument that the schedule does not take, or one that it refuses."""
    names = {kind.value: kind for kind in SchedulerType if kind not in NEED_A_SCORE}
    if settings.schedule not in names:
        raise ConfigError("optimizer.schedule", f"there is no {settings.schedule}",
                          f"one of {', '.join(sorted(names))}")
    taken = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[names[settings.schedule]]).parameters
    _check(settings, [name for name in taken if name not in OWN_ARGUMENTS], "num_warmup_steps" in taken)
    try:
        return get_scheduler(settings.schedule, optimizer, num_warmup_steps=settings.warmup_steps,
                             num_training_steps=total_steps, scheduler_specific_kwargs=dict(settings.schedule_args))
    except (TypeError, ValueError) as error:
        raise ConfigError("optimizer.schedule_args", f"{settings.schedule} refuses them ({error})",
                          "see the schedule in transformers.optimization") from error


def check_optimizer(settings: config.Optimizer, total_steps: int) -> list[str]:
    """Everything that `make_optimizer` and `make_schedule` would refuse, found without the model; returns warnings."""
    parameter = Parameter(torch.zeros(2, 2))
    optimizer = make_optimizer(settings, {"stand-in": parameter})
    schedule = make_schedule(settings, optimizer, total_steps)
    parameter.grad = torch.zeros(2, 2)
    _try("optimizer.args", optimizer.step)
    for step in {0, settings.warmup_steps, total_steps - 1, total_steps}:
        _try("optimizer.schedule_args", lambda step=step: [rate(step) * 1.0 for rate in schedule.lr_lambdas])
    if settings.warmup_steps <= total_steps:
        return []
    return [f"optimizer.warmup_steps is {settings.warmup_steps} but the run has {total_steps} steps: the learning rate "
            "never reaches optimizer.lr"]


def _try(key: str, act: Callable[[], object]) -> None:
    """What a first step would raise, before the run instead of in it."""
    try:
        act()
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(key, f"a step with these settings fails ({said})", "give values that the class takes") from error


def _check(settings: config.Optimizer, arguments: list[str], has_warmup: bool) -> None:
    if settings.warmup_steps and not has_warmup:
        raise ConfigError("optimizer.warmup_steps", f"{settings.schedule} has no warm-up",
                          "use optimizer.schedule=constant_with_warmup, or set it to 0")
    for name in settings.schedule_args:
        if name not in arguments:
            raise ConfigError(f"optimizer.schedule_args.{name}", f"{settings.schedule} takes no {name}",
                              suggest(name, arguments))
