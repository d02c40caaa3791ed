"""Settings of an adapter, and what about them is wrong whatever the networks are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flowrun.config import ConfigError

AUTO, ALL_LINEAR, PATTERN = "auto", "all-linear", "re:"  # what `targets` may be or start with when it is no list


class Kind(Enum):
    none = "none"
    lora = "lora"


class Variant(Enum):
    """What the adapter makes of a weight W [out, in] with A [r, in], B [out, r]; formulas in `flowrun.adapters.lora`."""

    lora = "lora"
    rslora = "rslora"
    dora = "dora"


@dataclass(kw_only=True, slots=True)
class Config:
    kind: Kind                      # none: task.trainable_models are trained as they are | lora
    variant: Variant | None         # lora | rslora | dora
    lora_base_model: list[str]      # components that carry an adapter
    targets: Any                    # auto: the pipeline's own list | all-linear | names or ends of names | re:PATTERN
    rank: int | None                # r
    alpha: float | None             # scale of B A, with r
    dropout: float | None           # share of the adapter's inputs that is zeroed in training
    init_from: str | None           # an adapter file (or its directory) to start from; null: A random, B zero

    def __post_init__(self) -> None:
        if self.kind is Kind.none:
            self._check_none()
        else:
            self._check_lora()

    def _check_none(self) -> None:
        for name in ("variant", "lora_base_model", "rank", "alpha", "dropout", "init_from"):
            value = getattr(self, name)
            if value not in (None, []):
                shown = value.value if isinstance(value, Enum) else value
                raise ConfigError(f"adapter.{name}", f"is {shown}, which adapter.kind=none does not use",
                                  "use adapter=lora")

    def _check_lora(self) -> None:
        if not self.lora_base_model:
            raise ConfigError("adapter.lora_base_model", "is empty", "name the components that carry the adapter")
        for name, least in (("rank", 1), ("alpha", 0), ("dropout", 0)):
            value = getattr(self, name)
            if value is None or value < least:
                raise ConfigError(f"adapter.{name}", f"is {value}", f"must be a number of at least {least}")
        if self.alpha == 0 or self.dropout >= 1:
            raise ConfigError("adapter.alpha, adapter.dropout", f"are {self.alpha}, {self.dropout}: the adapter has "
                              "no effect", "alpha must be positive and dropout below 1")
        if self.variant is None:
            raise ConfigError("adapter.variant", "is null", f"use {', '.join(v.value for v in Variant)}")
        _check_targets(self.targets)


def _check_targets(targets: Any) -> None:
    """A word, a pattern after `re:`, or a list of names; layers' names have no colon, so that none of them is another."""
    if isinstance(targets, str):
        if targets in (AUTO, ALL_LINEAR):
            return
        if targets.startswith(PATTERN):
            try:
                re.compile(targets.removeprefix(PATTERN))
            except re.error as error:
                raise ConfigError("adapter.targets", f"{targets} is no regular expression ({error})",
                                  r"give one as Python reads them, e.g. re:.*\.to_[qk]") from error
            return
    elif isinstance(targets, Sequence) and targets and all(isinstance(target, str) for target in targets):
        for target in targets:
            if target in (AUTO, ALL_LINEAR) or target.startswith(PATTERN):
                raise ConfigError("adapter.targets", f"holds {target} in a list", f"write {target} alone")
        return
    raise ConfigError("adapter.targets", f"is {targets}", r"use auto, all-linear, a list of layers as [to_q,to_k], or "
                      r"a regular expression as re:.*\.to_[qk]")
