"""Uniform routing: the law is exact on every path, nothing is lost, seeds reproduce, memory is bounded."""

import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rackbook.errors import ParameterError
from rackbook.experts import routing
from rackbook.experts.routing import experts_per_rank, sample_expert_counts, sample_rank_loads

BENCH = Path(__file__).parents[1] / "bench"


def subsets_drawn(num_experts, top_k, num_draws, seed=3):
    """How often each set of experts was drawn, one token per draw."""
    counts = sample_expert_counts(num_tokens=1, num_experts=num_experts, top_k=top_k, num_draws=num_draws, seed=seed)
    assert set(np.unique(counts)) <= {0, 1}, "an expert twice for one token"
    keys = counts @ (2 ** np.arange(num_experts))
    expected = [sum(2**e for e in chosen) for chosen in itertools.combinations(range(num_experts), top_k)]
    return [int((keys == key).sum()) for key in expected]


@pytest.mark.parametrize(
    ("num_experts", "top_k", "many"),
    [(5, 1, 4), (5, 2, 4), (6, 3, 4), (7, 5, 4), (6, 2, 0), (6, 3, 0), (7, 5, 0)],
    ids=["one", "redrawn", "half", "left out", "marked", "marked half", "marked left out"],
)
def test_every_set_of_experts_is_equally_likely(monkeypatch, num_experts, top_k, many):
    monkeypatch.setattr(routing, "MANY", many)
    observed = subsets_drawn(num_experts, top_k, 40_000)
    assert sum(observed) == 40_000
    assert stats.chisquare(observed).pvalue > 1e-3


def test_words_beyond_the_last_whole_share_are_drawn_again():
    # 40,000 experts use 40,000 of 65,536 words: the others must fall on all experts, not on the last ones
    (counts,) = sample_expert_counts(num_tokens=400_000, num_experts=40_000, top_k=1, num_draws=1, seed=1)
    quarters = counts.reshape(4, -1).sum(axis=1)
    assert stats.chisquare(quarters).pvalue > 1e-3
    assert counts.max() < 50


def test_more_experts_than_a_16_bit_word_holds():
    (counts,) = sample_expert_counts(num_tokens=70_000, num_experts=70_000, top_k=2, num_draws=1, seed=1)
    assert counts.sum() == 140_000
    assert counts[2**16 :].sum() == pytest.approx(140_000 * (70_000 - 2**16) / 70_000, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "tokens", "experts", "top_k"), [(4, 10, 8, 2), (4, 11, 8, 6), (2, 30, 40, 18), (32, 64, 128, 3)]
)
def test_moments_of_rank_loads(ranks, tokens, experts, top_k):
    """Mean, variance and correlation of a sum of hypergeometric counts."""
    draws = 20_000
    loads = sample_rank_loads(
        num_ranks=ranks, num_tokens=tokens, num_experts=experts, top_k=top_k, num_draws=draws, seed=7
    )
    mean = tokens * top_k / ranks
    variance = mean * (1 - 1 / ranks) * (experts - top_k) / (experts - 1)
    assert loads.shape == (draws, ranks)
    assert np.abs(loads.mean(axis=0) - mean).max() < 5 * (variance / draws) ** 0.5
    assert loads.var(axis=0).mean() == pytest.approx(variance, rel=0.03)
    correlation = np.corrcoef(loads, rowvar=False)[0, 1]
    assert correlation == pytest.approx(-1 / (ranks - 1), abs=5 / draws**0.5)


