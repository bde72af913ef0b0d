"""Placement with replicas and its bounds: hand-computed cases, laws, and small cases against every placement."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rackbook.errors import DataError, ParameterError
from rackbook.experts.bounds import greatest_balancedness, least_maximum, least_share
from rackbook.experts.placement import Placement, initial, place

TABLES = arrays.arrays(np.int64, st.tuples(st.integers(1, 3), st.just(6)), elements=st.integers(0, 40))


def one(slots, num_experts, num_ranks):
    return Placement(np.array([slots]), num_experts, num_ranks)


def busiest(placement, loads):
    return placement.expected_rank_loads(loads).max(axis=-1)


# a placement


def test_expected_loads_by_hand():
    # expert 0 (12 tokens) on ranks 0 and 1, expert 1 (3) on 0, expert 2 (5) on 1: 6 + 3 and 6 + 5
    placement = one([0, 1, 2, 0], 3, 2)
    assert placement.num_replicas.tolist() == [[2, 1, 1]]
    assert placement.expected_rank_loads([[12, 3, 5]]).tolist() == [[9, 11]]
    assert placement.expected_rank_loads([[[12, 3, 5]], [[0, 1, 2]]]).tolist() == [[[9, 11]], [[1, 2]]]


def test_copies_on_one_rank_are_duplicates_and_share_nothing_out():
    placement = one([0, 0, 1, 2], 3, 2)
    assert placement.num_duplicates == 1
    assert placement.expected_rank_loads([[12, 3, 5]]).tolist() == [[12, 8]]
    assert one([0, 1, 2, 0], 3, 2).num_duplicates == 0


def test_moves_by_hand():
    before, after = one([0, 1, 2, 3, 0, 1], 4, 3), one([1, 0, 2, 0, 3, 3], 4, 3)
    # rank 0 keeps 0 and 1 in other slots, rank 1 gets 0, rank 2 gets 3 (twice, sent once)
    assert before.moved_to(after).tolist() == [[0, 1, 1]]
    assert before.moved_to(before).sum() == 0
    with pytest.raises(DataError, match="different sizes"):
        before.moved_to(one([0, 1, 2, 3], 4, 2))


def test_whole_tokens_are_shared_out_without_loss():
    placement = Placement(np.array([[0, 1, 0, 2, 0, 0], [0, 1, 2, 2, 1, 0]]), 3, 3)
    tokens = np.array([[[11, 4, 2], [3, 7, 7]], [[2, 0, 15], [17, 0, 0]]])
    # 11 tokens on four copies: 3, 3, 3, 2; the third rank has two of the copies
    assert placement.rank_loads(tokens)[0, 0].tolist() == [3 + 4, 3 + 2, 3 + 2]
    for rng in (None, np.random.default_rng(1)):
        loads = placement.rank_loads(tokens, rng)
        assert (loads.sum(axis=-1) == tokens.sum(axis=-1)).all()
        assert loads.dtype.kind == "i"


def test_a_copy_is_drawn_fairly():
    placement = one([0, 1, 0, 2, 0, 3], 4, 3)
    tokens = np.full((4000, 1, 4), 30) * np.array([1, 0, 0, 0])
    loads = placement.rank_loads(tokens, np.random.default_rng(1))[:, 0]
    assert loads.mean(axis=0) == pytest.approx([10, 10, 10], abs=0.2)
    # a multinomial count: n·p·(1 − p)
    assert loads.var(axis=0) == pytest.approx([30 * 2 / 9] * 3, rel=0.1)


@pytest.mark.parametrize(
    ("slots", "ranks", "message"),
    [
        ([0, 1, 2, 3], 2, "holds expert 0 to 3, allowed: 0 to 2"),
        ([0, 1, -1, 2], 2, "holds expert -1 to 2"),
        ([0, 1, 1, 0], 2, "layer 0 of a placement has no slot for expert 2"),
    ],
)
def test_a_placement_that_serves_not_all_is_refused(slots, ranks, message):
    with pytest.raises(DataError, match=message):
        one(slots, 3, ranks)


def test_slots_that_do_not_divide_name_what_would():
    with pytest.raises(ParameterError, match=r"14 slots .* over 4 ranks; the next numbers that can: 12 and 16"):
        initial(1, 12, 2, 4)
    with pytest.raises(ParameterError, match="redundant experts: got -1"):
        initial(1, 12, -1, 4)


def test_a_server_starts_with_the_first_experts_again():
    assert initial(2, 4, 2, 3).slots.tolist() == [[0, 1, 2, 3, 0, 1]] * 2


# the algorithm


def test_placement_by_hand():
    # 9 is halved; then 4.5, 4.5, 4, 3, 2, 1 heaviest first: {4.5, 3, 1} … and one exchange makes both 9.5
    placement = place([[9, 4, 3, 2, 1]], 6, 2)
    assert placement.num_replicas.tolist() == [[2, 1, 1, 1, 1]]
    assert sorted(placement.expected_rank_loads([[9, 4, 3, 2, 1]])[0]) == [9.5, 9.5]


def test_exchanges_mend_what_greed_spoils():
    # greed: 5 | 4, 4 | 3, 3 | 3, full: {5, 3, 3} and {4, 4, 3}… = 11 and 11; without exchanges 6, 5, 4, 3, 2, 1 fails
    weights = [[8, 7, 6, 5, 4, 0]]
    greedy_maximum = 8 + 5 + 4
    assert busiest(place(weights, 6, 2), weights)[0] < greedy_maximum


def test_the_example_of_the_algorithms_authors(realdata):
    example = json.loads((realdata / "eplb" / "eplb_readme_example.json").read_text())
    loads, ranks = np.array(example["weight"]), example["num_gpus"]
    theirs = Placement(np.array(example["phy2log"]), loads.shape[1], ranks)
    ours = place(
        loads, example["num_replicas"], ranks, num_groups=example["num_groups"], num_nodes=example["num_nodes"]
    )
    assert (ours.num_replicas == theirs.num_replicas).all()
    assert (busiest(ours, loads) <= busiest(theirs, loads)).all()
    groups = loads.shape[1] // example["num_groups"]
    for layer in ours.slots.reshape(2, example["num_nodes"], -1):
        on_node = [set(node // groups) for node in layer]
        assert [len(node) for node in on_node] == [2, 2], "a group lies on one node"


@settings(deadline=None)
@given(TABLES, st.sampled_from([6, 8, 10, 12]))
def test_laws_of_a_placement(loads, num_slots):
    placement = place(loads, num_slots, 2)
    assert placement.slots.shape == (len(loads), num_slots)
    by_rank = placement.expected_rank_loads(loads)
    assert by_rank.sum(axis=-1) == pytest.approx(loads.sum(axis=-1))
    assert (by_rank.max(axis=-1) >= least_maximum(loads, num_slots, 2) - 1e-9).all()
    assert (loads / placement.num_replicas).max(axis=-1) == pytest.approx(least_share(loads, num_slots))


@settings(deadline=None)
@given(arrays.arrays(np.int64, (2, 16), elements=st.integers(0, 100)))
def test_groups_stay_on_their_nodes(loads):
    placement = place(loads, 24, 8, num_groups=4, num_nodes=2)
    for layer in placement.slots.reshape(2, 2, -1):
        assert not set(layer[0] // 4) & set(layer[1] // 4)


def test_groups_that_do_not_divide_among_the_nodes_are_ignored():
    loads = np.random.default_rng(1).integers(0, 100, (2, 12))
    flat = place(loads, 16, 4)
    assert (place(loads, 16, 4, num_groups=3, num_nodes=2).slots == flat.slots).all()


def test_layers_do_not_meet():
    loads = np.random.default_rng(1).lognormal(0, 1.5, (5, 24))
    together = place(loads, 32, 8).slots
    assert (np.concatenate([place(layer[None], 32, 8).slots for layer in loads]) == together).all()


def test_one_slot_per_rank_and_one_rank():
    assert sorted(place([[3, 1, 2]], 3, 3).slots[0]) == [0, 1, 2]
    assert busiest(place([[3, 1, 2]], 4, 1), [[3, 1, 2]])[0] == 6


def every_placement(num_experts, num_slots, num_ranks):
    """All ways to fill the slots, up to the order within a rank."""
    room = num_slots // num_ranks
    choices = list(itertools.combinations_with_replacement(range(num_experts), room))
    for ranks in itertools.combinations_with_replacement(choices, num_ranks):
        if len({e for rank in ranks for e in rank}) == num_experts:
            yield Placement(np.array([[e for rank in ranks for e in rank]]), num_experts, num_ranks)


@pytest.mark.parametrize("seed", range(4))
def test_bound_and_placement_against_every_placement(seed):
    loads = np.random.default_rng(seed).integers(1, 30, (1, 4))
    best = min(float(busiest(p, loads)[0]) for p in every_placement(4, 6, 3))
    assert least_maximum(loads, 6, 3)[0] <= best + 1e-9
    assert best <= busiest(place(loads, 6, 3), loads)[0] <= 4 / 3 * best


# bounds


def test_bounds_by_hand():
    # 12 in three copies is 4, then 5 is the largest share; the mean over two ranks is 11
    assert least_share([12, 5, 3, 2], 6) == 5
    assert least_share([12, 5, 3, 2], 4) == 12
    assert least_maximum([12, 5, 3, 2], 6, 2) == 11
    assert least_maximum([12, 5, 3, 2], 4, 4) == 12
    # 7 tokens in two copies: some copy has four; 8 ÷ 4 ranks ÷ 4
    assert greatest_balancedness([7, 1, 0], 4, 4) == pytest.approx(0.5)
    assert greatest_balancedness([3, 3, 3], 9, 3) == 1


@settings(deadline=None)
@given(arrays.arrays(np.int64, (3, 5), elements=st.integers(1, 60)), st.integers(0, 8))
def test_least_share_is_the_smallest_that_fits(loads, more):
    share = least_share(loads, 5 + more)
    # so many slots hold every expert in copies of at most this share, and no smaller share will do
    assert (np.ceil(loads / share[:, None] - 1e-9).sum(axis=1) <= 5 + more).all()
    assert (np.ceil(loads / (share[:, None] * (1 - 1e-6))).sum(axis=1) > 5 + more).all()


def test_no_bound_without_a_slot_for_each():
    with pytest.raises(ParameterError, match="4 experts need at least as many slots, got 3"):
        least_share([1, 2, 3, 4], 3)


# bad input


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: place([[1, -2, 3]], 3, 3), DataError, "layer 0, expert 1: a load of -2"),
        (lambda: place([[1, 2], [3, np.nan]], 2, 2), DataError, "layer 1, expert 1: a load of nan"),
        (lambda: place([1, 2, 3], 3, 3), DataError, r"shape \(layers, experts\), got \(3,\)"),
        (lambda: place([[1, 2, 3]], 4, 3), ParameterError, "4 slots .* over 3 ranks"),
        (lambda: place([[1, 2, 3, 4]], 2, 2), ParameterError, "4 experts need at least as many slots, got 2"),
        (lambda: place([[1, 2, 3, 4]], 4, 4, num_groups=3), ParameterError, "3 groups do not divide 4 experts"),
        (lambda: place([[1, 2, 3, 4]], 4, 4, num_nodes=3), ParameterError, "3 nodes do not divide 4 ranks"),
    ],
)
def test_impossible_placements_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
