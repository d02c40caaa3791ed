"""Which layers of an unknown network an adapter is worth: the linear ones of its repeated blocks.

A network says which of its modules are repeated blocks (diffusers' `_repeated_blocks`, `_no_split_modules`); where it does
not, they are the members of a list with two or more of one class. Norms, modulations, embeddings and projections of
time are left out, and so is all that lies outside the blocks: what takes in the input and what puts out the result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch.nn import Linear, Module, ModuleList

SKIPPED = re.compile(r"norm|emb|time|adaln|modulation|(^|_)mod($|_|\d)", re.IGNORECASE)


def pattern(model: Module) -> str | None:
    """One for the whole names of these layers, with any number where blocks are counted; None when there are none."""
    found = {f"{block}.{layer}": (re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(block)), layer)
             for block, module in _blocks(model) for layer in _layers(module)}  # fmt: skip
    ends: dict[str, list[str]] = {}  # of the layers' names, by their blocks' pattern
    for block, layer in found.values():
        ends.setdefault(block, []).append(re.escape(layer))
    wanted = "|".join(rf"{block}\.({'|'.join(dict.fromkeys(layers))})" for block, layers in ends.items())
    matched = {name for name, _ in model.named_modules() if re.fullmatch(wanted, name)}
    return (wanted if matched == found.keys() else "|".join(map(re.escape, found))) or None  # blocks need not be alike


def _blocks(model: Module) -> list[tuple[str, Module]]:
    """The outermost repeated blocks that have such layers."""
    for classes in (getattr(model, "_repeated_blocks", None), getattr(model, "_no_split_modules", None)):
        named = [(name, module) for name, module in model.named_modules() if type(module).__name__ in (classes or ())]
        if found := _outermost(named):
            return found
    return _outermost(list(_listed(model)))


def _listed(model: Module) -> Iterator[tuple[str, Module]]:
    for name, module in model.named_modules():
        if isinstance(module, ModuleList):
            count = Counter(map(type, module))
            for number, child in module.named_children():
                if count[type(child)] > 1:
                    yield f"{name}.{number}", child


def _outermost(named: list[tuple[str, Module]]) -> list[tuple[str, Module]]:
    names = [name for name, _ in named]
    return [(name, module) for name, module in named
            if any(_layers(module)) and not any(name.startswith(f"{other}.") for other in names)]  # fmt: skip


def _layers(block: Module) -> list[str]:
    """Names within the block."""
    return [name for name, module in block.named_modules() if isinstance(module, Linear) and name and not _skipped(block, name)]


def _skipped(block: Module, name: str) -> bool:
    parts = name.split(".")
    above = (block.get_submodule(".".join(parts[:n])) for n in range(1, len(parts)))
    return any(map(SKIPPED.search, parts)) or any("Norm" in type(module).__name__ for module in above)
