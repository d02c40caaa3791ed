"""Imports go down the layers, plug-ins are reached by name only, and the command line stays free of torch."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "flowrun"

# A module may import modules of its own layer or of one above it in this list. Names: modules or folders of flowrun/.
LAYERS = (
    "config paradigm entries wording spelling registry compose overrides launch files outputs pairs disk machine plain progress stop utf8 "
    "uncollected "
    "sound feature_cache flow dist tracking",
    "graph",
    "cache",
    "modular",
    "pipelines splitters data accelerators nearest rewards",
    "algorithms adapters frozen optim checkpoint sampling guided policies rollout rollout_settings dealing scoring batches "
    "variants prompts remembered feed shelf library grids plan",
    "stages",
    "run rows online checks explain contact rundir session",
    "finished reward_server teacher distilled raised decoded random_data trials families memory",
    "sweep report cli __main__",
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
KINDS = ("pipelines", "splitters", "accelerators", "rewards", "data", "algorithms", "tracking")  # folders of plug-ins
WITHOUT_TORCH = ("cli", "sweep", "launch", "overrides", "compose", "registry", "wording", "config", "utf8", "__main__")
HEAVY = {"torch", "accelerate", "diffusers", "transformers", "peft", "numpy", "PIL", "wandb", "tensorboard", "safetensors", "matplotlib"}


@dataclass(frozen=True)
class Import:
    """`module` imports `target` (full dotted names). only_typing: for annotations; lazy: inside a function."""

    module: str
    target: str
    only_typing: bool
    lazy: bool


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def targets(node: ast.AST, module: str) -> Iterator[str]:
    """What an import statement imports; `from package import module` counts as the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module} uses a relative import"
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in MODULES else node.module


def inside(tree: ast.Module, wanted: type | tuple[type, ...], keep=lambda node: True) -> set[int]:
    return {id(inner) for node in ast.walk(tree) if isinstance(node, wanted) and keep(node) for inner in ast.walk(node)}


def imports_of(module: str, file: Path) -> list[Import]:
    tree = ast.parse(file.read_text())
    typing = inside(tree, ast.If, lambda node: isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    lazy = inside(tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    return [
        Import(module, target, id(node) in typing, id(node) in lazy)
        for node in ast.walk(tree)
        for target in targets(node, module)
    ]


IMPORTS = [found for module, file in MODULES.items() for found in imports_of(module, file)]
OWN = [found for found in IMPORTS if found.target.split(".")[0] == "flowrun" and not found.only_typing]


def part(module: str) -> str:
    """The file or folder of flowrun/ that a module belongs to; a folder's own commands are commands."""
    if module.endswith(".__main__"):
        return "__main__"
    return module.split(".")[1] if "." in module else ""


def plug_in(module: str) -> bool:
    names = module.split(".")
    return len(names) == 3 and names[1] in KINDS and not names[2].startswith("_")


def test_the_walk_sees_the_imports():
    assert Import("flowrun.cli", "flowrun.run", only_typing=False, lazy=True) in IMPORTS
    assert any(found.target == "accelerate" for found in IMPORTS)
    assert any(plug_in(module) for module in MODULES)


def test_every_module_has_a_layer():
    assert {part(module) for module in MODULES} - {""} <= LEVEL.keys(), "say in LAYERS where the new module belongs"


def test_imports_go_down():
    up = [i for i in OWN if part(i.target) and LEVEL[part(i.target)] > LEVEL[part(i.module)]]
    assert not up


def test_no_import_cycles():
    edges: dict[str, set[str]] = {}
    for found in OWN:
        if found.module != found.target and not found.lazy:
            edges.setdefault(found.module, set()).add(found.target)
    list(TopologicalSorter(edges).static_order())  # raises CycleError


def test_plug_ins_are_reached_by_name():
    """Deleting a plug-in's file breaks no other file."""
    assert not [i for i in OWN if plug_in(i.target) and i.target != i.module]


def test_only_dist_imports_accelerate():
    assert {i.module for i in IMPORTS if i.target.split(".")[0] == "accelerate"} == {"flowrun.dist"}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_the_command_line_imports_is_light(name):
    """Walks everything that importing the module imports; lazy imports run later and do not count."""
    seen, todo = set(), [f"flowrun.{name}"]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for found in (i for i in IMPORTS if i.module == module and not i.only_typing and not i.lazy):
            assert found.target.split(".")[0] not in HEAVY, f"flowrun.{name} imports {found.target} by way of {module}"
            if found.target in MODULES:
                todo += [found.target, *(p for p in MODULES if found.target.startswith(f"{p}."))]
    assert len(seen) > 1 or name in ("config", "launch", "utf8")
