"""Feature caches of diffusers' networks: `network.enable_cache(config)` lets a solver step reuse what the one before it
computed. Who calls such a network himself, as our solver does, has to say when a walk begins and which guidance branch it asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from diffusers import CacheMixin, FasterCacheConfig, PyramidAttentionBroadcastConfig
from torch import nn

ONE_STATE = (FasterCacheConfig, PyramidAttentionBroadcastConfig)  # per layer, whichever branch asks


class FeatureCache:
    """The cache that is enabled on a network, or on the one inside its wrappers; nothing happens where there is none."""

    def __init__(self, network: nn.Module) -> None:
        enabled = (m for m in network.modules() if isinstance(m, CacheMixin) and m.is_cache_enabled)
        self._network = next(enabled, None)

    @property
    def per_branch(self) -> bool:
        """Whether each guidance branch is to be asked alone, as diffusers' pipelines do: one decides by its own change
        whether to compute. A cache of one state must get all branches in one call, or one would get another's values."""
        return self._network is not None and not isinstance(self._network._cache_config, ONE_STATE)

    def branch(self, name: str) -> AbstractContextManager[None]:
        """Around a call of the network. name: any, the same in each step."""
        return nullcontext() if self._network is None else self._network.cache_context(name)

    @contextmanager
    def walk(self) -> Iterator[None]:
        """Around all calls of one walk: nothing is reused from before, and nothing is kept."""
        self._reset()
        try:
            yield
        finally:
            self._reset()

    def _reset(self) -> None:
        if self._network is not None:
            self._network._reset_stateful_cache()  # what diffusers' pipelines call at their end; it has no public name
