"""pytest tests/cache/test_key.py: what changes a digest or a unit's code identity, and what does not."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrun.cache.code import code_identity
from flowrun.cache.key import Encoded, digest
from flowrun.config import ConfigError
from flowrun.graph import Unit

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def form(value: Any) -> Any:
    """A hashable form that is equal for equal data only: the truth to which digests are compared."""
    if isinstance(value, dict):
        return "dict", frozenset((form(key), form(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(form, value))
    return type(value).__name__, value, math.copysign(1, value) if isinstance(value, float) else 0


@settings(max_examples=300, deadline=None)
@given(plain, plain)
def test_digests_are_equal_exactly_for_equal_data(a: Any, b: Any) -> None:
    assert (digest(a) == digest(b)) == (form(a) == form(b))


@given(plain, plain)
def test_what_is_encoded_before_counts_as_what_it_was(a: Any, b: Any) -> None:
    assert digest(a, [Encoded.of(b)], {"x": Encoded.of(a)}) == digest(a, [b], {"x": a})


def test_neighbouring_forms_differ() -> None:
    forms = [[], [[]], [[], []], {}, [{}], "", [""], ["a", "b"], ["ab"], ["a", ["b"]], {"a": "b"},
             [["a", "b"]], 0, False, 0.0, -0.0, None, "0", b"", b"0", 1, True, "1", "n", "s1:a", {"a": 1, "b": 2},
             {"a": 2, "b": 1}, math.inf, math.nan]  # fmt: skip
    assert len({digest(value) for value in forms}) == len(forms)
    assert digest("a", "b") != digest("ab") != digest(["a", "b"])


def test_order_of_a_mapping_and_kind_of_a_sequence_do_not_count() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": (2,), "a": 1})
    assert len(digest("x")) == 16


class Colour(enum.Enum):
    red = 1


@pytest.mark.parametrize("value", [object(), {1, 2}, Path("x"), Colour.red, [1, {"a": lambda: 0}]])
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="not plain data"):
        digest(value)


def test_the_digest_is_fixed_for_ever() -> None:
    """Caches on disk depend on it. The right side was computed from the encoding's definition by hand."""
    content = b"s1:a" + b"i2:-3" + b"l2:tn" + b"m9:s1:k" + b"s2:\xc3\xa9"
    encoded = b"l" + str(len(content)).encode() + b":" + content
    assert digest("a", -3, [True, None], {"k": "é"}) == blake2b(encoded, digest_size=16).digest()


numbers = itertools.count()


def load(tmp_path: Path, source: str) -> ModuleType:
    """`source` as a module from a file of its own, as after an edit and a new start of Python."""
    path = tmp_path / f"units_{next(numbers)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def identity(process: Callable[..., Any], **unit: Any) -> bytes:
    return code_identity(Unit(name="u", process=process, **unit))


FUNCTION = "def process(ctx, x):\n    return {'y': x + 1}\n"


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (FUNCTION, True),
        ("# a comment above\nimport os\n\n\n" + FUNCTION, True),
        (FUNCTION + "\ndef other():\n    pass\n", True),
        (FUNCTION.replace("+ 1", "+ 2"), False),
        (FUNCTION.replace("'y'", "'z'"), False),
        (FUNCTION.replace("(ctx, x)", "(ctx, x=3)"), False),
    ],
)
def test_a_functions_own_source_counts_and_what_surrounds_it_does_not(tmp_path: Path, changed: str, same: bool) -> None:
    before, after = load(tmp_path, FUNCTION).process, load(tmp_path, changed).process
    assert (identity(before) == identity(after)) == same


def test_version_and_settings_count_and_name_does_not() -> None:
    def process(ctx: Any, x: int) -> None: ...

    base = identity(process)
    assert base == identity(process, version=1, settings={})
    different = [
        identity(process, version=2),
        identity(process, settings={"size": 64}),
        identity(process, settings={"size": 65}),
    ]
    assert len({base, *different}) == 4
    assert code_identity(Unit(name="other", process=process)) == base


def make(scale: Any) -> Callable[..., Any]:
    def process(ctx: Any, x: int) -> Any:
        return scale, x

    return process


