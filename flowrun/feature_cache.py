"""Feature caches of diffusers' networks: `network.enable_cache(config)` lets a solver step reuse what the one before it
computed. Who calls such a network himself, as our solver does, has to say when a walk begins and which guidance branch it asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from diffusers import CacheMixin, FasterCacheConfig, PyramidAttentionBroadcastConfig
from torch import nn

ONE_STATE = (FasterCacheConfig, PyramidAttentionBroadcastConfig)  # per layer, whichever branch asks


class FeatureCache:
    """The caches that are enabled on networks, or on those inside their wrappers; nothing happens where there are none."""

    def __init__(self, *networks: nn.Module) -> None:
        parts = (next((m for m in n.modules() if isinstance(m, CacheMixin) and m.is_cache_enabled), None) for n in networks)
        self._networks = [network for network in parts if network is not None]

    @property
    def per_branch(self) -> bool:
        """Whether each guidance branch is to be asked alone, as diffusers' pipelines do: one decides by its own change
        whether to compute. A cache of one state must get all branches in one call, or one would get another's values."""
        return any(not isinstance(network._cache_config, ONE_STATE) for network in self._networks)

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Around a call of the networks. name: any, the same in each step."""
        with ExitStack() as stack:
            for network in self._networks:
                stack.enter_context(network.cache_context(name))
            yield

    @contextmanager
    def walk(self) -> Iterator[None]:
        """Around all calls of one walk: nothing is reused from before, and nothing is kept."""
        self._reset()
        try:
            yield
        finally:
            self._reset()

    def _reset(self) -> None:
        for network in self._networks:
            network._reset_stateful_cache()  # what diffusers' pipelines call at their end; it has no public name
