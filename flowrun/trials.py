"""Settings by which accelerators are tried out on a tiny network, and a look at whether they do anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from flowrun.accelerators import Accelerator
from flowrun.registry import ACCELERATORS

STEPS = 8  # of a walk
RANGE = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": [-1, 700]}  # not the first steps
# Settings that let each of them skip where it is wired to the network at all.
CACHES: dict[str, dict[str, Any]] = {
    "first block": {"policy": "first_block", "policy_params": {"threshold": 100.0}},
    "MagCache": {"policy": "magcache", "policy_params": {"threshold": 10.0, "mag_ratios": [1.0] * STEPS}},
    "TaylorSeer": {"policy": "taylorseer", "policy_params": {"cache_interval": 3, "disable_cache_before_step": 1}},
    "pyramid": {"policy": "pyramid", "policy_params": RANGE},
    "FasterCache": {"policy": "faster", "policy_params": RANGE},
}
# Kernels that are neither fetched nor compiled first; what a machine has none of is refused by its check.
BACKENDS = [name.value for name in AttentionBackendName if "hub" not in name.value and name is not AttentionBackendName.FLEX]
BY_BLOCKS = {"mode": "regional", "compile_kwargs": {"backend": "eager"}, "recompile_limit": 64}  # a compiler that changes nothing


def accelerator(name: str, settings: Mapping[str, Any]) -> Accelerator:
    return (cls := ACCELERATORS.find(name, "families"))(ACCELERATORS.build("families", cls, settings))


@contextmanager
def asked(backend: AttentionBackendName) -> Iterator[list[int]]:
    """Counts the calls of a kernel within the block."""
    kernels, count = _AttentionBackendRegistry._backends, [0]
    kernel = kernels[backend]

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        count[0] += 1
        return kernel(*args, **kwargs)

    kernels[backend] = counted
    try:
        yield count
    finally:
        kernels[backend] = kernel
