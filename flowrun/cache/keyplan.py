"""Which keys a split's cached units would store their outputs under, computed without running anything.

Keys form a Merkle tree, H being a 128-bit hash:

    unit key    H(code and settings of the unit, identities of its models, context, argument names, keys of its inputs)
    output key  H(unit key, (scope, name))
    input key   the key of its only possible writer, or H of the keys of all of them in order: back to the latest
                certain one, or to the data, which count as the first writer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from flowrun.cache.code import code_identity, rows_identity
from flowrun.cache.key import KEY_BYTES, digest
from flowrun.graph import Param, Unit
from flowrun.graph.graph import Writers

Output = tuple[int, Param]  # (unit index, parameter)
ROW: Param = ("*", "row")  # among what is taken from the data: (run seed, row id), for frozen draws
EVERYTHING: Param = ("*", "data")  # and all that the data provide, for barriers


class Split(Protocol):
    """What is asked of a split: all units, the indices of the cached ones that run, what is stored of each."""

    units: tuple[Unit, ...]
    needed: tuple[int, ...]
    kept: Mapping[int, tuple[Param, ...]]


ABSENT = digest("neither the data nor a unit provides it")
Column = Sequence[bytes]  # a key of each row


class KeyPlan:
    """Keys of everything that `split` keeps, for one row after the other.

    All that does not depend on the row is hashed here, once: a row costs one short hash per unit call and output.
    """

    def __init__(
        self, split: Split, identities: Mapping[str, bytes], context: bytes, seed: int, batch: int = 1
    ) -> None:
        """identities: of every component that a needed unit calls. context: digest of the precision, of library
        versions, of whatever else reaches every unit. seed: the run's; only `random="frozen"` units depend on it.
        batch: rows that units encode at once where they can, which alone changes a value's last bits.

        Raises ConfigError when a unit's code cannot be identified, KeyError for a component without identity.
        """
        self.context, self.identities, self.seed, self.batch = context, identities, seed, batch
        self.data: dict[Param, int] = {}  # what is taken from the data -> place among the row's keys
        self._memory: dict[tuple[bytes, tuple[int, ...]], int] = {}  # step: (prefix, places) -> -1 - its number
        self._calls: dict[int, dict[str, int]] = {}  # unit -> scope of an output -> place of its unit key
        self._writers = Writers()
        for i in split.needed:
            self._calls[i] = self._unit(split.units, i)
            self._writers.add(i, split.units[i])
        outputs = {(i, p): self._output(i, p) for i, params in split.kept.items() for p in params}
        # Now that all data are known, each step's key has its place after them: key = H(prefix, keys at places).
        self._steps = [(prefix, [self._after_data(place) for place in places]) for prefix, places in self._memory]
        self.outputs: dict[Output, int] = {output: self._after_data(place) for output, place in outputs.items()}

    def keys(self, inputs: Mapping[Param, bytes], row_id: str) -> dict[Output, bytes]:
        """Key of every kept output. inputs: key of every value that the data provide for this row, 16 bytes each."""
        columns = self.columns({param: [key] for param, key in inputs.items()}, [row_id])
        return {output: columns[place][0] for output, place in self.outputs.items()}

    def columns(
        self, inputs: Mapping[Param, Sequence[bytes]], row_ids: Sequence[str], before: Sequence[Column] = ()
    ) -> list[Column]:
        """Keys of many rows: a column for each place, in which `outputs` has its own. inputs: as of `keys`, of each row.

        before: the columns of the same rows with some other inputs; what both share is not hashed again."""
        for param, keys in inputs.items():
            if type(param) is not tuple or not {KEY_BYTES}.issuperset(map(len, keys)) or len(keys) != len(row_ids):
                raise ValueError(f"inputs map (scope, name) to {KEY_BYTES} bytes for each row, here is {param!r}: {keys!r:.80}")
        given = dict(inputs)
        if ROW in self.data:
            given[ROW] = [digest(self.seed, row_id) for row_id in row_ids]
        if EVERYTHING in self.data:
            given[EVERYTHING] = [digest({param: keys[n] for param, keys in inputs.items()}) for n in range(len(row_ids))]
        columns = [given.get(param) or [ABSENT] * len(row_ids) for param in self.data]
        for prefix, places in self._steps:
            shared = before and all(columns[place] is before[place] for place in places)
            columns.append(before[len(columns)] if shared else _hashed(prefix, [columns[place] for place in places], len(row_ids)))
        return columns

    def _unit(self, units: Sequence[Unit], i: int) -> dict[str, int]:
        """Places of the unit's key by the scope of what it writes; they differ when each side is a call of its own."""
        unit = units[i]
        together = [self.batch, rows_identity(unit)] if self.batch > 1 and unit.process_rows is not None else []
        own = digest("unit", code_identity(unit), self._models(unit), self.context, unit.take_over, *together)
        if unit.is_barrier:
            params = sorted(self._writers.params())
            places = [self._from_data(EVERYTHING), *(self._input(param) for param in params)]
            places += [self._calls[b][""] for b in self._calls if units[b].is_barrier]
            return {"": self._step(digest(own, params), places)}
        if unit.separate_cfg and unit.random == "none":
            return {side: self._call(own, unit, ("shared", side)) for side in ("posi", "nega")}
        return {"": self._call(own, unit, ("shared", "posi", "nega"))}

    def _call(self, own: bytes, unit: Unit, scopes: tuple[str, ...]) -> int:
        """The unit key when the process sees these scopes."""
        if unit.take_over:
            arguments = [(scope, name, (scope, name)) for scope, name in sorted(unit.reads)]
        else:
            named = {
                "shared": {name: name for name in unit.input_params},
                "posi": unit.input_params_posi,
                "nega": unit.input_params_nega,
            }
            # One side alone must not tell which side it is: equal inputs give equal keys.
            label = {"shared": "shared", "posi": "side", "nega": "side"} if len(scopes) == 2 else {s: s for s in scopes}
            arguments = [
                (label[scope], argument, (scope, name))
                for scope in scopes
                for argument, name in sorted(named[scope].items())
            ]
        places = [self._input(param) for _, _, param in arguments]
        names: list[Any] = [[label, argument] for label, argument, _ in arguments]
        if unit.random == "frozen":
            places.append(self._from_data(ROW))
            names.append(["drawn by", unit.name])
        return self._step(digest(own, names), places)

    def _models(self, unit: Unit) -> dict[str, Any]:
        """Attribute path -> identity of its component; an empty path stands for all components."""
        return {
            path: self.identities[path.partition(".")[0]] if path else dict(self.identities)
            for path in unit.onload_model_names
        }

    def _input(self, param: Param) -> int:
        places = [self._output(i, param) for i in self._writers.of(param)]
        if not self._writers.has_certain(param):
            places.insert(0, self._from_data(param))
        return places[0] if len(places) == 1 else self._step(digest("writers"), places)

    def _output(self, i: int, param: Param) -> int:
        calls = self._calls[i]
        return self._step(digest("output", *param), [calls.get(param[0], calls.get(""))])

    def _from_data(self, param: Param) -> int:
        return self.data.setdefault(param, len(self.data))

    def _step(self, prefix: bytes, places: list[int]) -> int:
        """Place of H(prefix, keys at `places`)."""
        return self._memory.setdefault((prefix, tuple(places)), -1 - len(self._memory))

    def _after_data(self, place: int) -> int:
        return place if place >= 0 else len(self.data) - 1 - place


def _hashed(prefix: bytes, columns: Sequence[Column], rows: int) -> list[bytes]:
    """H(prefix, keys) for each row's keys in `columns`, which may be none; rows that share them are hashed once."""
    read = list(map(b"".join, zip(*columns, strict=True))) if columns else [b""] * rows
    made = {keys: blake2b(prefix + keys, digest_size=KEY_BYTES).digest() for keys in set(read)}
    return [made[keys] for keys in read]