def test_values_that_a_closure_a_default_or_a_partial_binds_count() -> None:
    assert identity(make(2)) == identity(make(2)) != identity(make(3))
    assert identity(make((1, "a"))) != identity(make((1, "b")))
    assert identity(make(make(1))) == identity(make(make(1)))
    processes = []
    for k in (1, 2):

        def process(ctx: Any, x: int, k: int = k) -> int:
            return k * x

        processes.append(process)
    assert identity(processes[0]) != identity(processes[1])
    partials = [functools.partial(make(1), x=1), functools.partial(make(1), x=2), functools.partial(make(2), x=1)]
    assert len({identity(partial) for partial in partials}) == 3
    assert identity(functools.partial(make(1), x=[1, {"a": 2}])) != identity(
        functools.partial(make(1), x=[1, {"a": 3}])
    )


def test_what_a_process_collects_does_not_count() -> None:
    calls: list[int] = []

    def process(ctx: Any, x: int) -> None:
        calls.append(x)

    before = identity(process)
    process(None, 1)
    assert identity(process) == before


def test_lambdas_that_share_a_line_differ() -> None:
    a, b, c = (lambda ctx, x: x + 1), (lambda ctx, x: x + 2), (lambda ctx, x: x + 1)
    assert identity(a) == identity(c) != identity(b)
    inner = [lambda ctx, x: [y + 1 for y in x], lambda ctx, x: [y + 2 for y in x]]
    assert identity(inner[0]) != identity(inner[1])


CLASS = """class Encode:
    scale = 1
    def __init__(self, size):
        self.size = size
    def __call__(self, ctx, x):
        return self.helper(x)
    def helper(self, x):
        return x
    def text(self, ctx, x):
        return x
"""


EDITED = [
    CLASS.replace("scale = 1", "scale = 2"),
    CLASS.replace("helper(self, x):\n        return x", "helper(self, x):\n        return 2 * x"),
]


@pytest.mark.parametrize("edited", EDITED, ids=["a constant", "another method"])
@pytest.mark.parametrize("from_file", [True, False])
def test_objects_count_with_their_class_and_their_plain_attributes(
    tmp_path: Path, edited: str, from_file: bool
) -> None:
    def make_class(source: str) -> type:
        scope: dict[str, Any] = {"__name__": "nowhere"}
        exec(source, scope)
        return load(tmp_path, source).Encode if from_file else scope["Encode"]

    first, again, changed = make_class(CLASS), make_class(CLASS), make_class(edited)
    assert identity(first(64)) == identity(again(64))
    assert len({identity(first(64)), identity(first(65)), identity(changed(64))}) == 3


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    size: int

    def __call__(self, ctx: Any, x: int) -> int:
        return self.size * x


def test_attributes_in_slots_count() -> None:
    assert identity(Slotted(1)) == identity(Slotted(1)) != identity(Slotted(2))


def test_a_method_counts_with_its_own_source_alone(tmp_path: Path) -> None:
    first, helper = load(tmp_path, CLASS), load(tmp_path, EDITED[1])
    method = load(
        tmp_path, CLASS.replace("text(self, ctx, x):\n        return x", "text(self, ctx, x):\n        return 2 * x")
    )
    assert identity(first.Encode(1).text) == identity(first.Encode(2).text) == identity(helper.Encode(1).text)
    assert identity(first.Encode(1).text) != identity(method.Encode(1).text)


def test_a_wrapped_function_counts_with_what_is_wrapped() -> None:
    def plus(k: int) -> Callable[..., Any]:
        @functools.wraps(make)
        def wrapper(*args: Any) -> Any:
            return make(1)(*args)

        wrapper.__wrapped__ = make(k)
        return wrapper

    assert identity(plus(1)) == identity(plus(1)) != identity(plus(2))


def test_code_without_a_source_file_counts_in_its_compiled_form() -> None:
    def compiled(source: str) -> Callable[..., Any]:
        scope: dict[str, Any] = {}
        exec(source, scope)
        return scope["process"]

    assert (
        identity(compiled(FUNCTION))
        == identity(compiled(FUNCTION))
        != identity(compiled(FUNCTION.replace("+ 1", "+ 2")))
    )
    assert identity(compiled(FUNCTION)) != identity(compiled(FUNCTION.replace("'y'", "'z'")))


@pytest.mark.parametrize("process", [None, len, int, functools.partial(len)])
def test_a_process_without_python_code_is_refused(process: Any) -> None:
    with pytest.raises(
        ConfigError, match="unit u: the source of its process .* cannot be read; give a Python function"
    ):
        identity(process)


def test_settings_that_are_not_plain_are_refused_with_the_unit() -> None:
    with pytest.raises(ConfigError, match="unit u: its settings hold what no key can be made of.*Colour"):
        identity(make(1), settings={"colour": Colour.red})
