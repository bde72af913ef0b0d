"""GPUs are handed out once, whoever asks."""

from rackbook.suite import leases


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


def test_the_visible_gpus_are_those_of_the_variable(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1f")
    assert leases.visible() == ["3", "GPU-1f"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert leases.visible() == []


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(leases.shutil, "which", lambda _name: None)
    assert leases.visible() == []
