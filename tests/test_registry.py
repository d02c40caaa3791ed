"""Plug-ins are found by module name or pkg.module:Class, and their settings are checked before they are built."""

import sys

import pytest

from flowrun import registry
from flowrun.config import ConfigError
from flowrun.registry import Registry

BASE = """
class Animal:
    pass
"""
LION = """
from dataclasses import dataclass
from enum import Enum
from zoo import Animal
from flowrun.config import ConfigError

class Food(Enum):
    meat = "meat"
    hay = "hay"

@dataclass(kw_only=True, slots=True)
class Cage:
    width: int
    bars: list[float]

class Lion(Animal):
    @dataclass(kw_only=True, slots=True)
    class Config:
        name: str
        food: Food
        weight: float | None
        cage: Cage

        def __post_init__(self):
            if self.weight is not None and self.weight < 100:
                raise ConfigError("animal.weight", f"is {self.weight}", "lions weigh at least 100")
"""
GOOD = {"name": "leo", "food": "meat", "weight": 190, "cage": {"width": 3, "bars": [1, 2.5]}}


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A package `zoo` of animals beside a package `mine` of a user, both importable."""
    files = {
        "zoo/__init__.py": BASE,
        "zoo/lion.py": LION,
        "zoo/_helper.py": "raise RuntimeError('imported')",
        "zoo/broken.py": "raise RuntimeError('imported')",
        "zoo/pair.py": "from zoo import Animal\nclass A(Animal): pass\nclass B(Animal): pass\n",
        "mine/__init__.py": "",
        "mine/cats.py": "from zoo import Animal\nclass Cat(Animal): pass\nclass Dog: pass\n",
        "mine/needs.py": "import no_such_package_at_all\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield Registry("animal", "zoo", "Animal")
    for name in [m for m in sys.modules if m.split(".")[0] in ("zoo", "mine")]:
        del sys.modules[name]


@pytest.fixture
def lion(zoo):
    return zoo.find("lion", "animal.kind")


def refused(call, *arguments, **named):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **named)
    assert "Config" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_come_from_files_without_importing(zoo):
    assert zoo.names() == ["broken", "lion", "pair"]
    assert "zoo" not in sys.modules


def test_a_name_is_a_module(zoo):
    assert zoo.find("lion", "animal.kind").__name__ == "Lion"


def test_module_and_class_is_taken_as_it_is(zoo):
    assert zoo.find("mine.cats:Cat", "animal.kind").__module__ == "mine.cats"
    assert zoo.find("zoo.pair:B", "animal.kind").__name__ == "B"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loin", "animal.kind: there is no animal 'loin'; did you mean lion?"),
        ("dog", "animal.kind: there is no animal 'dog'; known: broken, lion, pair"),
        ("_helper", "animal.kind: there is no animal '_helper'; known: broken, lion, pair"),
        ("mine.cats.Cat", "a class of your own is written pkg.module:Class"),
        ("mine.cats:Cta", "animal.kind: mine.cats has no 'Cta'; did you mean Cat?"),
        ("mine.cats:Dog", "animal.kind: mine.cats:Dog is no animal; derive it from zoo.Animal"),
        ("mine.dogs:Dog", "animal.kind: there is no module 'mine.dogs'; install it"),
        ("nobody.dogs:Dog", "animal.kind: there is no module 'nobody'; install it"),
        ("mine.needs:X", "animal.kind: mine.needs needs the package 'no_such_package_at_all'; install"),
        (":Cat", "animal.kind: ':Cat' names no class; write pkg.module:Class"),
        ("mine.cats:", "write pkg.module:Class"),
        (".cats:Cat", "write pkg.module:Class"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(zoo, name, message):
    assert message in refused(zoo.find, name, "animal.kind")


def test_a_fault_inside_a_plug_in_keeps_its_traceback(zoo):
    with pytest.raises(RuntimeError, match="imported"):
        zoo.find("broken", "animal.kind")


def test_a_module_with_two_classes_is_a_fault_of_the_plug_in(zoo):
    with pytest.raises(TypeError, match="zoo.pair defines 2 subclasses of Animal"):
        zoo.find("pair", "animal.kind")


def test_build_gives_a_typed_config(zoo, lion):
    built = zoo.build("animal", lion, GOOD)
    assert isinstance(built, lion.Config)
    assert (built.name, built.food.name, built.weight) == ("leo", "meat", 190.0)
    assert isinstance(built.weight, float)
    assert (built.cage.width, built.cage.bars) == (3, [1.0, 2.5])
    with pytest.raises(AttributeError):
        built.colour = "gold"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wieght": 1}, "animal.wieght: is no setting; did you mean animal.weight?"),
        ({"colour": 1}, "animal.colour: is no setting; known: cage, food, name, weight"),
        (
            {"cage": {"width": 3, "bars": [], "widht": 1}},
            "animal.cage.widht: is no setting; did you mean animal.cage.w",
        ),
        ({"weight": "heavy"}, "animal.weight: 'heavy' has the wrong type; give a number"),
        ({"cage": {"width": 1.5, "bars": []}}, "animal.cage.width: '1.5' has the wrong type; give a whole number"),
        ({"cage": {"width": 1, "bars": [1, "x"]}}, "animal.cage.bars[1]: 'x' has the wrong type; give a number"),
        ({"cage": {"width": 1, "bars": 2}}, "animal.cage.bars: is no list; give a list"),
        ({"cage": 3}, "animal.cage: is 3, not a section; give its fields, animal.cage.FIELD=VALUE"),
        ({"cage": {"width": 1}}, "animal.cage.bars: is not given; write animal.cage.bars=VALUE"),
        ({"food": "grass"}, "animal.food: there is no 'grass'; known: hay, meat"),
        ({"food": "maet"}, "animal.food: there is no 'maet'; did you mean meat?"),
        ({"name": None}, "animal.name: is null; give a value"),
        ({"name": "???"}, "animal.name: is not given"),
        ({"weight": 5}, "animal.weight: is 5.0; lions weigh at least 100"),
    ],
)
def test_build_refuses_wrong_settings(zoo, lion, change, message):
    assert message in refused(zoo.build, "animal", lion, GOOD | change)


def test_build_names_all_that_is_missing(zoo, lion):
    assert "animal.cage, animal.food, animal.weight: are not given" in refused(
        zoo.build, "animal", lion, {"name": "leo"}
    )


def test_build_wants_a_mapping(zoo, lion):
    assert "animal: is None; give a mapping" in refused(zoo.build, "animal", lion, None)


def test_fields_that_stand_beside_are_left_out_and_suggested(zoo, lion):
    from flowrun.config import Task

    node = {"algorithm": "sft", "splitter": "none", "trainable_models": []}
    built = zoo.build("animal", lion, GOOD | node, beside=Task)
    assert not hasattr(built, "splitter")
    assert "did you mean animal.splitter?" in refused(zoo.build, "animal", lion, GOOD | {"spliter": 1}, beside=Task)


def test_common_fields_are_checked_out_of_a_larger_section():
    from flowrun.config import Task

    node = {"name": "a", "algorithm": "sft", "splitter": "none", "trainable_models": ["x"], "density": "uniform"}
    task = registry.common("task", Task, node)
    assert (task.name, task.trainable_models) == ("a", ["x"])
    node["trainable_models"] = "transformer"
    assert "task.trainable_models: is no list" in refused(registry.common, "task", Task, node)
    del node["splitter"]
    assert "task.splitter: is not given" in refused(registry.common, "task", Task, node | {"trainable_models": []})


def test_a_removed_setting_says_where_it_went():
    from flowrun.config import Model

    node = {"name": "m", "pipeline": "emoji", "dtype": "fp32", "attn_backend": "flash"}
    text = refused(registry.checked, "model", Model, node)
    assert text.startswith("model.attn_backend: was moved to acceleration.shared.attention_backend; ")


@pytest.mark.parametrize(
    "kind", [registry.PIPELINES, registry.SOURCES, registry.ALGORITHMS, registry.SPLITTERS], ids=lambda kind: kind.kind
)
def test_every_built_in_plug_in_is_found(kind):
    assert kind.names()
    for name in kind.names():
        assert issubclass(kind.find(name, "x"), kind.base())
