"""All-reduces over torch, with the lab's interpreter: Gloo's own, doubling on its transport, and vLLM 0.33's own."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import vllm_033

import rackbook
from rackbook.hostwork import collectives, recording
from rackbook.hostwork.rank_group import BLOCK_S, RankError, RankGroup

GLOO, DOUBLING, VLLM = "Gloo all-reduce", "doubling over Gloo", "vLLM's all-reduce"


@pytest.fixture(scope="module")
def group(lab):
    with RankGroup([GLOO, DOUBLING, VLLM, "doubling over sockets"], lab.python) as opened:
        yield opened


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_all_reduces_over_gloo_give_the_sum_on_every_rank(group, num_ranks):
    """A wrong sum on any rank in any turn would be a RankError."""
    with group.ranks(num_ranks) as ranks:
        for name in (GLOO, DOUBLING):
            block = ranks.block(name, 10)
            assert block.durations_ms.shape == (10,)
            assert block.waits > 1, "a rank waits at least once in an exchange between processes"


def test_the_labs_vllm_is_too_old_for_an_all_reduce_of_its_own(group):
    assert set(group.absent) == {VLLM}
    assert "no all-reduce of its own, which it has from 0.33.0 on" in group.absent[VLLM]
    assert group.versions["torch"]


@pytest.mark.parametrize("name", [GLOO, DOUBLING])
def test_a_rank_that_dies_in_mid_collective_ends_the_block_in_seconds(group, name):
    with group.ranks(3) as ranks:
        ranks.block(name, 2)
        killer = threading.Timer(0.3, os.kill, (ranks.pids[1], signal.SIGKILL))
        killer.start()
        before = time.monotonic()
        with pytest.raises(RankError, match=f"rank 1 of 3 was ended by SIGKILL, in a block of 100000 × {name}"):
            ranks.block(name, 100_000)
        assert time.monotonic() - before < BLOCK_S / 2, "it does not wait for the time to run out"
        killer.join()
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.pids)


def test_a_gloo_rank_sends_more_than_one_that_doubles(lab):
    """The count behind the chart of segments: no number of cores is needed for it."""
    found = collectives.measure([8, 16], algorithms=[GLOO, DOUBLING], interpreter=lab.python, budget_s=4.0).points
    sent = {row[:2]: row[2] for row in found.select("all_reduce", "num_ranks", "segments_per_rank").rows()}
    assert 1.8 < sent[GLOO, 16] / sent[GLOO, 8] < 2.4, "in proportion to the ranks but one"
    assert 1.2 < sent[DOUBLING, 16] / sent[DOUBLING, 8] < 1.5, "four hops against three"
    assert sent[GLOO, 16] > 4 * sent[DOUBLING, 16], "thirty hops against four"


def test_the_lab_is_what_the_ranks_run_with_where_this_python_has_no_torch(lab):
    assert recording.default_interpreter() == lab.python


def test_torchrun_starts_ranks_that_write_one_file(lab, tmp_path):
    out = tmp_path / "collectives.json"
    arguments = [
        str(lab.python), "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "3", "--master-addr",
        "127.0.0.1", "--master-port", "29481", "-m", "rackbook.hostwork.ranks", "--out", str(out), "--blocks", "6",
        "--turns", "5", "--algorithms", GLOO, DOUBLING, "ring over sockets",
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(Path(rackbook.__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(out.read_text())["absent"] == {}
    found = collectives.read_launched(out).points
    assert sorted(found["all_reduce"]) == sorted([GLOO, DOUBLING, "ring over sockets"])
    assert found["num_ranks"].to_list() == [3, 3, 3]


def test_what_vllm_033_ships_gives_the_sum_on_any_number_of_ranks(lab, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(vllm_033.files(lab.python)))
    with RankGroup([VLLM, DOUBLING], lab.python) as group:
        assert group.absent == {}
        assert group.versions["vllm"] == "0.33.0"
        for num_ranks in (2, 3, 4, 6):
            with group.ranks(num_ranks) as ranks:
                assert ranks.block(VLLM, 10).durations_ms.size == 10
