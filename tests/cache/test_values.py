"""pytest tests/cache/test_values.py: what is put comes back exactly; what cannot come back exactly is refused."""

from __future__ import annotations

import gc
import math
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from cache_samples import key_of, same, shard_files
from hypothesis import HealthCheck, given, settings

from flowrun.cache import values
from flowrun.cache.shard import form_of
from flowrun.cache.store import Store
from flowrun.cache.values import DELETED, NOT_RETURNED, BadValue, encode, take
from flowrun.config import Failure

Moments = namedtuple("Moments", "mean std")
values.register(Moments)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
EDGES = [0.0, -0.0, 1e-7, -1e-45, 2.0, 0.3, 440.0, 1e-40]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(FLOATS + OTHERS + [torch.uint64, torch.complex64]))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype.is_floating_point or dtype.is_complex:
        edges = torch.tensor(EDGES, dtype=torch.float64)
        return edges[torch.randint(0, len(EDGES), shape, generator=generator)].to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, [*shape, dtype.itemsize], generator=generator).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
nested = st.recursive(
    plain | tensors() | st.sampled_from([NOT_RETURNED, DELETED]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.text(max_size=2)), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: Moments(*pair))
    ),
    max_leaves=8,
)


def back(value: Any) -> Any:
    """Encoded and decoded, without a file."""
    text, leaves = encode(value, "row", "field")
    result, memories = take(0, form_of(text, tuple((leaf.code, leaf.shape) for leaf in leaves)))
    for memory, leaf in zip(memories, leaves, strict=True):
        memory[...] = leaf.data
    return result


@settings(max_examples=80, deadline=None)
@given(nested)
def test_any_value_comes_back_exactly(value: Any) -> None:
    assert same(back(value), value)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(nested, min_size=1, max_size=6))
def test_values_of_all_kinds_share_a_shard_and_survive_a_new_process(tmp_path_factory: Any, drawn: list[Any]) -> None:
    root = tmp_path_factory.mktemp("cache")
    with Store(root).writer(64, 30) as writer:
        assert [writer.put(key_of(n), value, f"row {n}") for n, value in enumerate(drawn)] == [True] * len(drawn)
    again = Store(root)
    assert len(shard_files(root)) == 1
    assert all(same(again.get(key_of(n)), value) for n, value in enumerate(drawn))


def test_the_comparison_of_these_tests_sees_type_sign_and_dtype() -> None:
    assert not same(1, True) and not same(1, 1.0) and not same([1], (1,)) and not same(0.0, -0.0)
    assert not same(torch.tensor(0.0), torch.tensor(-0.0)) and not same(torch.zeros(1), torch.zeros(()))
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1}) and not same(Moments(1, 2), (1, 2))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_in_a_tensor_are_refused_with_row_and_count(dtype: torch.dtype, bad: float) -> None:
    if dtype is torch.float8_e4m3fn and math.isinf(bad):
        pytest.skip("this type has no infinity")
    tensor = torch.zeros(2, 3)
    tensor[1, 2] = bad
    with pytest.raises(BadValue, match=r"row 'cat': shared\.latents holds \d NaN and \d infinite of 6") as caught:
        encode({"a": [tensor.to(dtype)]}, "cat", "shared.latents")
    assert (1 if math.isnan(bad) else 0, 0 if math.isnan(bad) else 1) == tuple(
        int(word) for word in str(caught.value).split() if word in ("0", "1")
    )


def test_largest_finite_numbers_are_accepted() -> None:
    for dtype in FLOATS:
        edge = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=torch.float64).to(dtype)
        assert same(back(edge), edge)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_as_plain_numbers_are_refused(bad: float) -> None:
    with pytest.raises(BadValue, match="row 'cat': guidance holds"):
        encode({"scale": bad}, "cat", "guidance")


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", np.zeros(2), np.float32(1), object(), torch.nn.Parameter(torch.zeros(2)), len,
     torch.eye(2).to_sparse(), torch.empty(2, device="meta"), namedtuple("Other", "a")(1), torch.Size([1])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_not_come_back_exactly_is_refused(value: Any) -> None:
    with pytest.raises(BadValue, match="row 'cat': field holds a "):
        encode([value], "cat", "field")


def test_a_refused_value_leaves_nothing_behind(root: Path) -> None:
    store = Store(root)
    with store.writer(64, 30) as writer:
        with pytest.raises(BadValue):
            writer.put(key_of(1), {"good": torch.ones(3), "bad": torch.tensor(math.nan)}, "row")
        writer.put(key_of(2), torch.ones(3), "row")
    assert store.missing([key_of(1), key_of(2)]) == [key_of(1)]
    assert same(store.get(key_of(2)), torch.ones(3))


def test_a_stored_tensor_is_a_copy_of_its_own_elements_alone(root: Path) -> None:
    batch = torch.randn(64, 1000)
    view, turned = batch[3], batch[:10, :20].t()
    expected, expected_turned = view.clone(), turned.clone()
    store = Store(root)
    with store.writer(64, 30) as writer:
        writer.put(key_of(1), view, "row")
        writer.put(key_of(2), turned, "row")
        batch.zero_()  # after put, before the flush
    (shard,) = shard_files(root)
    payload = (1000 + 200) * 4
    assert payload < shard.stat().st_size < payload + 2000 < batch.nbytes
    assert same(store.get(key_of(1)), expected) and same(store.get(key_of(2)), expected_turned)


def test_what_is_read_lies_in_fresh_aligned_contiguous_memory(root: Path) -> None:
    store = Store(root)
    with store.writer(64, 30) as writer:
        for number in range(9):
            writer.put(key_of(number), torch.full((3, 5), number, dtype=torch.bfloat16), "row")  # 30 bytes: odd places
    for number in range(9):
        first, second = store.get(key_of(number)), store.get(key_of(number))
        assert first.is_contiguous() and first.data_ptr() % 64 == 0 and first.data_ptr() != second.data_ptr()
        assert first.untyped_storage().nbytes() == 30
        first.zero_()
        assert same(store.get(key_of(number)), torch.full((3, 5), number, dtype=torch.bfloat16))


def test_an_unregistered_named_tuple_is_named_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = encode(Moments(1, 2), "row", "field")
    monkeypatch.setattr(values, "_registered", {})
    with pytest.raises(Failure, match="Moments"):
        take(0, form_of(text, ()))


def test_only_named_tuples_can_be_registered() -> None:
    with pytest.raises(TypeError, match="dict is not a named tuple"):
        values.register(dict)


def test_memory_is_given_back_at_once_not_when_the_garbage_collector_comes(root: Path) -> None:
    store, nested = Store(root), {"a": [torch.ones(3), (torch.zeros(2), "x")], "b": Moments(torch.ones(1), None)}
    gc.disable()
    try:
        _, leaves = encode(nested, "row", "field")
        copies = [weakref.ref(leaf.data) for leaf in leaves]
        del leaves
        with store.writer(64, 30) as writer:
            writer.put(key_of(1), nested, "row")
        read = store.get(key_of(1))
        copies += [weakref.ref(tensor) for tensor in (read["a"][0], read["a"][1][0], read["b"].mean)]
        del read
        assert [copy() for copy in copies] == [None] * 6
    finally:
        gc.enable()
