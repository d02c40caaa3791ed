"""The typed run: what every section of the configuration may hold, and the errors a user can cause. No torch.

Sections that plug-ins fill (`model`, `data`, `task`, `adapter`, `reward`, `tracker`, both acceleration slots) are open here and
are checked against the plug-in's own `Config` by `flowrun.registry`; `rollout` is checked against flowrun/rollout_settings.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

CPU = "cpu"  # the device's name


class UserError(Exception):
    """Something the user can put right; shown without a traceback. `exit_code` is what the process returns.

    `by_all`: every process of a run raises it, so one of them says it."""

    exit_code = 1
    by_all = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Processes send it to one another; the default would call the class with the message alone."""
        return _restored, (type(self), str(self), self.__dict__)


def _restored(cls: type[UserError], message: str, state: dict[str, Any]) -> UserError:
    error = cls.__new__(cls, message)
    error.__dict__.update(state)
    return error


class ConfigError(UserError):
    """A setting is wrong. Message: `<key>: <what is wrong>; <what would be right>`. All processes check alike."""

    exit_code = 2
    by_all = True

    def __init__(self, key: str, what: str, fix: str = "") -> None:
        self.key, self.what, self.fix = key, what, fix
        super().__init__(f"{key}: {what}" + (f"; {fix}" if fix else ""))


class DataError(UserError):
    """Faults in the user's data, all of them at once: one line per fault, each naming file and row."""

    exit_code = 2

    def __init__(self, faults: list[str], fix: str = "") -> None:
        self.faults, self.fix = list(faults), fix
        super().__init__("\n".join([*faults, *([fix] if fix else [])]))


class Failure(UserError):
    """The run cannot go on for a reason that is known (NaN loss, disk full): what happened and what to do."""

    def __init__(self, what: str, fix: str = "", by_all: bool = False) -> None:
        self.what, self.fix, self.by_all = what, fix, by_all
        super().__init__(what + (f"; {fix}" if fix else ""))


class Stopped(UserError):
    """The user asked the run to end (Ctrl-C, SIGTERM) and it did so in order; the message says what was saved."""

    exit_code = 130
    by_all = True


class Lost(Failure):
    """Another process of the run ended while this one worked with it; that one says why."""

    def __init__(self) -> None:
        super().__init__("another process of this run has ended", "its own message says why", by_all=True)


class Stage(Enum):
    cache = "cache"
    train = "train"
    rollout = "rollout"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Remainder(Enum):
    """What becomes of the rows of one size that are left over when they are divided into batches."""

    short = "short"  # they make a short batch
    repeat = "repeat"  # rows of the same size are drawn once more, so that every batch is full
    drop = "drop"  # they are left out, others in each epoch


class Held(Enum):
    """How a frozen component's weights are held."""

    bnb_nf4 = "bnb_nf4"  # 4 bits a weight, bitsandbytes' normal floats (arXiv 2305.14314)
    bnb_int8 = "bnb_int8"  # 8 bits, bitsandbytes' LLM.int8 (arXiv 2208.07339)
    torchao_int8 = "torchao_int8"  # 8 bits, torchao's weight-only integers
    torchao_float8 = "torchao_float8"  # 8 bits, torchao's weight-only floats
    fp8_cast = "fp8_cast"  # 8-bit floats that diffusers casts to model.dtype, layer by layer, when they are called
    offload = "offload"  # in the CPU's memory, moved to the device layer by layer when they are called


class Verify(Enum):
    """When a cached value's checksum is read: never, at its first read, or for all of them before the run."""

    never = "never"
    first_read = "first_read"
    full = "full"


def one_name(key: str, value: str) -> None:
    """What stands in a directory's name. Raises ConfigError."""
    if not re.fullmatch(r"[\w+-][\w.+-]{0,99}", value):
        fix = "it stands in a directory's name: give up to 100 letters, digits and . _ + -"
        raise ConfigError(key, f"is {value!r}", fix)


def at_least(key: str, value: float | None, least: float) -> None:
    """None is no value. Raises ConfigError."""
    if value is not None and not value >= least:  # written so that NaN is refused too
        raise ConfigError(key, f"is {value}", f"must be at least {least:g}")


@dataclass(kw_only=True, slots=True)
class Optimizer:
    name: str
    lr: float
    betas: list[float] | None
    weight_decay: float
    args: dict[str, Any]
    clip: float | None
    schedule: str
    schedule_args: dict[str, Any]
    warmup_steps: int
    ema: float

    def __post_init__(self) -> None:
        for name, least in (("lr", 0.0), ("weight_decay", 0.0), ("warmup_steps", 0), ("ema", 0.0)):
            at_least(f"optimizer.{name}", getattr(self, name), least)
        if self.clip is not None and self.clip <= 0:
            raise ConfigError("optimizer.clip", f"is {self.clip}", "give a positive norm, or null for no clipping")
        if self.ema >= 1:
            raise ConfigError("optimizer.ema", f"is {self.ema}", "a decay lies in [0, 1); 0 keeps no average")


