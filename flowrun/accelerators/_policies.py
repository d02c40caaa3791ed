"""The policies of diffusers' feature caches: which class of settings each has, and what a run fills in itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks.taylorseer_cache import _TRANSFORMER_BLOCK_IDENTIFIERS
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from torch import nn

from flowrun.config import ConfigError
from flowrun.feature_cache import Clock, Paced
from flowrun.pipelines._precision import DTYPES
from flowrun.spelling import suggest

LATEST = 900  # time from which FasterCache may extrapolate: it has no values of steps before the first, at about 1000
NAMES = {precision.value: dtype for precision, dtype in DTYPES.items()}


class Policy(Enum):
    first_block = "first_block"
    faster = "faster"
    pyramid = "pyramid"
    taylorseer = "taylorseer"
    magcache = "magcache"


CLASSES = {
    Policy.first_block: FirstBlockCacheConfig, Policy.faster: FasterCacheConfig, Policy.pyramid: PyramidAttentionBroadcastConfig,
    Policy.taylorseer: TaylorSeerCacheConfig, Policy.magcache: MagCacheConfig,
}  # fmt: skip
# What the run knows itself; and FasterCache's guess of one guidance branch from the other, which is for other loops than ours.
FILLED = {
    "current_timestep_callback", "num_inference_steps", "is_guidance_distilled", "tensor_format",
    "unconditional_batch_skip_range", "unconditional_batch_timestep_skip_range", "alpha_low_frequency", "alpha_high_frequency",
    "low_frequency_weight_update_timestep_range", "high_frequency_weight_update_timestep_range", "calibrate",
}  # fmt: skip


def check_params(policy: Policy, params: Mapping[str, Any], key: str) -> None:
    """Names and types are those of diffusers' class, and what must be given is. Raises ConfigError."""
    hints = settable(policy)
    for name, value in params.items():
        if name not in hints:
            what = "is set by the run itself" if name in FILLED else f"is no setting of {CLASSES[policy].__name__}"
            raise ConfigError(f"{key}.{name}", what, "leave it out" if name in FILLED else suggest(str(name), hints))
        if not _fits(value, hints[name]):
            raise ConfigError(f"{key}.{name}", f"is {value!r}", f"give {_told(hints[name])}")
    if policy is Policy.magcache and not params.get("mag_ratios"):
        fix = "measure them with diffusers' MagCacheConfig(calibrate=True), once for a checkpoint"
        raise ConfigError(f"{key}.mag_ratios", "is not given", fix)
    ends = {name: value[1] for name, value in params.items() if name.endswith("attention_timestep_skip_range")}
    if policy is Policy.faster and any(end > LATEST for end in ends.values()):
        fix = f"give {LATEST} at most: first steps are computed"
        raise ConfigError(f"{key}.{max(ends, key=ends.get)}", f"ends at {max(ends.values())}", fix)
    if policy is Policy.pyramid and not any(params.get(name) for name in hints if name.endswith("_block_skip_range")):
        names = ", ".join(name for name in hints if name.endswith("_block_skip_range"))
        raise ConfigError(key, f"gives none of {names}", "give one, 2 or more")


def settings(policy: Policy, params: Mapping[str, Any], network: nn.Module) -> Any:
    """diffusers' settings for one network."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    if policy is Policy.magcache:
        own = {f.name: f.default for f in fields(MagCacheConfig) if f.name in ("threshold", "max_skip_steps", "retention_ratio")}
        return Paced(**(own | given | {"mag_ratios": torch.tensor(params["mag_ratios"])}))
    if policy is Policy.pyramid:
        return PyramidAttentionBroadcastConfig(**given, current_timestep_callback=Clock())
    if policy is Policy.faster:
        return FasterCacheConfig(**given, current_timestep_callback=Clock(), is_guidance_distilled=True, attention_weight_callback=_half)
    if policy is Policy.taylorseer:
        if "taylor_factors_dtype" in given:
            given["taylor_factors_dtype"] = NAMES[given["taylor_factors_dtype"]]
        if not ({"cache_identifiers", "skip_predict_identifiers"} & given.keys() or given.get("use_lite_mode")):
            given["cache_identifiers"] = _attention_layers(network)
        return TaylorSeerCacheConfig(**given)
    return FirstBlockCacheConfig(**given)


def _half(module: nn.Module) -> float:
    """Weight of the last change of an attention's output in FasterCache's guess of the next: diffusers' default."""
    return 0.5


def _attention_layers(network: nn.Module) -> list[str] | None:
    """Patterns for the names of all attention layers, where diffusers' own match none of them."""
    names = [name for name, _ in network.named_modules()]
    if any(re.fullmatch(pattern, name) for pattern in _TRANSFORMER_BLOCK_IDENTIFIERS for name in names):
        return None
    return [re.escape(name) for name, module in network.named_modules() if isinstance(module, (Attention, AttentionModuleMixin))]


def settable(policy: Policy) -> dict[str, Any]:
    """Field -> its type, without what cannot be written in a configuration."""
    hints = get_type_hints(CLASSES[policy])
    return {f.name: hints[f.name] for f in fields(CLASSES[policy])
            if f.name not in FILLED and not f.name.startswith("_") and not f.name.endswith("_callback")}  # fmt: skip


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list or (origin is tuple and parts[-1] is ...):
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(parts) and all(map(_fits, value, parts))
    if hint is torch.dtype:
        return value in NAMES
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return value is None if hint is NoneType else type(value) is hint


def _told(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_told(part) for part in parts if part not in (NoneType, torch.Tensor))
    if origin in (list, tuple):
        return f"a list of {_told(parts[0])}" + (f", {len(parts)} of them" if origin is tuple and parts[-1] is not ... else "")
    if hint is torch.dtype:
        return ", ".join(NAMES)
    return {float: "a number", int: "a whole number", bool: "true or false", str: "text"}.get(hint, str(hint))
