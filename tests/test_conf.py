"""Every option in conf/ composes, its class exists, and its file lists every field with a comment; new ones count."""

import re
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import get_type_hints

import pytest
import yaml

from flowrun import adapters, overrides
from flowrun.compose import CONF, compose, option_names
from flowrun.config import Acceleration, CacheSettings, Model, Optimizer, Run, Sample, Task, Train
from flowrun.registry import ACCELERATORS, ALGORITHMS, PIPELINES, REWARDS, SOURCES, SPLITTERS
from flowrun.rewards import Common
from flowrun.rollout_settings import RolloutSettings
from flowrun.tracking import TRACKERS

OPTIONS = [(group, name) for group, names in option_names([CONF]).items() for name in names]
SECTIONS = {  # of typed sections: group -> schema
    "optimizer": Optimizer,
    "adapter": adapters.Config,
}
PLUG_INS = {  # of plug-ins: group -> (registry, the field that names the plug-in, fields that stand beside its own)
    "model": (PIPELINES, "pipeline", Model),
    "data": (SOURCES, "source", None),
    "task": (ALGORITHMS, "algorithm", Task),
    "reward": (REWARDS, "kind", Common),
}
SLOTS = ("acceleration/shared", "acceleration/rollout")
FILES = sorted(CONF.rglob("*.yaml"))


def choose(group, name):
    return f"{group}=[{name}]" if group in overrides.LISTS else f"{group}={name}"


def content(group, name):
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())


def section(group, name):
    """The group's own section in the option's file, which may hold further ones when its package is global."""
    whole = content(group, name)
    is_global = (CONF / group / f"{name}.yaml").read_text().startswith("# @package _global_\n")
    return whole[group] if is_global else whole[name] if group in overrides.LISTS else whole


def lacking(schema, node, where=""):
    """Fields that are in the schema and not in the node, or the other way round, at any depth."""
    hints = get_type_hints(schema)
    names = {f.name for f in fields(schema)}
    found = [f"{where}{name}" for name in names ^ set(node)]
    for name in names & set(node):
        if is_dataclass(hints[name]):
            found += lacking(hints[name], node[name], f"{where}{name}.")
    return found


def schemas():
    """(group, option, its schema, the part of its file that the schema describes)."""
    for group, name in OPTIONS:
        if group in SECTIONS:
            yield group, name, SECTIONS[group], section(group, name)
        if group == "tracker":
            yield group, name, TRACKERS.find(name, "tracker").Config, section(group, name)
        if group in SLOTS:
            yield group, name, ACCELERATORS.find(name, group).Config, content(group, name)[name]
        if group in PLUG_INS:
            registry, selector, beside = PLUG_INS[group]
            node = section(group, name)
            others = [f.name for f in fields(beside)] if beside else []
            assert set(others) <= set(node)
            own = {key: value for key, value in node.items() if key not in others}
            yield group, name, registry.find(node[selector], group).Config, own


SCHEMAS = list(schemas())


def test_all_options_are_covered():
    """A new group needs a line above; a new option of a known group needs none."""
    assert {group for group, *_ in SCHEMAS} == {group for group, _ in OPTIONS} - {"experiment"}


@cache
def composed(group, name):
    needed = content(group, name)[name] if group in SLOTS else {}
    must = [f"{group.replace('/', '.')}.{name}.{field}=native" for field, value in needed.items() if value == "???"]
    return compose([choose(group, name), *must])


def quick(group, name):
    """Options of published models, and rewards, differ from one another in names and numbers: those in the long run only."""
    alike = (group == "model" and not name.endswith("tiny")) or (group == "reward" and name != "red")
    return pytest.param(group, name, marks=pytest.mark.slow if alike else ())


@pytest.mark.parametrize(("group", "name"), [quick(*option) for option in OPTIONS])
def test_option_composes(group, name):
    run = composed(group, name)
    assert isinstance(run, Run)
    if group in overrides.LISTS:
        assert list(attrgetter(group.replace("/", "."))(run)) == [name]


@pytest.mark.parametrize(("group", "name", "schema", "node"), SCHEMAS, ids=[f"{g}-{n}" for g, n, *_ in SCHEMAS])
def test_file_lists_every_field(group, name, schema, node):
    assert not lacking(schema, node)


@pytest.mark.parametrize(("group", "name", "schema", "node"), SCHEMAS, ids=[f"{g}-{n}" for g, n, *_ in SCHEMAS])
def test_schema_has_no_numbers_of_its_own(group, name, schema, node):
    """Values stand in conf/ only; slots, so that nothing can be set that is not a field."""
    assert not [f.name for f in fields(schema) if (f.default, f.default_factory) != (MISSING, MISSING)]
    assert all(f.kw_only for f in fields(schema))
    assert "__slots__" in vars(schema)


@pytest.mark.slow
@pytest.mark.parametrize("group", PLUG_INS)
def test_plug_in_accepts_its_section(group):
    registry, selector, beside = PLUG_INS[group]
    for name in (n for g, n in OPTIONS if g == group):
        node = getattr(composed(group, name), group)
        node = node[name] if group in overrides.LISTS else node
        registry.build(group, registry.find(node[selector], group), node, beside)


def test_tasks_name_known_splitters():
    for name in (n for g, n in OPTIONS if g == "task"):
        assert section("task", name)["splitter"] in SPLITTERS.names()


@pytest.mark.parametrize("name", [n for g, n in OPTIONS if g in ("task",)])
def test_task_is_named_as_its_file(name):
    assert section("task", name)["name"] == name


