"""A real Slurm for the tests of this folder; without the packages they are skipped, and say so."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parent))

import small_cluster


@pytest.fixture(scope="session")
def cluster():
    """Two nodes of two cores and two GPUs each."""
    if missing := small_cluster.missing():
        pytest.skip(f"no Slurm here ({', '.join(missing)} not installed): apt-get install slurm-wlm munge")
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'rackbook[slurm]'")
    with tempfile.TemporaryDirectory(prefix="rb-slurm-") as folder, small_cluster.Cluster(Path(folder)) as running:
        yield running
