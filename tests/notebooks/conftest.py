"""The committed notebooks, one test case each."""

import pytest

from rackbook.suite.notebooks import Notebook, discover

NOTEBOOKS = discover()


def pytest_generate_tests(metafunc):
    if "notebook" in metafunc.fixturenames:
        metafunc.parametrize("notebook", NOTEBOOKS, ids=[n.name for n in NOTEBOOKS])


@pytest.fixture(scope="session")
def notebooks() -> list[Notebook]:
    return NOTEBOOKS
