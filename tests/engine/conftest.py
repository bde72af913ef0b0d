"""What the tests with a real vLLM share: the CPU lab, installed once, and servers on it."""

import os
import sys
from contextlib import ExitStack

import pytest

from rackbook.engine.lab import Lab
from rackbook.engine.lab_install import LabError

LONGEST_FIRST = (
    "test_measuring_lab", "test_server", "test_contract_033", "test_lab_server", "test_lab_faults", "test_replay_lab",
    "test_routed_experts",
)  # fmt: skip
"""Order of the files, so that two workers end together; the first one installs the lab, the second needs none."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by :data:`LONGEST_FIRST`; other files come after."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The CPU lab; skipped where it cannot be installed, failed there if RACKBOOK_REQUIRE_LAB is set, as in CI."""
    found = Lab()
    try:
        return found.install(lambda line: print(line, file=sys.stderr, flush=True))
    except LabError as problem:
        if os.environ.get("RACKBOOK_REQUIRE_LAB"):
            raise
        pytest.skip(f"no CPU lab: {problem}")


@pytest.fixture(scope="module")
def lab_server(lab, tmp_path_factory):
    """Starts servers of the lab, with the arguments of ``Lab.server``; each lives until the module's tests are done."""
    folder = tmp_path_factory.mktemp("lab")
    with ExitStack() as stack:
        started = []

        def start(**options):
            options.setdefault("log", folder / f"server-{len(started)}.log")
            started.append(stack.enter_context(lab.server(**options)))
            return started[-1]

        yield start
