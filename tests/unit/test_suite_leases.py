"""GPUs are handed out once, whoever asks, and a measurement runs alone."""

import tempfile

from rackbook.suite import leases
from rackbook.suite.executions import MACHINE


def test_two_processes_never_hold_the_same_gpu(tmp_path):
    mine, yours = leases.Leases(["0", "1", "2"], tmp_path), leases.Leases(["0", "1", "2"], tmp_path)
    assert mine.take(2) == ["0", "1"]
    assert yours.take(2) is None
    assert yours.take(1) == ["2"]
    assert mine.take(1) is None
    mine.give_back(["0", "1"])
    assert yours.take(2) == ["0", "1"]


def test_what_could_not_be_had_in_full_is_not_held(tmp_path):
    mine, yours = leases.Leases(["0", "1"], tmp_path), leases.Leases(["0", "1"], tmp_path)
    assert yours.take(1) == ["0"]
    assert mine.take(2) is None
    yours.give_back(["0"])
    assert yours.take(2) == ["0", "1"]


def test_the_machine_is_shared_by_all_or_had_by_one(tmp_path):
    mine, yours = leases.Leases([], tmp_path), leases.Leases([], tmp_path)
    shares = [mine.turn([]), mine.turn([]), yours.turn([])]
    assert None not in shares
    assert yours.turn([MACHINE]) is None
    for share in shares[:2]:
        mine.give_back(share)
    assert mine.turn([MACHINE]) is None
    yours.give_back(shares[2])
    whole = mine.turn([MACHINE])
    assert whole == [MACHINE]
    assert (mine.turn([]), yours.turn([]), yours.turn([MACHINE])) == (None, None, None)
    mine.give_back(whole)
    assert yours.turn([]) is not None


def test_who_waits_for_another_cluster_leaves_this_machine_to_others(tmp_path):
    mine, yours = leases.Leases([], tmp_path), leases.Leases([], tmp_path)
    held = mine.turn(["cluster rack"])
    assert yours.turn(["cluster rack"]) is None
    assert yours.turn(["cluster other"]) is not None
    mine.give_back(held)
    assert yours.turn(["cluster rack"]) is not None


def test_the_locks_lie_in_one_place_wherever_temporary_files_go(tmp_path, monkeypatch):
    monkeypatch.delenv("RACKBOOK_LEASES")
    before = leases.folder()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert leases.folder() == before


def test_the_visible_gpus_are_those_of_the_variable(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1f")
    assert leases.visible() == ["3", "GPU-1f"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert leases.visible() == []


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(leases.shutil, "which", lambda _name: None)
    assert leases.visible() == []
