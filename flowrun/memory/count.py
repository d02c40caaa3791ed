"""Counting bytes while code runs, each storage once: what autograd keeps, and what exists at the same time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Saved:
    """bytes: of what autograd kept for the backward pass; parameters not counted."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._known = [p.untyped_storage() for p in parameters]  # held, so that no other storage takes its place
        self._seen = {storage._cdata for storage in self._known}
        self.bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within the block. Checkpointed blocks are seen by what they keep, and not by what they compute again."""
        with saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._known.append(storage)
            self.bytes += storage.nbytes()
        return tensor


class Live(TorchDispatchMode):
    """most: bytes of storages made within the block that existed at one time; those of tensors from before do not count."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self._seen = WeakIdKeyDictionary()
        for tensor in before:
            self._seen[tensor.untyped_storage()] = 0
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        for tensor in given:
            self._seen.setdefault(tensor.untyped_storage(), 0)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen[storage] = count = storage.nbytes()
        weakref.finalize(storage, self._less, count)
        self.now += count
        self.most = max(self.most, self.now)

    def _less(self, count: int) -> None:
        self.now -= count
