"""Checkpoints: there whole or not at all, damage found, nothing of others touched, states restored bit for bit."""

import errno
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch.nn import Parameter

import flowrun.checkpoint as module
from flowrun.checkpoint import Checkpoints
from flowrun.config import Failure
from flowrun.plain import pack, unpack


def tensors(value):
    return {
        "weights": {"a.b": torch.full((3, 2), float(value)), "n": torch.tensor(value)},
        "ema": {"0": torch.full((4,), value, dtype=torch.bfloat16)},
    }


def steps(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture
def saved(tmp_path):
    points = Checkpoints(tmp_path / "c", keep=3)
    for step in (5, 10, 15):
        points.save(step, tensors(step), {"step": step})
    return points


def test_what_is_saved_comes_back(tmp_path):
    points = Checkpoints(tmp_path, keep=1)
    plain = {"pos": [1, 2.5, None, True], "text": "\u4e00\u53ea\u732b", "tiny": 5e-324, "third": 1 / 3}
    points.save(7, tensors(7), plain)
    found = points.newest()
    assert found.step == 7 and found.plain == plain
    for group, wanted in tensors(7).items():
        assert found.tensors[group].keys() == wanted.keys()
        for name, value in wanted.items():
            assert found.tensors[group][name].dtype == value.dtype
            assert torch.equal(found.tensors[group][name], value)


def test_loaded_tensors_do_not_hang_on_the_file(saved):
    found = saved.newest()
    file = saved.directory / "step-000015" / "weights.safetensors"
    with open(file, "r+b") as handle:  # in place: what is mapped from the file would change with it
        handle.write(b"\0" * file.stat().st_size)
    assert torch.equal(found.tensors["weights"]["a.b"], torch.full((3, 2), 15.0))


def test_there_is_none_in_a_new_or_missing_folder(tmp_path):
    assert Checkpoints(tmp_path, 1).newest() is None
    assert Checkpoints(tmp_path / "missing", 1).newest() is None


def test_the_newest_few_are_kept(saved):
    saved.save(20, tensors(20), {})
    assert steps(saved.directory) == ["step-000010", "step-000015", "step-000020"]
    assert saved.newest().step == 20


def test_what_was_just_saved_stays_beside_later_ones(saved):
    Checkpoints(saved.directory, keep=1).save(8, tensors(8), {})
    assert steps(saved.directory) == ["step-000008", "step-000010", "step-000015"]


def test_steps_are_compared_as_numbers(tmp_path):
    points = Checkpoints(tmp_path, 2)
    points.save(999_999, tensors(1), {})
    points.save(1_000_000, tensors(2), {})
    assert points.newest().step == 1_000_000


@pytest.mark.parametrize("damage", [
    lambda path: flip(path / "weights.safetensors"),
    lambda path: flip(path / "plain.json"),
    lambda path: (path / "ema.safetensors").unlink(),
    lambda path: (path / "manifest.json").unlink(),
    lambda path: (path / "manifest.json").write_text("{"),
    lambda path: (path / "manifest.json").write_text("[]"),
    lambda path: (path / "weights.safetensors").write_bytes((path / "weights.safetensors").read_bytes()[:-5]),
])  # fmt: skip
def test_a_damaged_one_is_named_and_the_one_before_is_used(saved, damage, caplog):
    damage(saved.directory / "step-000015")
    assert saved.newest().step == 10
    assert "step-000015" in caplog.text and "damaged" in caplog.text and "step-000010" not in caplog.text


def test_all_damaged_is_none(saved):
    for step in (5, 10, 15):
        flip(saved.directory / f"step-{step:06d}" / "plain.json")
    assert saved.newest() is None


def test_a_new_save_never_drops_the_good_one_in_favour_of_a_damaged_later_one(tmp_path):
    points = Checkpoints(tmp_path, keep=1)
    points.save(10, tensors(10), {})
    points.save(15, tensors(15), {})
    Checkpoints(tmp_path, keep=9).save(10, tensors(10), {})
    flip(tmp_path / "step-000015" / "plain.json")
    assert points.newest().step == 10
    points.save(12, tensors(12), {})
    assert points.newest().step == 12
    assert steps(tmp_path) == ["step-000012"]


def test_a_damaged_one_is_replaced_by_its_own_step(saved):
    flip(saved.directory / "step-000015" / "plain.json")
    saved.save(15, tensors(16), {"again": True})
    assert saved.newest().plain == {"again": True}
    assert steps(saved.directory) == ["step-000005", "step-000010", "step-000015"]


def test_what_others_put_there_stays(tmp_path, caplog):
    for name in ("step-000001", "step-000002", "step-final", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "step-000002" / "manifest.json").write_text(json.dumps({"format": "other"}))
    points = Checkpoints(tmp_path, keep=1)
    points.save(3, tensors(3), {})
    points.save(4, tensors(4), {})
    assert steps(tmp_path) == ["notes", "step-000001", "step-000002", "step-000004", "step-final"]
    points.save(1, tensors(1), {})
    assert (tmp_path / "step-000001.old" / "file").read_text() == "step-000001"
    assert "step-000001.old" in caplog.text


FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("error", [FULL, FULL_RUST, OSError(errno.EDQUOT, "Disk quota exceeded")])
@pytest.mark.parametrize("where", ["save_file", "_digest", "_sync"])
def test_a_disk_that_fills_up_leaves_everything_as_it_was(saved, monkeypatch, error, where):
    def full(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, where, full)
        with pytest.raises(Failure, match="disk was full while saving the checkpoint of step 20") as caught:
            saved.save(20, tensors(20), {})
    assert "FLOWRUN_OUTPUTS" in str(caught.value)
    assert steps(saved.directory) == ["step-000005", "step-000010", "step-000015"]
    assert saved.newest().step == 15
    saved.save(20, tensors(20), {})
    assert saved.newest().step == 20


def test_other_errors_are_not_called_a_full_disk(saved, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "save_file", broken)
    with pytest.raises(OSError, match="Input/output"):
        saved.save(20, tensors(20), {})
    assert steps(saved.directory) == ["step-000005", "step-000010", "step-000015"]


def test_space_is_looked_at_before_anything_is_written(saved, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 100, 100))
    with pytest.raises(Failure, match=r"the checkpoint of step 20 needs 1\.\d MB, but .* has 0\.0 MB free"):
        saved.save(20, tensors(20), {})
    assert steps(saved.directory) == ["step-000005", "step-000010", "step-000015"]


