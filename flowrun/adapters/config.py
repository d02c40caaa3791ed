"""Settings of an adapter, and what about them is wrong whatever the networks are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flowrun.config import ConfigError
from flowrun.spelling import suggest

AUTO, ALL_LINEAR, PATTERN = "auto", "all-linear", "re:"  # what `targets` may be or start with when it is no list


class Kind(Enum):
    none = "none"
    lora = "lora"


class Variant(Enum):
    """What the adapter makes of a weight W [out, in]; formulas in `flowrun.adapters.layouts`."""

    lora = "lora"
    rslora = "rslora"
    dora = "dora"
    lokr = "lokr"
    loha = "loha"


PRODUCTS = (Variant.lokr, Variant.loha)  # no B A: products of Kronecker and Hadamard


class Form(Enum):
    """Of a result; see `flowrun.adapters.export`."""

    diffusers = "diffusers"
    peft = "peft"
    comfyui = "comfyui"
    kohya = "kohya"


@dataclass(frozen=True)
class Preset:
    """An adapter that is merged into the frozen base before training, `scale` times."""

    path: str
    scale: float


@dataclass(kw_only=True, slots=True)
class Config:
    kind: Kind                      # none: task.trainable_models are trained as they are | lora
    variant: Variant | None         # lora | rslora | dora | lokr | loha
    lora_base_model: list[str]      # components that carry an adapter
    targets: Any                    # auto: the pipeline's own list | all-linear | names or ends of names | re:PATTERN
    rank: int | None                # r
    alpha: float | None             # scale of B A, with r
    dropout: float | None           # share of the adapter's inputs that is zeroed in training
    init_from: str | None           # an adapter file (or its directory) to start from; null: one that changes nothing
    merge_first: list[Any]          # adapters that become part of the base: paths, or {path: ..., scale: ...}
    export: list[Form]              # forms of the result beside its own: diffusers | peft | comfyui | kohya

    def __post_init__(self) -> None:
        if self.kind is Kind.none:
            self._check_none()
        else:
            self._check_lora()

    @property
    def own_form(self) -> Form:
        """That in which a result is always saved."""
        return Form.peft if self.variant in PRODUCTS else Form.diffusers

    @property
    def presets(self) -> list[Preset]:
        """Raises ConfigError for an entry that is none."""
        return [_preset(entry) for entry in self.merge_first]

    def _check_none(self) -> None:
        for name in ("variant", "lora_base_model", "rank", "alpha", "dropout", "init_from", "merge_first", "export"):
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
        if self.variant in PRODUCTS and self.dropout:
            raise ConfigError("adapter.dropout", f"is {self.dropout:g}, but {self.variant.value} multiplies weights and has "
                              "no inputs of its own to drop", "set it to 0")
        _check_targets(self.targets)
        _ = self.presets


def _preset(entry: Any) -> Preset:
    if isinstance(entry, str):
        return Preset(entry, 1.0)
    if not isinstance(entry, Mapping):
        raise ConfigError("adapter.merge_first", f"holds {entry!r}", "give paths, or {path: PATH, scale: NUMBER}")
    for name in entry:
        if name not in ("path", "scale"):
            raise ConfigError("adapter.merge_first", f"{name} is no part of an entry", suggest(str(name), ["path", "scale"]))
    path, scale = entry.get("path"), entry.get("scale", 1.0)
    if not isinstance(path, str) or isinstance(scale, bool) or not isinstance(scale, int | float) or not scale:
        raise ConfigError("adapter.merge_first", f"holds {dict(entry)}", "path is a text and scale a number other than 0")
    return Preset(path, float(scale))


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