@pytest.mark.parametrize("name", [n for g, n in OPTIONS if g == "model"])
def test_model_is_named_as_its_file(name):
    assert section("model", name)["name"] == name


def test_every_plug_in_has_an_option():
    for group, (registry, selector, _) in PLUG_INS.items():
        used = {section(group, name)[selector] for g, name in OPTIONS if g == group}
        assert used == set(registry.names()), group
    assert {name for group, name in OPTIONS if group == "tracker"} == set(TRACKERS.names())
    assert {name for group, name in OPTIONS if group in SLOTS} == set(ACCELERATORS.names())


def test_config_lists_every_general_field():
    root = yaml.safe_load((CONF / "config.yaml").read_text())
    assert not lacking(Train, root["train"])
    assert not lacking(CacheSettings, root["cache"])
    assert not lacking(Sample, root["sample"])
    assert not lacking(RolloutSettings, root["rollout"])
    chosen = {"model", "data", "task", "adapter", "optimizer", "reward", "tracker", "acceleration"}
    assert {f.name for f in fields(Run)} - chosen == set(root) - {"defaults", "hydra", "acceleration"}
    assert {f.name for f in fields(Acceleration)} - {"shared", "rollout"} == set(root["acceleration"])


def test_list_valued_groups_are_known():
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    pairs = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    assert sorted(group for group, choice in pairs if isinstance(choice, list)) == sorted(overrides.LISTS)


def leaf_lines(text):
    """Lines `key: value` outside flow and block texts."""
    depth, block = 0, None
    for line in text.splitlines():
        code = re.sub(r"(^|\s)#.*", "", line)
        indent = len(line) - len(line.lstrip())
        if block is not None and (not line.strip() or indent > block):
            continue
        block = None
        if depth == 0 and re.match(r"\s*[\w/ ]+:\s*\S", code):
            yield line
        if re.search(r"[|>]-?\s*$", code):
            block = indent
        depth += sum(code.count(c) for c in "[{") - sum(code.count(c) for c in "]}")


def test_leaf_lines_are_found():
    text = "a: 1\nb:\n  c: [1,\n    d, e: 2]\n  # x: 1\nf: |-\n  g: 1\nh: x  # y\n- override hydra/help: z\n"
    assert [line.strip() for line in leaf_lines(text)] == ["a: 1", "c: [1,", "f: |-", "h: x  # y"]


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(CONF)) for file in FILES])
def test_every_value_has_a_comment(file):
    silent = [line for line in leaf_lines(file.read_text()) if "# " not in line]
    assert not silent


def enums(schema, node, where=()):
    for name, hint in get_type_hints(schema).items():
        if isinstance(hint, type) and issubclass(hint, Enum):
            yield (*where, name), hint
        elif is_dataclass(hint):
            yield from enums(hint, node[name], (*where, name))


@pytest.mark.parametrize(("group", "name", "schema", "node"), SCHEMAS, ids=[f"{g}-{n}" for g, n, *_ in SCHEMAS])
def test_comments_name_all_choices(group, name, schema, node):
    """The comment of a setting with fixed choices lists them."""
    text = (CONF / group / f"{name}.yaml").read_text()
    for path, choices in enums(schema, node):
        line = next(line for line in text.splitlines() if re.match(rf"\s*{path[-1]}:", line))
        comment = line.partition("#")[2]
        assert [m for m in choices.__members__ if not re.search(rf"\b{m}\b", comment)] == [], line


def test_the_default_run_is_the_emoji_recipe():
    run = compose()
    assert run.task["name"] == "sft_split"
    assert run.task["splitter"] == "replay"
    o, t, s = run.optimizer, run.train, run.sample
    assert (o.name, o.lr, o.betas, o.weight_decay, o.args) == ("AdamW", 1e-3, [0.9, 0.99], 0.01, {"fused": True})
    assert (o.clip, o.warmup_steps, o.ema) == (1.0, 50, 0.99)
    assert (o.schedule, o.schedule_args) == ("cosine_with_min_lr", {"min_lr_rate": 0.03})
    assert (t.steps, t.epochs, t.batch_size) == (1000, None, 32)
    assert (s.steps, s.guidance, s.every, s.seeds) == (16, 1.5, 250, [0])
    transformer = run.model["components"]["transformer"]
    assert (transformer["num_layers"], transformer["num_single_layers"]) == (1, 4)
    assert transformer["attention_head_dim"] * transformer["num_attention_heads"] == 256
    assert run.task["caption_dropout"] == 0.1
    assert (run.task["density"], run.task["density_mean"], run.task["density_std"]) == ("logit_normal", 0.0, 1.0)


def test_emoji_samples_every_caption_in_order():
    from flowrun.data.emoji import CAPTIONS

    assert compose().sample.prompts == list(CAPTIONS)
    assert len(CAPTIONS) == 64


def test_lora_trains_nothing_whole_unless_asked():
    run = compose(["adapter=lora"])
    assert run.task["trainable_models"] == []
    assert run.adapter["lora_base_model"] == ["transformer"]
    run = compose(["adapter=lora", "task=sft", "task.trainable_models=[transformer.norm_out]"])
    assert run.task["trainable_models"] == ["transformer.norm_out"]


def test_tasks_differ_in_the_splitter_only():
    whole, split = compose(["task=sft"]).task, compose(["task=sft_split"]).task
    assert {key for key in whole if whole[key] != split[key]} == {"name", "splitter"}
