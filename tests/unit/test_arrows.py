"""The direction of imports between the rooms of the library: a room knows nothing of those above it."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rackbook

ROOT = Path(rackbook.__file__).parent
PLACES = {path.stem if path.suffix else path.name for path in ROOT.iterdir() if not path.name.startswith("_")}
"""The rooms, and each module beside them."""


def names(node: ast.AST) -> Iterator[str]:
    """Full names of what a piece of code imports of the library, also within functions; not what only types need."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and node.module == "rackbook":
        yield from (f"rackbook.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from names(child)


@pytest.fixture(scope="module")
def imported():
    """By place, the other places whose code it imports."""
    found = {place: set() for place in PLACES}
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own in PLACES:
            parts = [name.split(".") for name in names(ast.parse(path.read_text("utf-8")))]
            found[own] |= {part[1] for part in parts if part[0] == "rackbook" and len(part) > 1} & PLACES - {own}
    return found


def test_no_two_places_know_each_other_by_any_way_round(imported):
    try:
        order = list(TopologicalSorter(imported).static_order())
    except CycleError as problem:
        pytest.fail(f"imports go round: {' → '.join(problem.args[1])}")
    assert order[-1] == "cli"


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("charts", {"tables", "errors", "pictures", "startup"}),
        ("tables", {"errors", "locations"}),
        ("published", {"tables", "errors", "locations", "records"}),
        ("cores", set()),
    ],
)
def test_what_stands_low_knows_little(imported, place, allowed):
    assert imported[place] <= allowed


def test_no_room_knows_the_command_line(imported):
    assert {place for place, others in imported.items() if "commands" in others} == {"cli"}