@dataclass(kw_only=True, slots=True)
class Train:
    steps: int | None
    epochs: int | None
    repeat: int
    batch_size: int
    remainder: Remainder
    accumulate: int
    checkpoint_every: int
    keep: int
    gradient_checkpointing: bool
    log_every: int

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "repeat", "batch_size", "accumulate", "checkpoint_every", "keep", "log_every"):
            at_least(f"train.{name}", getattr(self, name), 1)
        if (self.steps is None) == (self.epochs is None):
            both = "both are given" if self.steps is not None else "neither is given"
            raise ConfigError("train.steps, train.epochs", both, "give one and set the other to null")


@dataclass(kw_only=True, slots=True)
class Memory:
    weights: dict[str, Held]


@dataclass(kw_only=True, slots=True)
class CacheSettings:
    root: str
    batch: int
    flush_mb: float
    flush_s: float
    verify: Verify

    def __post_init__(self) -> None:
        if not self.root:
            raise ConfigError("cache.root", "is empty", "name a folder")
        at_least("cache.batch", self.batch, 1)
        for name in ("flush_mb", "flush_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"cache.{name}", f"is {getattr(self, name)}", "must be positive")


@dataclass(kw_only=True, slots=True)
class Sample:
    prompts: list[str]
    rows: int
    seeds: list[int]
    steps: int
    guidance: float
    every: int

    def __post_init__(self) -> None:
        at_least("sample.rows", self.rows, 0)
        at_least("sample.steps", self.steps, 1)
        at_least("sample.every", self.every, 1)
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ConfigError("sample.prompts", f"is {self.prompts}", 'give texts, ["red apple","a cat"]')
        if (self.prompts or self.rows) and not self.seeds:
            raise ConfigError("sample.seeds", "is empty although there is something to draw", "give at least one seed, e.g. [0]")


@dataclass(kw_only=True, slots=True)
class Model:
    """What every model has; the other fields of the section are its pipeline's own `Config`."""

    name: str
    pipeline: str
    dtype: Precision

    def __post_init__(self) -> None:
        one_name("model.name", self.name)


@dataclass(kw_only=True, slots=True)
class Task:
    """What every task has; the other fields of the section are its algorithm's own `Config`."""

    name: str
    algorithm: str
    splitter: str
    trainable_models: list[str]

    def __post_init__(self) -> None:
        one_name("task.name", self.name)


@dataclass(kw_only=True, slots=True)
class Acceleration:
    """Of a composed run: name -> settings, in the order of application; None: no accelerators.

    bound: greatest |difference| of final latents, with and without accelerators, at which a setting may be recommended
    for an algorithm without a clip range; for others it is a tenth of that range, of log-probabilities."""

    shared: Any = None
    rollout: Any = None
    probe: bool = True
    bound: float = 0.1

    def __post_init__(self) -> None:
        at_least("acceleration.bound", self.bound, 0)


class Best(Enum):
    """Of a figure by which the settings of a sweep are compared."""

    least = "least"
    greatest = "greatest"


@dataclass(kw_only=True, slots=True)
class SweepSettings:
    """figure: of result.json. devices: of jobs side by side, each a GPU's number, several (0,1), or cpu."""

    figure: str | None = None
    best: Best | None = None
    devices: list[str] | None = None

    def __post_init__(self) -> None:
        if (self.figure is None) != (self.best is None):
            given, other = ("figure", "best") if self.best is None else ("best", "figure")
            fix = "say least or greatest" if other == "best" else "name a figure of result.json"
            raise ConfigError(f"multirun.{other}", f"is not given, and multirun.{given} is", fix)
        for device in self.devices or ():
            if not re.fullmatch(rf"{CPU}(:\d+)?|[\w-]+(,[\w-]+)*", device):
                fix = f"give GPUs' numbers or {CPU}, e.g. [0,1] or [{CPU},{CPU}]"
                raise ConfigError("multirun.devices", f"has {device!r}", fix)


@dataclass(kw_only=True, slots=True)
class Run:
    stage: Stage | None
    seed: int
    run_id: str
    resume: str
    dry_run: bool
    processes: int
    precision: Precision
    model: Any = None
    data: Any = None
    task: Any = None
    adapter: Any = None
    optimizer: Optimizer
    train: Train
    memory: Memory
    cache: CacheSettings
    sample: Sample
    rollout: Any = None
    reward: Any = None
    tracker: Any = None
    acceleration: Acceleration = field(default_factory=Acceleration)
    multirun: SweepSettings = field(default_factory=SweepSettings)

    def __post_init__(self) -> None:
        at_least("processes", self.processes, 1)
        one_name("run_id", self.run_id)
        for name in ("model", "data", "task", "adapter", "rollout"):
            if not isinstance(getattr(self, name), dict):
                fix = f"choose an option, {name}=NAME; --help lists them"
                raise ConfigError(name, f"is {getattr(self, name)}", fix)
