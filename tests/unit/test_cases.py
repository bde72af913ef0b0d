"""Batches of bench forward: written and read alike, and refused where vLLM refuses them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackbook.engine.cases import Case, Request, cached_prefill, decode, in_k
from rackbook.errors import ParameterError


def test_a_decode_step_counts_the_query_into_the_context():
    case = decode("c64k", requests=16, context_tokens=65536, draft_tokens=5)
    assert str(case) == "c64k=16*6@65536:5"
    assert (case.num_requests, case.num_tokens, case.requests[0].prefix_tokens) == (16, 96, 65530)
    assert case.requests[0].is_decode


def test_a_cached_prefill_has_the_prefix_and_the_new_tokens_as_context():
    case = cached_prefill("n4k", new_tokens=4096, cached_tokens=131072)
    assert str(case) == "n4k=4096@135168"
    assert not case.requests[0].is_decode


@pytest.mark.parametrize(
    "text", ["a=8192", "a=1@2", "hit=2048@10240", "chunk=8192@40960c", "mix=8192,32*1@8192", "v=16*4@4096:3"]
)
def test_what_is_read_is_written_the_same(text):
    assert str(Case.parse(text)) == text


def test_needless_parts_are_left_out_when_written():
    assert str(Case.parse("a=1*8@8")) == "a=8"
    assert Case.parse("a=1*8@8") == Case.parse("a=8")


@st.composite
def requests(draw):
    kind = draw(st.sampled_from(["decode", "verify", "prefill", "hit", "chunk"]))
    count, prefix = draw(st.integers(1, 300)), draw(st.integers(1, 10**6))
    if kind in ("decode", "verify"):
        drafts = draw(st.integers(1, 8)) if kind == "verify" else 0
        return Request(1 + drafts, 1 + drafts + prefix, drafts, count=count)
    query = draw(st.integers(2, 10**5))
    return Request(query, query + (0 if kind == "prefill" else prefix), chunked=kind == "chunk", count=count)


@given(st.lists(requests(), min_size=1, max_size=4))
def test_writing_and_reading_is_a_round_trip(found):
    case = Case("x", tuple(found))
    assert Case.parse(str(case)) == case


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("16*6@65536:5", "allowed: NAME="),
        ("a=16x6", r"request '16x6'.*\[N\*\]Q"),
        ("a=", "request ''"),
        ("a=6@5", "context of 5 tokens, allowed: from the 6"),
        ("a=0", "0 query"),
        ("a=0*4", "0 requests"),
        ("a=4@4:3", "4 draft|3 draft tokens, expected 1 \\+ 3"),
        ("a=6@100:4", "expected 1 \\+ 4 query tokens"),
        ("a=8c", "a chunk is a prefill with a prefix"),
        ("a/b=8", "a name has letters"),
        ("a=８", "request '８'"),
    ],
)
def test_what_vllm_refuses_is_refused_here(text, words):
    with pytest.raises(ParameterError, match=words):
        Case.parse(text)


def test_names_of_token_counts():
    assert [in_k(65536), in_k(875520), in_k(1000)] == ["64k", "855k", "1000"]
