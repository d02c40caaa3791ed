"""Which layers carry an adapter: the pipeline's own list or those that `blocks` finds, all linear ones, named ones, or those
that a pattern matches.

A network's layers have dotted names, `transformer_blocks.0.attn.to_q`. What is resolved here is given to peft as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch.nn import Linear, Module

from flowrun.adapters import blocks
from flowrun.adapters.config import ALL_LINEAR, AUTO, PATTERN, Config
from flowrun.config import ConfigError
from flowrun.spelling import suggest

Targets = list[str] | str  # as peft's `target_modules`: names or ends of names | all-linear, or a pattern for whole names


def resolve(models: Mapping[str, Module], config: Config, own: Mapping[str, Sequence[str] | str]) -> dict[str, Targets]:
    """Component -> what of `config.targets` it carries. own: the pipeline's lists or patterns, for auto.

    Raises ConfigError, with near names, for an entry that matches no layer or a component that none matches."""
    if config.targets == ALL_LINEAR:
        return dict.fromkeys(models, ALL_LINEAR)
    if isinstance(config.targets, str) and config.targets.startswith(PATTERN):
        return dict.fromkeys(models, _pattern(models, config.targets.removeprefix(PATTERN)))
    if config.targets == AUTO:
        return {name: _auto(name, model, own.get(name, ())) for name, model in models.items()}
    return _listed(models, config.targets)


def layers(model: Module, targets: Targets) -> list[str]:
    """Names of the linear layers that resolved targets mean."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, Linear)]
    if targets == ALL_LINEAR:
        return names
    if isinstance(targets, str):
        return [name for name in names if re.fullmatch(targets, name)]
    return [name for name in names if any(f".{name}".endswith(f".{end}") for end in targets)]


def _auto(name: str, model: Module, own: Sequence[str] | str) -> Targets:
    if isinstance(own, str):
        return _pattern({name: model}, own)
    if not own:
        found = blocks.pattern(model)
        if found is None:
            what = f"auto: the pipeline lists no layers for {name}, and it has no repeated blocks with linear layers"
            raise ConfigError("adapter.targets", what, "give a list, or all-linear")
        return found
    return _listed({name: model}, own)[name]


def _listed(models: Mapping[str, Module], entries: Sequence[str]) -> dict[str, list[str]]:
    """Each entry must be a layer, or the end of a layer's name, in at least one model; each model must have one."""
    found = {name: [e for e in entries if any(f".{n}".endswith(f".{e}") for n in _layers(model))]
             for name, model in models.items()}
    for entry in entries:
        if not any(entry in matching for matching in found.values()):
            raise ConfigError("adapter.targets", f"{entry} matches no layer of {', '.join(models)}",
                              suggest(entry, _ends(models.values(), entry)))
    for name, matching in found.items():
        if not matching:
            raise _stranger(name, "none of them is")
    return found


def _pattern(models: Mapping[str, Module], pattern: str) -> str:
    """The pattern, which must match the whole name of a layer in each model, as peft asks for."""
    layers = {name: _layers(model) for name, model in models.items()}
    found = {name: [n for n in names if re.fullmatch(pattern, n)] for name, names in layers.items()}
    if not any(found.values()):
        if any(re.search(pattern, n) for names in layers.values() for n in names):
            fix = "it has to match the whole name: put .* before and after what may differ"
        else:
            words = re.findall(r"[\w.]+", pattern.replace("\\", ""))
            entry = words[-1].strip(".") if words else ""
            fix = suggest(entry, _ends(models.values(), entry))
        raise ConfigError("adapter.targets", f"{PATTERN}{pattern} matches no layer of {', '.join(models)}", fix)
    for name, names in found.items():
        if not names:
            raise _stranger(name, f"{PATTERN}{pattern} matches no name: it is not")
    return pattern


def _stranger(name: str, why: str) -> ConfigError:
    return ConfigError("adapter.targets", f"{why} a layer of {name}", f"take {name} out of adapter.lora_base_model")


def _layers(model: Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def _ends(models: Iterable[Module], entry: str) -> set[str]:
    """Ends, of as many parts as `entry` has, of the names of all layers that hold weights themselves; one part more
    where the last is a mere number."""
    parts = entry.count(".") + 1
    names = [name.split(".") for model in models for name, layer in model.named_modules()
             if name and any(p.ndim > 1 for p in layer.parameters(recurse=False))]
    return {".".join(n[-parts - n[-1].isdigit():]) for n in names}