KILLED = """
import os, sys, torch
import flowrun.checkpoint as module
from pathlib import Path
points = module.Checkpoints(Path(sys.argv[1]), 2)
points.save(1, {"w": {"a": torch.ones(3)}}, {})
count = 0
def dies(path, sync=module._sync):
    global count
    count += 1
    if count == int(sys.argv[2]):
        os._exit(9)
    sync(path)
module._sync = dies
points.save(2, {"w": {"a": torch.zeros(3)}}, {})
os._exit(0)
"""


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_a_good_one(tmp_path):
    """Five syncs per save: two files, the manifest, the folder, the parent; killed before the first, third and last."""
    points = [
        (
            count,
            subprocess.Popen(
                [sys.executable, "-c", KILLED, str(tmp_path / str(count)), str(count)],
                cwd=Path(module.__file__).parents[1],
            ),
        )
        for count in (1, 3, 5)
    ]
    assert [(count, process.wait()) for count, process in points] == [(1, 9), (3, 9), (5, 9)]
    for count, _ in points:
        left = Checkpoints(tmp_path / str(count), 2)
        assert left.newest().step == (2 if count == 5 else 1)
        left.save(3, {"w": {"a": torch.ones(3)}}, {})
        assert not list(left.directory.glob(".*"))


def train(parameters, optimizer, schedule, steps):
    for i in steps:
        loss = sum(((p - 0.1 * i) ** 2 * (j + 1)).sum() for j, p in enumerate(parameters))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [
    lambda ps: torch.optim.AdamW(ps, lr=0.1, betas=(0.9, 0.99)),
    lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True, fused=True),
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    lambda ps: torch.optim.RMSprop(ps, lr=0.1, centered=True),
    lambda ps: torch.optim.Adafactor(ps, lr=0.1),
])  # fmt: skip
def test_an_optimizer_goes_on_bit_for_bit(tmp_path, make):
    def fresh():
        g = torch.Generator().manual_seed(0)
        parameters = [
            Parameter(torch.randn(3, 4, generator=g)),
            Parameter(torch.randn(2, generator=g)),
            Parameter(torch.ones(1)),
        ]
        optimizer = make(parameters)
        return parameters, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))

    whole, *rest = fresh()
    train(whole, *rest, range(7))
    first, optimizer, schedule = fresh()
    train(first, optimizer, schedule, range(4))
    packed, plan = pack({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    weights = {str(i): p for i, p in enumerate(first)}
    points = Checkpoints(tmp_path, 1)
    points.save(4, {"weights": weights, "optimizer": packed}, {"optimizer": plan})
    found = points.newest()

    second, optimizer, schedule = fresh()
    for i, p in enumerate(second):
        p.data.copy_(found.tensors["weights"][str(i)])
    state = unpack(found.tensors["optimizer"], found.plain["optimizer"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    train(second, optimizer, schedule, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


def test_plain_data_keeps_its_types_through_json():
    state = {
        "state": {0: {"step": torch.tensor(3.0), "flag": True}, 1: {}},
        "groups": [{"betas": (0.9, 1 / 3), "none": None}],
        "0": "text key",
        "big": 2**63,
        "infinite": math.inf,
    }
    packed, plan = pack(state)
    again = unpack(packed, json.loads(json.dumps(plan)))
    assert repr(again) == repr(state)
    assert list(packed) == ["state.state.0.step"]


def test_paths_that_look_alike_are_kept_apart():
    state = {"a": {"b": torch.tensor(1.0)}, "a.b": torch.tensor(2.0), 0: torch.tensor(3.0), "0": torch.tensor(4.0)}
    assert repr(unpack(*pack(state))) == repr(state)


@pytest.mark.parametrize("strange, words", [
    ({"a": {"b": object()}}, r"state\.a\.b is a object"),
    ({"a": [{1, 2}]}, r"state\.a\.0 is a set"),
    ({(1, 2): 0}, "key of type tuple"),
])  # fmt: skip
def test_what_json_cannot_hold_is_refused_with_its_path(strange, words):
    with pytest.raises(TypeError, match=words):
        pack(strange)
