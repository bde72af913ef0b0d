"""The cores that jobs are counted by: affinity, and the quota of a container."""

import os

import pytest

from rackbook import cores


@pytest.mark.parametrize(
    ("quota", "usable", "whole"),
    [("200000 100000", 2.0, 2), ("50000 100000", 0.5, 1), ("max 100000", 96.0, 96), (None, 96.0, 96)],
)
def test_a_quota_counts_as_well_as_the_affinity(tmp_path, monkeypatch, quota, usable, whole):
    monkeypatch.setattr(cores, "core_ids", lambda: list(range(96)))
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert cores.usable_cores() == usable
    assert cores.whole_cores() == whole


def test_a_system_without_affinity_has_all_its_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.core_ids() == list(range(os.cpu_count()))
