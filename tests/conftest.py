"""What the tests share: where files that users bring lie, and where the source texts lie."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def own_turns(tmp_path_factory) -> Iterator[None]:
    """Tests side by side, and a user's own runs, do not wait for each other's measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACKBOOK_LEASES", str(tmp_path_factory.mktemp("leases")))
        yield


@pytest.fixture(scope="session")
def realdata() -> Path:
    """Result files that users bring; not part of the project."""
    folder = ROOT / os.environ.get("RACKBOOK_REALDATA", "../shared/realdata")
    if not folder.is_dir():
        pytest.skip(f"no result files of users at {folder} (set RACKBOOK_REALDATA)")
    return folder


@pytest.fixture(scope="session")
def source_texts(realdata) -> dict[str, str]:
    """The texts of the two reports, by source id; not part of the project."""
    folder = realdata.parent / "seeds"
    if not folder.is_dir():
        pytest.skip(f"no source texts at {folder}")
    return {
        "S1": (folder / "000_9e085201b4dc93b4.txt").read_text("utf-8"),
        "S2": (folder / "002_bc08410977b364ef.txt").read_text("utf-8"),
    }
