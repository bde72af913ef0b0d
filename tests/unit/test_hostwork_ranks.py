"""Rank processes: the algorithms on paper, real processes with checked sums, and everything that can happen to them."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import rackbook
from rackbook.errors import DataError, ParameterError
from rackbook.hostwork import collectives
from rackbook.hostwork.rank_group import BLOCK_S, RankError, RankGroup
from rackbook.hostwork.ranks import lanes, launched, schedules, segments, timing, wiring
from rackbook.models.collective import recursive_doubling_hops

SOCKETS = ("doubling over sockets", "ring over sockets")


def gone(pids, within_s=3.0):
    """Whether all these processes end in time; a zombie counts as ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if _alive(pid)]
        if not alive:
            return True
        time.sleep(0.02)
    return False


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ── on paper ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_doubling_adds_up_every_number_once_on_every_rank(num_ranks):
    held = [1 << rank for rank in range(num_ranks)]  # a number added twice would show
    steps = [list(schedules.doubling(rank, num_ranks)) for rank in range(num_ranks)]
    rounds = 0
    while any(steps):
        ready = {}
        for rank, left in enumerate(steps):
            if left:
                kind, peer = left[0]
                answers = {"send": ("add", "take"), "add": ("send",), "take": ("send",), "exchange": ("exchange",)}
                if steps[peer] and steps[peer][0][1] == rank and steps[peer][0][0] in answers[kind]:
                    ready[rank] = (kind, held[peer])
        assert ready, "the ranks wait for each other"
        for rank, (kind, other) in ready.items():
            steps[rank].pop(0)
            held[rank] = other if kind == "take" else held[rank] + (other if kind != "send" else 0)
        rounds += 1
    assert held == [2**num_ranks - 1] * num_ranks
    assert rounds == recursive_doubling_hops(num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 6, 13])
def test_partners_are_mutual(num_ranks):
    for rank in range(num_ranks):
        for peer in schedules.partners(rank, num_ranks):
            assert rank in schedules.partners(peer, num_ranks)


def test_lanes_add_without_carrying():
    most = (2**32 - 1) // 2
    one, other = lanes.encode([most, 0, 7], 2), lanes.encode([most, 5, 0], 2)
    assert lanes.decode(lanes.add(one, other)) == [2 * most, 5, 7]


