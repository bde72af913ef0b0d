"""The JSON of bench forward, made by hand from its schema: read, judged, and refused where something is wrong."""

import json

import pytest

import forward_output
from rackbook.engine import forward_results
from rackbook.engine.cases import Case
from rackbook.errors import DataError

CASES = [Case.parse("c64k=16*6@65536:5"), Case.parse("n4k=4096@135168")]


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "forward.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
        return path

    return write


def changed(path, value, num_ranks=2):
    """A result in which one field is another; the path leads from the first case's entry."""
    content = forward_output.result(CASES, num_ranks)
    at = content[0]
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return content


def test_a_sound_result_is_read(written):
    decode, prefill = forward_results.read(written(forward_output.result(CASES, 4)), CASES, 4)
    assert (decode.forward_ms, decode.forward_min_ms, decode.num_replays) == (9.005, 8.99, 4)
    assert (decode.scope, decode.drafts_agree, decode.doubts) == ("target_and_drafter", True, [])
    assert (prefill.scope, prefill.drafts_agree, prefill.case) == ("target_only", None, CASES[1])


def test_its_rows_carry_the_quality(written):
    content = changed(("ranks", 1, "graph_deterministic"), False)
    timed = forward_results.read(written(content), CASES, 2)
    rows = forward_results.points("forward", timed)
    assert rows.select("requests_per_rank", "query_tokens", "context_tokens", "draft_tokens").rows() == [
        (16, 6, 65536, 5),
        (1, 4096, 135168, 0),
    ]
    assert rows["stable"].to_list() == [False, True]
    assert rows["doubt"].to_list() == ["two replays of the same graph differ", None]
    assert rows["forward_ms"].to_list() == [9.005, 9.005]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("ranks", 1, "finite"), False, "not finite"),
        (("ranks", 1, "graph_vs_eager", "relative_rms"), 0.02, "differ by 0.02"),
        (("ranks", 1, "graph_vs_eager", "relative_rms"), float("nan"), "not a number"),
        (("ranks", 1, "drafter", "graph_matches_eager"), False, "other ones than in the eager pass"),
        (("ranks", 1, "drafter", "valid_token_ids"), False, "drafts are invalid"),
    ],
)
def test_a_doubtful_result_is_kept_and_says_why(written, path, value, words):
    timed = forward_results.read(written(changed(path, value)), CASES, 2)
    assert words in "; ".join(timed[0].doubts)
    assert timed[0].forward_ms == 9.005
    assert timed[1].doubts == []


@pytest.mark.parametrize(
    ("spread", "doubts"), [(0.5, []), (0.51, ["unsteady: sample medians spread by 0.51 %, more than 0.5 %"])]
)
def test_a_spread_beyond_the_limit_is_a_doubt(written, spread, doubts):
    content = forward_output.result(CASES, 2, latency_us=forward_output.latency(spread=spread))
    assert [timed.doubts for timed in forward_results.read(written(content), CASES, 2)] == [doubts] * 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(forward_output.result(CASES, 2))[:-40], "truncated, or still being written"),
        ("", "truncated"),
        ({"case": "c64k"}, "got dict, expected a list"),
        ([], "no result for c64k, n4k; got none"),
        (forward_output.result(CASES[:1], 2), "no result for n4k; got c64k"),
        (forward_output.result([*CASES, Case.parse("b8=8*6@4096:5")], 2), "a result for b8, which was not asked for"),
        ([*forward_output.result(CASES, 2), *forward_output.result(CASES[:1], 2)], "a case stands twice"),
        ([1], "entry 1 \\(int\\)"),
        (changed(("ranks", 0, "latency_us", "median"), 0.0), "median: got 0.0, allowed: greater than 0"),
        (changed(("ranks", 1, "latency_us", "min"), -1.0), "ranks.1.latency_us.min: got -1.0"),
        (changed(("ranks", 0, "latency_us", "median"), float("nan")), "median: got nan, allowed: a finite number"),
        (changed(("ranks", 0, "latency_us", "samples_us"), [9005.0, 0.0, 1.0, 2.0]), "samples_us.1: got 0.0"),
        (changed(("ranks", 0, "latency_us", "samples_us"), []), "samples_us"),
        (changed(("ranks", 0, "latency_us", "samples_us"), [9005.0]), "got 1 samples, expected count, 4"),
        (changed(("ranks", 0, "latency_us", "samples_us"), [9.0e3] * 4), "median of the samples is 9000 µs, the file"),
        (changed(("median_us",), 8000.0), "says 9005 and 8000 µs"),
        (changed(("ranks", 0, "latency_us", "timer"), "graph_events"), "timer 'graph_events' with 2 ranks"),
        (changed(("ranks",), []), "ranks"),
        (changed(("requests", 3, "kv_len"), 65000), "from request 4 on.*kv-len-jitter 0"),
        (changed(("ranks", 1, "routing"), "real"), "the ranks differ in routing: balanced, real"),
        (
            changed(("ranks", 1, "latency_us"), forward_output.latency([500.0, 501.0, 499.0, 502.0])),
            "ranks 0 and 1 differ in latency_us .medians 9005 and 500.5 µs.*another version",
        ),
        (changed(("ranks", 1, "latency_us", "sample_spread_pct"), 3.0), "ranks 0 and 1 differ.*spreads 0.1 and 3 %"),
        (changed(("ranks", 1, "drafter"), None), "1 of 2 ranks have a drafter; all have it, or none"),
    ],
)
def test_a_wrong_file_is_refused(written, content, words):
    with pytest.raises(DataError, match=words) as caught:
        forward_results.read(written(content), CASES, 2)
    assert "forward.json" in str(caught.value)


def test_a_field_that_is_missing_points_to_another_version(written):
    content = forward_output.result(CASES, 2)
    del content[1]["ranks"][0]["graph_deterministic"]
    with pytest.raises(DataError, match=r"entry 2 \(n4k\): ranks.0.graph_deterministic is missing.*another version"):
        forward_results.read(written(content), CASES, 2)


def test_ranks_that_are_missing_are_noticed(written):
    with pytest.raises(DataError, match="case c64k: got 2 ranks, 32 were started"):
        forward_results.read(written(forward_output.result(CASES, 2)), CASES, 32)


def test_no_file_says_when_it_would_be_there(tmp_path):
    with pytest.raises(DataError, match="no such file; vllm bench forward writes it at its very end"):
        forward_results.read(tmp_path / "none.json", CASES, 2)
