"""How adapter files of a family are written elsewhere, as far as diffusers reads them back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AdapterNames:
    """Prefixes are given for each component that such a file may hold; behind one that ends in _ a layer's dots are _.

    renamed: name there -> the layers in it, one or several side by side; {} is a block's number. Empty: names stay."""

    reader: str                                                        # diffusers' pipeline class that reads such files
    comfyui: Mapping[str, str] = field(default_factory=dict)           # component -> prefix
    kohya: Mapping[str, str] = field(default_factory=dict)
    lokr: Mapping[str, str] = field(default_factory=dict)              # in the form comfyui, never renamed
    renamed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)            # name there -> outputs, where the reader knows one number only
    ends: tuple[str, str] = ("lora_A", "lora_B")                       # in the form comfyui

    def width(self, name: str) -> int | None:
        """Outputs that the layer `name`, as it is called there, has to have; None: any."""
        return self.widths.get(re.sub(r"\.\d+\.", ".{}.", name))

    def grouped(self, layers: Sequence[str]) -> dict[str, list[str]]:
        """Name there -> the layers in it, also those that are not among `layers`. Raises KeyError for one without a name."""
        if not self.renamed:
            return {layer: [layer] for layer in layers}
        return {name: together for name, together in map(self._group, layers)}

    def _group(self, layer: str) -> tuple[str, list[str]]:
        for name, members in self.renamed.items():
            for member in members:
                if match := re.fullmatch(re.escape(member).replace(r"\{\}", r"(\d+)"), layer):
                    return name.format(*match.groups()), [other.format(*match.groups()) for other in members]
        raise KeyError(layer)


def flat(prefix: str, name: str) -> str:
    return prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
