"""The one form of every returned value, which is that of a value read back from disk."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import NamedTuple

import numpy
import pytest
import torch
from declared import DRAWS, unit

from flowrun.graph import Executor, Record, State
from flowrun.graph.state import canonical

Point = namedtuple("Point", "x y")


class Sized(NamedTuple):
    name: str
    value: torch.Tensor


def fresh_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape).stride()


def misaligned() -> torch.Tensor:
    """[8], fp32, 4 bytes after a multiple of 64."""
    buffer = numpy.arange(32, dtype=numpy.float32)
    start = (4 - buffer.ctypes.data) % 64 // 4
    return torch.from_numpy(buffer[start : start + 8])


BASE = torch.arange(2 * 4 * 6 * 8, dtype=torch.float32).reshape(2, 4, 6, 8)
FORMS = {
    "view of a part": BASE[1],
    "single element": BASE[1, 2, 3, 4],
    "strided": BASE[..., ::2],
    "transposed": BASE.transpose(1, 3),
    "expanded": torch.randn(2, 1, 6, 8).expand(2, 4, 6, 8),
    "channels-last": BASE.contiguous(memory_format=torch.channels_last),
    "channels-last of one channel": BASE[:, :1].contiguous(memory_format=torch.channels_last),
    "misaligned": torch.arange(65, dtype=torch.float32)[1:],
    "front of a longer one": torch.arange(65, dtype=torch.float32)[:64],
    "permuted with a single row": torch.randn(5, 1).t()[:, :3],
    "bf16 view": BASE.to(torch.bfloat16)[:, 1],
    "bool view": (BASE > 7)[0],
    "int64 view": torch.arange(10)[3:],
    "complex conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "made in inference mode": torch.inference_mode()(lambda: BASE * 2)(),
    "misaligned, all of its memory": misaligned(),
    "needs a gradient": torch.nn.Parameter(BASE),
    "frozen weight": torch.nn.Parameter(BASE, requires_grad=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_lies_in_fresh_memory_of_its_own(form):
    given = FORMS[form]
    value = canonical(given)
    assert type(value) is torch.Tensor
    assert (value.dtype, value.shape) == (given.dtype, given.shape)
    assert torch.equal(value, given)
    assert value.stride() == fresh_strides(value.shape)
    assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert value.data_ptr() % 64 == 0
    assert not value.requires_grad
    assert not value.is_inference()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)])
def test_a_tensor_in_that_form_is_not_copied(shape):
    value = torch.zeros(shape)
    assert canonical(value) is value


def test_a_convolution_of_a_returned_value_is_that_of_a_fresh_one():
    """Channels-last memory changes the last bits, also where its one channel makes it contiguous as well."""
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(1, 8, 3, padding=1)
    image = torch.randn(2, 1, 16, 16)
    odd = image.contiguous(memory_format=torch.channels_last)
    odd = torch.empty_strided(image.shape, (256, 1, 16, 1)).copy_(odd)
    assert odd.is_contiguous()
    assert torch.equal(convolution(canonical(odd)), convolution(image))


def test_containers_are_plain_and_new_and_hold_canonical_values():
    part = BASE[1]
    given = {
        "list": [part, 1],
        "tuple": (part, None),
        "ordered": OrderedDict(b=1, a=part),
        "default": defaultdict(list, k=[part]),
    }
    value = canonical(given)
    assert [type(item) for item in value.values()] == [list, tuple, dict, dict]
    assert list(value["ordered"]) == ["b", "a"]
    for tensor in (value["list"][0], value["tuple"][0], value["ordered"]["a"], value["default"]["k"][0]):
        assert torch.equal(tensor, part)
        assert tensor.untyped_storage().nbytes() == part.numel() * 4
    given["list"].append("later")
    assert len(value["list"]) == 2


@pytest.mark.parametrize("given", [Point(1, [2.5]), Sized("a", BASE[0]), Point(Point(1, 2), Sized("b", BASE[1]))])
def test_named_tuples_keep_their_type(given):
    value = canonical(given)
    assert type(value) is type(given)
    assert value._fields == given._fields
    inner = value.y if isinstance(value, Point) and isinstance(value.y, Sized) else value
    if isinstance(inner, Sized):
        assert inner.value.untyped_storage().nbytes() == inner.value.numel() * 4


@pytest.mark.parametrize("given", ["text", "", 3, 2.5, True, None, b"bytes", torch.bfloat16])
def test_other_values_pass(given):
    assert canonical(given) is given


def test_what_a_unit_returns_is_canonical_in_the_state_and_in_the_record():
    executor = Executor(
        [unit("u", ["x"], ["y", "z"], lambda ctx, x: {"y": x[1], "z": {"deep": (x.transpose(0, 1),)}})], {}
    )
    state, made = State(shared={"x": BASE}), {}
    executor.run(state, DRAWS, made=made)
    assert made[0].values[("shared", "y")] is state.shared["y"]
    for tensor in (state.shared["y"], state.shared["z"]["deep"][0]):
        assert tensor.stride() == fresh_strides(tensor.shape)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4


def test_fp32_positions_stay_fp32_beside_bf16_embeddings():
    def process(ctx, x):
        with torch.autocast("cpu", torch.bfloat16):
            return {"e": x @ x.t(), "positions": torch.arange(4, dtype=torch.float32) / 3}

    values = (
        Executor([unit("u", ["x"], ["e", "positions"], process)], {})
        .run(State(shared={"x": torch.ones(4, 4)}), DRAWS)
        .shared
    )
    assert (values["e"].dtype, values["positions"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(values["positions"], torch.arange(4, dtype=torch.float32) / 3)


def test_a_record_writes_what_was_returned_and_removes_what_was_deleted():
    state = State(shared={"a": 1, "b": 2}, posi={"a": 3}, nega={"a": 4})
    state.apply(Record({("shared", "a"): 10, ("posi", "c"): 11}, frozenset({("nega", "a"), ("shared", "not there")})))
    assert state == State(shared={"a": 10, "b": 2}, posi={"a": 3, "c": 11}, nega={})


def test_a_copied_state_holds_the_same_values_in_other_scopes():
    value = torch.zeros(2)
    state = State(shared={"x": value}, posi={"x": 1})
    copy = state.copy()
    copy.shared["y"] = copy.posi["x"] = copy.nega["x"] = 2
    assert state == State(shared={"x": value}, posi={"x": 1})
    assert copy.shared["x"] is value


@pytest.mark.parametrize("param", [("shared", "x"), ("posi", "y")])
def test_a_value_that_is_not_there_is_not_invented(param):
    with pytest.raises(KeyError):
        State(shared={"y": 1}, posi={"x": 1}).get(param)
    assert State(posi={"y": 5}, shared={"x": 5}).get(param) == 5
