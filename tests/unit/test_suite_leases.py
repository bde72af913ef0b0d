"""GPUs are handed out once, whoever asks, and a measurement runs alone."""

import errno
import os
import tempfile

import pytest

from rackbook.errors import ParameterError, RackbookError
from rackbook.suite import leases, locks, store
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


LISTED = """\
GPU 0: NVIDIA B300 SXM6 AC (UUID: GPU-aa10)
GPU 1: NVIDIA B300 SXM6 AC (UUID: GPU-aa11)
GPU 2: NVIDIA H200 (UUID: GPU-bb20)
  MIG 1g.18gb     Device  0: (UUID: MIG-cc30)
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine whose driver lists these GPUs; none for an empty text. CUDA_VISIBLE_DEVICES is as given."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(leases.VISIBLE, raising=False)

    def make(text: str = LISTED, visible: str | None = None) -> None:
        leases.listed.cache_clear()
        if text:
            (tmp_path / "bin").mkdir(exist_ok=True)
            tool = tmp_path / "bin" / "nvidia-smi"
            tool.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 9\nprintf '%s' '{text}'\n")
            tool.chmod(0o755)
        if visible is not None:
            monkeypatch.setenv(leases.VISIBLE, visible)

    yield make
    leases.listed.cache_clear()


@pytest.mark.parametrize(
    ("visible", "with_driver", "without"),
    [
        (None, ["0", "1", "2"], []),
        ("", [], []),
        ("-1", [], []),
        ("NoDevFiles", [], []),
        ("1, GPU-bb20", ["1", "GPU-bb20"], ["1", "GPU-bb20"]),
        ("1,-1,0", ["1"], ["1"]),
        ("1,,0", ["1"], ["1"]),
        ("1,7,0", ["1"], ["1", "7", "0"]),  # only a driver tells that there is no GPU 7
        ("GPU-bb,GPU-aa,0", ["GPU-bb"], ["GPU-bb", "GPU-aa", "0"]),  # aa begins the names of two
        ("1,GPU-aa11,0", ["1"], ["1", "GPU-aa11", "0"]),
        ("MIG-cc30", ["MIG-cc30"], ["MIG-cc30"]),
    ],
)
def test_the_visible_gpus_are_those_that_cuda_would_show(driver, visible, with_driver, without):
    driver("", visible)
    assert leases.visible() == without
    driver(LISTED, visible)
    assert leases.visible() == with_driver


@pytest.mark.parametrize(
    ("visible", "named", "message"),
    [
        ("2,1", ["0"], r"--gpus: got '0', allowed: 2, 1 \(CUDA_VISIBLE_DEVICES is '2,1'\)"),
        ("-1", ["0"], r"--gpus: got '0', allowed: none \(CUDA_VISIBLE_DEVICES is '-1'\)"),
        (None, ["3"], r"--gpus: got '3', allowed: 0, 1, 2 \(those that nvidia-smi lists\)"),
        (None, ["first"], "--gpus: got 'first', allowed: 0, 1, 2"),
        (None, ["1", "GPU-aa11"], "--gpus: got '1' and 'GPU-aa11', which are the same GPU"),
    ],
)
def test_gpus_that_are_not_there_or_not_given_are_refused(driver, visible, named, message):
    driver(LISTED, visible)
    with pytest.raises(ParameterError, match=message):
        leases.chosen(named)


def test_gpus_may_be_named_by_number_or_by_uuid_and_without_a_driver_at_all(driver):
    driver(LISTED, "GPU-aa11,2")
    assert leases.chosen(["2", "1"]) == ["2", "1"]
    driver("", "0,1")
    with pytest.raises(ParameterError, match="got '2', allowed: 0, 1"):
        leases.chosen(["2"])


def test_where_nobody_tells_which_gpus_there_are_the_user_does(driver):
    driver("")
    assert leases.chosen(["0", "1"]) == ["0", "1"]


def test_a_number_and_a_uuid_of_one_gpu_exclude_each_other(driver, tmp_path):
    driver()
    mine, yours = leases.Leases(["0", "1"], tmp_path), leases.Leases(["GPU-aa10", "GPU-bb20"], tmp_path)
    assert mine.take(1) == ["0"]
    assert yours.take(2) is None
    assert yours.take(1) == ["GPU-bb20"]
    mine.give_back(["0"])
    assert yours.take(1) == ["GPU-aa10"]


def test_where_nothing_can_be_locked_nobody_is_waited_for(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    results = store.Store(tmp_path / "out")
    results.prepare()
    message = "cannot be locked: No locks available; choose a folder on a file system with locks"
    with pytest.raises(RackbookError, match=f"out/locks/request: {message}"):
        results.lock("request")
    with pytest.raises(RackbookError, match=message):
        leases.Leases(["0"], tmp_path).take(1)
    with pytest.raises(RackbookError, match=message):
        leases.Leases([], tmp_path).turn([])
