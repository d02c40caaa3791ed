"""What is trained: whole components, parts of them, or a low-rank adapter on them; and how the result is saved.

A trained name is a component ("transformer") or a part of one ("transformer.transformer_blocks.0").
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch.nn import DataParallel, Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from flowrun.adapters.config import Config, Kind
from flowrun.config import ConfigError
from flowrun.disk import saving
from flowrun.pipelines import AdapterNames, Change
from flowrun.spelling import suggest

log = logging.getLogger(__name__)

DENOISERS = ("transformer", "unet")  # as pipelines of diffusers call it
UMASK = os.umask(0)
os.umask(UMASK)  # it can only be read by setting it


def trained_names(trainable: Sequence[str], config: Config, components: Collection[str]) -> tuple[str, ...]:
    """Everything that gets gradients: the wholly trained names, then the adapters' components. Loads nothing.

    Raises ConfigError for a name without a component, one that is trained both ways, or nothing at all."""
    for key, names in (("task.trainable_models", trainable), ("adapter.lora_base_model", config.lora_base_model)):
        for name in names:
            if name.split(".")[0] not in components or name.endswith("."):
                raise ConfigError(key, f"{name} is no component of the pipeline", _instead(key, name, components))
    for name in config.lora_base_model:
        if "." in name:
            raise ConfigError("adapter.lora_base_model", f"{name} is a part of a component",
                              "name the whole component, and its layers in adapter.targets")
        if name in {n.split(".")[0] for n in trainable}:
            raise ConfigError("task.trainable_models", f"{name} is also in adapter.lora_base_model",
                              "train a component whole or through an adapter: take it out of one of them")
    if not (trainable or config.lora_base_model):
        raise ConfigError("task.trainable_models", "is empty and there is no adapter", "name what to train")
    return (*trainable, *config.lora_base_model)


def _instead(key: str, name: str, components: Collection[str]) -> str:
    """What would be right: the model's own name of its denoiser, or what looks like the one given."""
    own = [other for other in DENOISERS if other in components and name in DENOISERS]
    return f"this model's denoiser is {own[0]}: {key}=[{own[0]}]" if own else suggest(name, components)


def check(outlines: Mapping[str, Module], trainable: Sequence[str], config: Config,
          lora_targets: Mapping[str, Sequence[str]], names: AdapterNames | None = None) -> list[str]:
    """All that `attach` would refuse, found on networks without weights, which this uses up. Returns warnings.

    outlines: every component that is trained, by name. Raises ConfigError as `attach` does."""
    for name in trainable:
        root, _, path = name.partition(".")
        if not any(True for _ in _part(outlines[root], path, name).parameters()):
            raise ConfigError("task.trainable_models", f"{name} has no weights", "name a part that has some")
    if config.kind is Kind.none:
        return []
    from flowrun.adapters import lora, prove  # import peft, which whole training does not need

    own = {name: outlines[name] for name in config.lora_base_model}
    warnings = lora.check(own, config, lora_targets, names)
    prove.prove(own, config, names)
    return warnings


def told(outlines: Mapping[str, Module], config: Config) -> list[str]:
    """Lines on which layers carry the adapter. outlines: as `check` left them."""
    if config.kind is Kind.none:
        return []
    from flowrun.adapters import lora  # imports peft

    return lora.told({name: outlines[name] for name in config.lora_base_model}, config)


def merged(outlines: Mapping[str, Callable[[], Module]], config: Config,
           names: AdapterNames | None) -> tuple[dict[str, Change], list[str]]:
    """What `merge_first` does to each component's weights; and warnings. outlines: of every component, made when asked for.

    Raises ConfigError for an adapter of another component or network."""
    if not config.merge_first:
        return {}, []
    from flowrun.adapters import merge  # imports peft

    return merge.changes(outlines, config, names)


def attach(models: Mapping[str, Module], trainable: Sequence[str], config: Config,
           lora_targets: Mapping[str, Sequence[str]], seed: int, names: AdapterNames | None = None) -> None:
    """Freeze every loaded model, then open what is trained: requires_grad and train mode there, eval mode elsewhere.

    lora_targets: component -> the pipeline's own layer names, for targets=auto. A's random start derives from `seed`.
    Raises ConfigError for a part that does not exist, a target that matches nothing, an unfit `init_from`."""
    trained_names(trainable, config, models)
    for model in models.values():
        model.requires_grad_(False).eval()
    for name in trainable:
        root, _, path = name.partition(".")
        models[root].train()
        for parameter in _part(models[root], path, name).parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    if config.kind is Kind.lora:
        from flowrun.adapters import lora  # imports peft, which whole training does not need

        lora.add({name: models[name] for name in config.lora_base_model}, config, lora_targets, seed, names)
    narrow = sorted({str(p.dtype) for p in trained_parameters(models).values() if p.dtype.itemsize < 4})
    if narrow:
        log.warning("trained weights are %s: updates below one part in some hundreds are lost; train fp32 weights "
                    "(model.dtype=fp32) under precision=bf16 instead", ", ".join(narrow))


def without(models: Mapping[str, Module]) -> AbstractContextManager[None]:
    """Context in which the networks compute as if their adapters were not there."""
    from flowrun.adapters import lora  # imports peft

    return lora.without(models)


def trained_parameters(models: Mapping[str, Module]) -> dict[str, Parameter]:
    """`component.path` -> parameter, for all that gets gradients, in the models' order; names as without wrappers."""
    return {f"{name}.{path}": parameter for name, model in models.items()
            for path, parameter in unwrapped(model).named_parameters()
            if parameter.requires_grad and parameter.is_floating_point()}


def save_trained(directory: Path, models: Mapping[str, Module], trainable: Sequence[str], config: Config,
                 names: AdapterNames | None = None) -> list[Path]:
    """Save what was trained so that plain diffusers (or transformers, or peft) loads it: `pytorch_lora_weights.safetensors`
    for adapters, `peft/` for LoKr and LoHa, what `adapter.export` names, a folder per component that is trained whole or in
    part. Each is replaced at once or not at all.

    Raises Failure when the disk is full."""
    part = directory / ".trained.part"
    saved = []
    try:
        with saving(directory, "the trained weights"):
            part.mkdir(parents=True, exist_ok=True)
            for name in dict.fromkeys(n.split(".")[0] for n in trainable):
                unwrapped(models[name]).save_pretrained(part / name)
                saved.append(_move(part / name, directory))
            if config.kind is Kind.lora:
                from flowrun.adapters import export  # imports peft

                base = {name: unwrapped(models[name]) for name in config.lora_base_model}
                for form in dict.fromkeys((config.own_form, *config.export)):
                    made = export.save(part, base, form, config, names)
                    saved += [_move(path, directory / path.parent.relative_to(part)) for path in made]
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return saved


def unwrapped(module: Module) -> Module:
    """The network inside data-parallel and compile wrappers, whose prefixes must not get into saved names."""
    while True:
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # torch.compile's wrapper
            module = module._orig_mod
        else:
            return module


def _part(model: Module, path: str, name: str) -> Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        root = name.split(".")[0]
        names = [f"{root}.{n}" for n, _ in model.named_modules() if n]
        raise ConfigError("task.trainable_models", f"there is no {name}", suggest(name, names)) from error


def _move(source: Path, directory: Path) -> Path:
    for file in [source] if source.is_file() else source.rglob("*"):  # safetensors gives its files to their owner alone
        if file.is_file():
            file.chmod(0o666 & ~UMASK)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / source.name
    if target.is_dir():
        shutil.rmtree(target)
    os.replace(source, target)
    return target