def test_same_distribution_as_the_plain_version(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from bench_routing import plain_rank_loads

    batch = {"num_ranks": 4, "num_tokens": 40, "num_experts": 16, "top_k": 3, "num_draws": 6000}
    ours, plain = sample_rank_loads(**batch, seed=1), plain_rank_loads(**batch, seed=2)
    for pick in (lambda loads: loads.max(axis=1), lambda loads: loads[:, 0], lambda loads: loads.min(axis=1)):
        top = int(max(pick(ours).max(), pick(plain).max())) + 1
        table = np.array([np.bincount(pick(loads), minlength=top) for loads in (ours, plain)])
        table = table[:, table.sum(axis=0) >= 20]
        assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("entries", [1, 50, 1000, 2**18])
@pytest.mark.parametrize("top_k", [3, 9])
def test_any_block_size_keeps_all_pairs_and_the_law(monkeypatch, entries, top_k):
    monkeypatch.setattr(routing, "BLOCK_ENTRIES", entries)
    loads = sample_rank_loads(num_ranks=4, num_tokens=21, num_experts=12, top_k=top_k, num_draws=60, seed=5)
    assert (loads.sum(axis=1) == 21 * top_k).all()
    assert len(np.unique(loads, axis=0)) > 30, "blocks repeat each other"
    assert loads.mean(axis=0) == pytest.approx([21 * top_k / 4] * 4, rel=0.08)


def test_counting_in_pairs_changes_nothing(monkeypatch):
    batch = {"num_ranks": 8, "num_tokens": 30, "num_experts": 16, "top_k": 3, "num_draws": 50, "seed": 4}
    paired = sample_rank_loads(**batch)
    monkeypatch.setattr(routing, "MOST_PAIRS", 0)
    assert (sample_rank_loads(**batch) == paired).all()


def test_a_rank_holds_neighbouring_experts():
    batch = {"num_tokens": 30, "num_experts": 16, "top_k": 3, "num_draws": 5, "seed": 4}
    counts = sample_expert_counts(**batch)
    assert counts.shape == (5, 16)
    assert (sample_rank_loads(num_ranks=4, **batch) == counts.reshape(5, 4, 4).sum(axis=2)).all()


def test_all_experts_for_every_token():
    assert (sample_expert_counts(num_tokens=7, num_experts=6, top_k=6, num_draws=3, seed=0) == 7).all()
    assert sample_rank_loads(num_ranks=1, num_tokens=2, num_experts=1, top_k=1, num_draws=1, seed=0).tolist() == [[2]]


def test_seeds():
    batch = {"num_ranks": 4, "num_tokens": 50, "num_experts": 16, "top_k": 3, "num_draws": 20}
    first = sample_rank_loads(**batch, seed=1)
    assert (sample_rank_loads(**batch, seed=1) == first).all()
    assert (sample_rank_loads(**batch, seed=2) != first).any()
    generator = np.random.default_rng(1)
    assert (sample_rank_loads(**batch, seed=generator) == first).all()
    assert (sample_rank_loads(**batch, seed=generator) != first).any(), "the generator was not advanced"


def test_memory_does_not_grow_with_tokens_or_draws():
    def peak(**batch):
        tracemalloc.start()
        sample_rank_loads(num_ranks=32, num_experts=384, seed=1, **batch)
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return largest

    bound = 24 * routing.BLOCK_ENTRIES
    assert peak(num_tokens=300_000, top_k=6, num_draws=1) < bound
    assert peak(num_tokens=500, top_k=6, num_draws=2000) < bound + 2000 * 32 * 8
    assert peak(num_tokens=5000, top_k=100, num_draws=1) < bound


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 5}, "384 experts cannot be spread evenly over 5 ranks.* divides 384: 1, 2, 3, 4, 6, 8"),
        ({"num_ranks": 0}, "got 384 experts on 0 ranks"),
        ({"top_k": 385}, "top_k: got 385, allowed: 1 to num_experts, which is 384"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"num_tokens": 0}, "num_tokens: got 0, allowed: at least 1"),
        ({"num_draws": 0}, "num_draws: got 0, allowed: at least 1"),
    ],
)
def test_impossible_batches_are_refused(change, message):
    batch = {"num_ranks": 32, "num_tokens": 10, "num_experts": 384, "top_k": 6, "num_draws": 2, "seed": 0}
    with pytest.raises(ParameterError, match=message):
        sample_rank_loads(**(batch | change))


def test_experts_per_rank():
    assert experts_per_rank(384, 32) == 12
    assert experts_per_rank(128, 32) == 4
