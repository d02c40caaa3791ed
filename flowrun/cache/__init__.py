"""What cached units returned, on disk, addressed by what made it."""

from flowrun.cache.facade import Cache, Finding, Stats
from flowrun.cache.prune import Pruned

__all__ = ["Cache", "Finding", "Pruned", "Stats"]