@pytest.mark.parametrize("values", [[-1], [(2**32 - 1) // 3 + 1]])
def test_numbers_whose_sum_might_carry_are_refused(values):
    with pytest.raises(ValueError, match="allowed: 0 to 1431655765"):
        lanes.encode(values, 3)


def test_a_vector_that_would_fill_the_sockets_is_refused():
    with pytest.raises(ValueError, match="got 8193 numbers, allowed: up to 8192"):
        lanes.encode([0] * 8193, 2)


def test_contributions_make_the_expected_sum_and_change_from_turn_to_turn():
    for num_ranks in (2, 5):
        parts = np.array([lanes.contribution(rank, num_ranks, 3) for rank in range(num_ranks)])
        assert parts.sum(0).tolist() == lanes.expected_sum(num_ranks, 3)
        assert len(set(lanes.expected_sum(num_ranks, 3))) == 7 * num_ranks, "a swapped lane shows"
        assert lanes.expected_sum(num_ranks, 3) != lanes.expected_sum(num_ranks, 4)


class Fake:
    """An all-reduce that gives what it is told to."""

    def __init__(self, results):
        self.results = list(results)

    def put(self, values):
        pass

    def run(self):
        pass

    def result(self):
        return self.results.pop(0)


def test_a_wrong_sum_is_named_with_its_place():
    wrong = [*lanes.expected_sum(2, 1)]
    wrong[5] += 1
    fake = Fake([lanes.expected_sum(2, 0), wrong])
    with pytest.raises(
        timing.WrongSumError, match=f"rank 1 of 2, all-reduce 1: wrong sum in lane 5 of 14: got {wrong[5]}"
    ):
        timing.block(fake, 1, 2, 0, 2)


def test_the_first_all_reduce_of_a_block_is_checked_and_not_counted(monkeypatch):
    times = itertools.chain([0, 1000, 2000, 2007, 3000, 3002], itertools.count(4000))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(times))
    found = timing.block(Fake(lanes.expected_sum(2, turn) for turn in (4, 5, 6)), 0, 2, 4, 2)
    assert found["durations_ns"] == [7, 2]
    with pytest.raises(timing.WrongSumError, match="all-reduce 4: wrong sum"):
        timing.block(Fake([lanes.expected_sum(2, 5)]), 0, 2, 4, 2)


def test_of_several_ranks_the_slowest_counts():
    parts = [
        {"durations_ns": [5, 2], "cpu_ns": 10, "waits": 4, "segments": 3.0},
        {"durations_ns": [1, 9], "cpu_ns": 30, "waits": 0, "segments": 1.0},
    ]
    joined = {"durations_ns": [5, 9], "cpu_ns": 10.0, "waits": 1.0, "segments": 2.0}
    assert timing.joined(parts, 2) == joined
    parts[1]["segments"] = None
    assert timing.joined(parts, 2) == joined | {"segments": None}


def test_segments_are_those_of_this_process_s_own_connections():
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        ours = socket.create_connection(meeting.getsockname())
        theirs, _ = meeting.accept()
        with ours, theirs:
            before = segments.sent()
            if before is None:
                pytest.skip("this system does not tell")
            for _ in range(3):
                ours.sendall(b"x")
                theirs.recv(1)
            assert segments.sent() - before == 3
            assert ours.fileno() >= 0, "it is still open"
            ours.sendall(b"y")
            assert theirs.recv(1) == b"y"


# ── real processes ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def group():
    with RankGroup(SOCKETS) as opened:
        yield opened


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7])
def test_all_reduces_over_sockets_give_the_sum_on_every_rank(group, num_ranks):
    """A wrong sum on any rank in any turn would be a RankError."""
    with group.ranks(num_ranks) as ranks:
        for name in SOCKETS:
            block = ranks.block(name, 20)
            assert block.durations_ms.shape == (20,)
            assert (block.durations_ms > 0).all()
            assert block.cpu_us > 0
        pids = ranks.pids
        assert len(set(pids)) == num_ranks
    assert gone(pids)


def test_ranks_are_pinned_where_the_cores_suffice_and_otherwise_said_to_be_too_many(group):
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core: no two ranks can be pinned")
    with group.ranks(2) as ranks:
        placed = [os.sched_getaffinity(pid) for pid in ranks.pids]
        assert ranks.pinned
        assert not ranks.oversubscribed
    assert all(len(mine) == 1 for mine in placed)
    assert placed[0] != placed[1]
    with group.ranks(len(cores) + 1) as ranks:
        assert not ranks.pinned
        assert ranks.oversubscribed
        assert os.sched_getaffinity(ranks.pids[0]) == cores


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_in_mid_collective_ends_the_block_with_its_name(group, victim):
    with group.ranks(4) as ranks:
        pids = ranks.pids
        killer = threading.Timer(0.3, os.kill, (pids[victim], signal.SIGKILL))
        killer.start()
        before = time.monotonic()
        with pytest.raises(
            RankError, match=f"rank {victim} of 4 was ended by SIGKILL, in a block of 1000000 × doubling"
        ):
            ranks.block("doubling over sockets", 1_000_000)
        assert time.monotonic() - before < BLOCK_S / 2, "it does not wait for the time to run out"
        killer.join()
    assert gone(pids)
    with group.ranks(2) as ranks:  # the group is as good as new
        assert ranks.block("ring over sockets", 3).durations_ms.size == 3


