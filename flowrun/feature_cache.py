"""Feature caches of diffusers' networks: `network.enable_cache(config)` lets a solver step reuse what the one before it
computed. Who calls such a network himself, as our solver does, has to say when a walk begins, how many steps it has, and at
each call which guidance branch it asks at which noise level.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
from diffusers import CacheMixin, FasterCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks.mag_cache import nearest_interp
from torch import Tensor, nn

ONE_STATE = (FasterCacheConfig, PyramidAttentionBroadcastConfig)  # per layer, whichever branch asks
TIME_UNITS = 1000  # a noise level of 1 is so many for diffusers' caches


class Clock:
    """A cache's `current_timestep_callback`: the present step's time, from 1000 to 0."""

    sigma: Tensor | None = None

    def __call__(self) -> float:
        if self.sigma is None:
            raise RuntimeError("a network with a feature cache is called outside a walk")
        return TIME_UNITS * float(self.sigma)


class Paced(MagCacheConfig):
    """MagCache for walks of any number of steps. mag_ratios: of any number, spread over the walk's steps."""

    def __init__(self, mag_ratios: Tensor, threshold: float, max_skip_steps: int, retention_ratio: float) -> None:
        super().__init__(threshold, max_skip_steps, retention_ratio, len(mag_ratios), mag_ratios)
        self._given = mag_ratios

    def pace(self, steps: int) -> None:
        self.num_inference_steps, self.mag_ratios = steps, nearest_interp(self._given, steps)


@dataclass
class Tally:
    """What a cache left out of calls of its networks. reached, computed: parts, blocks or layers, so far in the present call."""

    reached: int = 0
    computed: int = 0
    calls: int = 0
    hits: int = 0  # calls in which something was left out
    skipped: int = 0  # parts left out in all calls
    full_seconds: list[float] = field(default_factory=list)  # of each call that left out nothing
    hit_seconds: float = 0.0  # of all others

    @torch.compiler.disable
    def reach(self) -> None:
        self.reached += 1

    @torch.compiler.disable
    def compute(self) -> None:
        self.computed += 1

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call of the network."""
        self.reached, self.computed, began = 0, 0, time.perf_counter()
        yield
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # or only the start of the work would be timed
        seconds, left_out = time.perf_counter() - began, self.reached - self.computed
        self.calls += 1
        if left_out > 0:
            self.hits, self.skipped, self.hit_seconds = self.hits + 1, self.skipped + left_out, self.hit_seconds + seconds
        else:
            self.full_seconds.append(seconds)

    @property
    def saved_seconds(self) -> float:
        """Against as many full calls; 0 while there was none."""
        return self.hits * median(self.full_seconds) - self.hit_seconds if self.full_seconds else 0.0


class FeatureCache:
    """The caches that are enabled on networks, or on those inside their wrappers; nothing happens where there are none."""

    def __init__(self, *networks: nn.Module) -> None:
        parts = (next((m for m in n.modules() if isinstance(m, CacheMixin) and m.is_cache_enabled), None) for n in networks)
        self._networks = [network for network in parts if network is not None]
        self._configs = [network._cache_config for network in self._networks]
        tallies = (getattr(config, "tally", None) for config in self._configs)
        self._tallies = {id(tally): tally for tally in tallies if tally is not None}.values()  # several networks may share one

    @property
    def per_branch(self) -> bool:
        """Whether each guidance branch is to be asked alone, as diffusers' pipelines do: one decides by its own change
        whether to compute. A cache of one state must get all branches in one call, or one would get another's values."""
        return any(not isinstance(config, ONE_STATE) for config in self._configs)

    @contextmanager
    def branch(self, name: str, sigma: Tensor) -> Iterator[None]:
        """Around a call of one of the networks. name: any, the same in each step. sigma: 0-d."""
        for config in self._configs:
            if isinstance(clock := getattr(config, "current_timestep_callback", None), Clock):
                clock.sigma = sigma
        with ExitStack() as stack:
            for network in self._networks:
                stack.enter_context(network.cache_context(name))
            for tally in self._tallies:
                stack.enter_context(tally.call())
            yield

    @contextmanager
    def walk(self, steps: int) -> Iterator[None]:
        """Around all calls of one walk of so many steps: nothing is reused from before, and nothing is kept."""
        for config in self._configs:
            if isinstance(config, Paced):
                config.pace(steps)
        self._reset()
        try:
            yield
        finally:
            self._reset()

    def _reset(self) -> None:
        for network in self._networks:
            network._reset_stateful_cache()  # what diffusers' pipelines call at their end; it has no public name
