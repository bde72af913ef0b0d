"""The plugin's collectives, on real processes of the lab, against plain arithmetic here."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("collective_ranks.py")


@pytest.fixture(scope="module")
def by_rank(lab, tmp_path_factory):
    """For each rank, its cases by the size of the group."""
    command = [lab.python, "-W", "ignore", SCRIPT, tmp_path_factory.mktemp("ranks")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=[2, 3, 4])
def cases(request, by_rank):
    """For each case, what every rank of a group of so many sent and got."""
    return list(zip(*(by_rank[rank][str(request.param)] for rank in range(request.param)), strict=True))


def test_every_rank_gets_all_parts_in_rank_order(cases):
    for ranks in cases:
        for tensor in range(3):
            expected = [row for rank in ranks for row in rank["sent"][tensor]]
            assert len(expected) == sum(ranks[0]["sizes"])
            for rank in ranks:
                assert rank["gathered"][tensor] == expected
        assert ranks[0]["types"] == ["torch.bfloat16", "torch.float32", "torch.int32"]


def test_every_rank_keeps_its_rows_of_the_sum(cases):
    for ranks in cases:
        total = np.sum([np.array(rank["summand"], dtype=np.float32) for rank in ranks], axis=0, dtype=np.float32)
        ends = np.cumsum(ranks[0]["sizes"])
        for rank, end, size in zip(ranks, ends, ranks[0]["sizes"], strict=True):
            assert np.array(rank["summed"], dtype=np.float32).reshape(size, 3) == pytest.approx(
                total[end - size : end], abs=1e-6
            )


def test_16_bit_summands_are_added_in_32_bits_and_rounded_once(cases):
    for ranks in cases:
        parts = np.array([rank["narrow_summand"] for rank in ranks], dtype=np.float32)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        bits = total.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
        ends = np.cumsum(ranks[0]["sizes"])
        for rank, end, size in zip(ranks, ends, ranks[0]["sizes"], strict=True):
            got = np.array(rank["narrow"], dtype=np.float32).reshape(size, 3)
            assert np.array_equal(got, rounded[end - size : end])