def test_a_rank_that_hangs_is_named_and_all_are_ended(group):
    with group.ranks(3) as ranks:
        pids = ranks.pids
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(
            RankError, match=r"no answer from rank .*1.* of 3 in a block of 5 × ring over sockets within 1 s"
        ):
            ranks.block("ring over sockets", 5, within_s=1.0)
    assert gone(pids)


def test_a_taken_port_is_said_before_any_rank_starts(group):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(
                RankError, match=f"cannot listen on port {port} of 127.0.0.1: Address already in use; end what"
            ),
            group.ranks(2, port=port),
        ):
            pass


@pytest.mark.parametrize("count", [1, 257])
def test_impossible_numbers_of_ranks_are_refused(group, count):
    with pytest.raises(ParameterError, match=f"num_ranks: got {count}, allowed: 2 to 256"), group.ranks(count):
        pass
    with pytest.raises(ParameterError, match="rank_counts: got"):
        collectives.measure([2, count], algorithms=SOCKETS)


def test_an_unknown_all_reduce_names_the_known_ones():
    with pytest.raises(
        ParameterError,
        match="unknown all-reduce: got 'ring over socket', allowed: Gloo .*Did you mean 'ring over sockets'",
    ):
        RankGroup(["ring over socket"])


def test_without_torch_the_reason_is_given_and_the_rest_is_measured(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch on this box')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        found = collectives.measure([2], algorithms=("Gloo all-reduce", *SOCKETS), budget_s=0.5)
    assert found.absent == {"Gloo all-reduce": "torch cannot be imported here (ImportError: no torch on this box)"}
    assert sorted(found.points["all_reduce"]) == sorted(SOCKETS)


def test_an_interpreter_that_is_none_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="interpreter: got .*nowhere.*, which is no program here"):
        RankGroup(SOCKETS, tmp_path / "nowhere")
    with pytest.raises(RankError, match="the rank processes ended with status 0; last words"):
        RankGroup(SOCKETS, "/bin/true").__enter__()


PARENT = """
import sys, time
from rackbook.hostwork.rank_group import RankGroup
with RankGroup(["doubling over sockets"]) as group, group.ranks(3) as ranks:
    print(group._process.pid, *ranks.pids, flush=True)
    if sys.argv[1] == "busy":
        ranks.block("doubling over sockets", 10_000_000)
    time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_rank_outlives_its_parent(state, ending):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4
        time.sleep(0.1)
        os.kill(parent.pid, ending)
        parent.wait(10)
        assert gone(pids)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_ranks_end_with_their_nursery():
    with RankGroup(["doubling over sockets"]) as group, contextlib.suppress(RankError), group.ranks(3) as ranks:
        killer = threading.Timer(0.3, os.kill, (group._process.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(RankError, match="the rank processes ended with status -9"):
            ranks.block("doubling over sockets", 10_000_000)
        killer.join()
        assert gone(ranks.pids)


def test_the_table_has_a_row_per_all_reduce_and_number_of_ranks():
    found = collectives.measure([3, 2], algorithms=SOCKETS, budget_s=1.5).points
    assert found.select("num_ranks", "all_reduce").rows() == [(n, name) for n in (2, 3) for name in SOCKETS]
    assert (found["num_values"] == 7 * found["num_ranks"]).all()
    for row in found.to_dicts():
        assert (row["sync_low_ms"] is None) == (row["num_repeats"] < 6)
        assert (row["sync_p99_ms"] is None) == (row["num_samples"] < 100)
        missing = row["sync_low_ms"] is None or row["sync_p99_ms"] is None
        assert (row["missing_reason"] is not None) == missing
        if not missing:
            assert row["sync_low_ms"] <= row["sync_p50_ms"] <= row["sync_high_ms"] <= row["sync_p99_ms"]


# ── under a launcher ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def start():
    """Starts a rank as a launcher would; whatever still runs at the test's end is ended."""
    started = []
    yield lambda *given, **names: started.append(launched_rank(*given, **names)) or started[-1]
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def launched_rank(rank, num_ranks, port, out, *options, **names):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(Path(rackbook.__file__).parents[1]), "MASTER_PORT": str(port)} | names
    if not names:
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rackbook.hostwork.ranks", "--out", str(out), "--algorithms", *SOCKETS, *options],
        env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def free_port():
    """A port whose successor is free too: the ranks meet at the one after the launcher's."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1] - 1


def test_launched_ranks_write_one_file_that_is_read_like_a_measurement(start, tmp_path):
    port, out = free_port(), tmp_path / "collectives.json"
    started = [start(rank, 3, port, out, "--blocks", "6", "--turns", "20") for rank in range(3)]
    assert [process.wait(30) for process in started] == [0, 0, 0]
    assert not any(process.stderr.read() for process in started)
    found = collectives.read_launched(out).points
    assert found.select("all_reduce", "num_ranks", "num_hosts", "num_repeats", "num_samples").rows() == [
        (name, 3, 1, 6, 120) for name in SOCKETS
    ]
    assert (found["sync_low_ms"] <= found["sync_p99_ms"]).all()
    assert (found["oversubscribed"] == (len(os.sched_getaffinity(0)) < 3)).all()
    assert socket.gethostname() not in out.read_text()


def test_slurm_names_do_as_well(start, tmp_path):
    port, out = free_port(), tmp_path / "collectives.json"
    names = [{"SLURM_PROCID": str(r), "SLURM_NTASKS": "2", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"} for r in range(2)]
    started = [start(r, 2, port, out, "--blocks", "1", "--turns", "5", **names[r]) for r in range(2)]
    assert [process.wait(30) for process in started] == [0, 0]
    assert collectives.read_launched(out).points["num_ranks"].to_list() == [2, 2]


def num_sockets(pid):
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            found += str(descriptor.readlink()).startswith("socket:")
    return found


def test_a_launched_rank_that_dies_ends_the_others_in_seconds(start, tmp_path):
    port = free_port()
    started = [start(rank, 3, port, tmp_path / "f", "--turns", "1000000") for rank in range(3)]
    deadline = time.monotonic() + 30
    while num_sockets(started[0].pid) < 5:
        assert time.monotonic() < deadline, "rank 0 never had the two guests, two partners and the meeting"
        time.sleep(0.02)
    time.sleep(0.3)
    started[1].kill()
    assert [process.wait(20) for process in started] == [1, -9, 1]
    # whichever of the two a rank was waiting for: the one that was killed, or the one that ended because of it
    assert re.search(r"rank [12] has closed its connection: it ended or was killed", started[0].stderr.read())
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no RANK or SLURM_PROCID in the environment; start the ranks with torchrun or srun"),
        ({"RANK": "1"}, "no WORLD_SIZE or SLURM_NTASKS"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: got 'x', allowed: a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no address of rank 0: set one of MASTER_ADDR, SLURM_LAUNCH_NODE_IPADDR"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "got rank 2 of 2 ranks, allowed: 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "p"}, "MASTER_PORT: got 'p'"),
    ],
)
def test_what_a_launcher_must_set_is_named(environment, words):
    with pytest.raises(wiring.WiringError, match=words):
        launched.place(environment)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("{", "not what launched ranks write"),
        (json.dumps({"format": 2}), "got format 2, this version reads 1"),
        (json.dumps({"format": 1}), r"not what launched ranks write \(KeyError: 'num_ranks'\)"),
    ],
)
def test_a_file_that_is_not_theirs_is_refused(tmp_path, content, words):
    path = tmp_path / "f.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=words):
        collectives.read_launched(path)


def test_the_segments_of_all_reduces_over_sockets_are_counted(group):
    with group.ranks(4) as ranks:
        found = {name: ranks.block(name, 20).segments for name in group.algorithms}
    # each hop is one, but the system may join two that follow each other
    assert 4 < found["ring over sockets"] <= 6
    assert 1.5 < found["doubling over sockets"] <= 2
