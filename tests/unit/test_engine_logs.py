"""vLLM's log lines: real ones of users, and lines in the forms of vLLM's own format strings."""

import pytest

from rackbook.engine import logs
from rackbook.errors import DataError

PREFIX = "(APIServer pid=41) INFO 11-29 19:31:05 [loggers.py:199] Engine 001: "
ITERATION = (
    PREFIX + "Iteration(17): 1 context requests, 512 context tokens, 3 generation requests, 9 generation tokens, "
    "iteration elapsed time: 12.34 ms, CPU KV cache usage: 1.2%\n"
)
DUMMY = (
    PREFIX + "Iteration(18): 0 context requests, 0 context tokens, 0 generation requests, 0 generation tokens, "
    "iteration elapsed time: 2.00 ms (dummy), CPU KV cache usage: 0.0%\n"
)


def test_an_iteration_line():
    frame = logs.iterations("noise\n" + ITERATION + DUMMY)
    assert frame.row(0, named=True) == {
        "locator": "line 2",
        "logged_at": "11-29 19:31:05",
        "rank": 1,
        "iteration": 17,
        "num_prefill_requests": 1,
        "num_prefill_tokens": 512,
        "num_decode_requests": 3,
        "num_decode_tokens": 9,
        "step_ms": 12.34,
        "dummy_step": False,
        "kv_use_percent": 1.2,
    }
    assert frame["dummy_step"].to_list() == [False, True]


def test_an_iteration_line_of_the_engine_itself_takes_its_rank_from_the_process():
    line = ITERATION.replace(PREFIX, "(EngineCore_DP3 pid=9) INFO 11-29 19:31:05 [core.py:610] ")
    assert logs.iterations(line)["rank"].to_list() == [3]
    assert logs.iterations(line.replace("EngineCore_DP3", "EngineCore"))["rank"].to_list() == [None]


def test_colour_codes_are_no_part_of_a_line():
    assert logs.iterations("\x1b[0;36m(APIServer pid=41)\x1b[0;0m " + ITERATION).height == 1


def test_a_line_that_is_still_being_written_waits_for_its_end():
    whole, half = ITERATION, ITERATION[:150]
    assert logs.iterations(whole + half).height == 1
    assert logs.iterations(whole + ITERATION.rstrip("\n")).height == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (ITERATION.replace("context tokens, ", ""), "line 1: a line about iteration of an unknown form"),
        (ITERATION.replace("12.34", "nan"), "iteration elapsed time: got nan"),
        (ITERATION.replace("12.34", "-1.00"), "iteration elapsed time: got -1.00, allowed: a number ≥ 0"),
    ],
)
def test_a_line_of_another_form_is_an_error_and_not_skipped(line, words):
    with pytest.raises(DataError, match=f"server.log, line 1: .*{words.removeprefix('line 1: ')}"):
        logs.iterations(line, "server.log")


def test_real_throughput_lines(realdata):
    text = (realdata / "inferencex/agentx_kimik2.7_tp4_conc1/server.log").read_text("utf-8")
    frame = logs.throughputs(text)
    assert frame.height == text.count("Avg prompt throughput:") == 365
    first = frame.row(0, named=True)
    assert (first["rank"], first["prompt_tok_per_s"], first["output_tok_per_s"]) == (0, 19242.3, 0.1)
    assert (frame["prefix_hit_percent"][-1], frame["kv_use_percent"][3], frame["num_queued"][3]) == (91.6, 10.7, 3)


def test_throughput_of_all_engines_and_with_further_parts():
    line = (
        "INFO 11-29 19:31:05 [loggers.py:273] 2 Engines Aggregated: Avg prompt throughput: 10.0 tokens/s, "
        "Avg generation throughput: 5.5 tokens/s, Running: 2 reqs, Waiting: 1 reqs, Deferred: 1 reqs, Preemptions: 4, "
        "CPU KV cache usage: 50.0%, External prefix cache hit rate: 3.0%\n"
    )
    row = logs.throughputs(line).row(0, named=True)
    assert (row["rank"], row["num_queued"], row["kv_use_percent"], row["prefix_hit_percent"]) == (None, 1, 50.0, None)


EPLB = (
    "INFO 11-29 19:31:05 [eplb_state.py:634] EPLB step: 760 for model deepseek-ai/DeepSeek-V4.1-Flash: "
    "avg_tokens=102.50, max_tokens=205, balancedness=0.5000, steps until the next rearrangement: 240\n"
)


def test_eplb_line():
    row = logs.eplb_steps(EPLB).row(0, named=True)
    assert (row["eplb_step"], row["model"]) == (760, "deepseek-ai/DeepSeek-V4.1-Flash")
    assert (row["mean_rank_tokens"], row["max_rank_tokens"], row["balancedness_of_sums"]) == (102.5, 205, 0.5)
    assert row["steps_to_rearrangement"] == 240


def test_eplb_step_without_tokens_has_no_balancedness():
    line = EPLB.replace("=102.50", "=0.00").replace("=205", "=0").replace("=0.5000", "=0.0000").replace("240", "-1")
    row = logs.eplb_steps(line).row(0, named=True)
    assert (row["balancedness_of_sums"], row["steps_to_rearrangement"]) == (None, -1)


def test_speculation_line_gives_a_row_per_position():
    line = (
        "INFO 11-29 19:31:05 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.46, "
        "Accepted throughput: 10.00 tokens/s, Drafted throughput: 13.70 tokens/s, Accepted: 100 tokens, "
        "Drafted: 137 tokens, Per-position acceptance rate: 0.809, 0.650, Avg Draft acceptance rate: 73.0%\n"
    )
    frame = logs.speculation(line)
    assert frame["draft_position"].to_list() == [1, 2]
    assert frame["position_accepted_percent"].to_list() == pytest.approx([80.9, 65.0])
    assert frame["acceptance_length"].to_list() == [2.46, 2.46]
    assert frame["num_accepted_tokens"].to_list() == [100, 100]


def test_a_log_without_such_lines_gives_an_empty_frame_with_all_columns():
    for read, name in (
        (logs.iterations, "step_ms"),
        (logs.throughputs, "num_running"),
        (logs.eplb_steps, "eplb_step"),
        (logs.speculation, "draft_position"),
    ):
        frame = read("INFO ready\n")
        assert frame.is_empty()
        assert name in frame.columns


def test_a_step_that_nobody_had_to_wait_for_is_none_of_an_unknown_form():
    line = (
        "(APIServer pid=9) INFO 11-29 19:31:05 [loggers.py:199] Engine 003: Iteration(7): 0 context requests, "
        "0 context tokens, 64 generation requests, 384 generation tokens, iteration elapsed time: 0.00 ms, "
        "GPU KV cache usage: 1.0%\n"
    )
    assert logs.iterations(line).select("rank", "step_ms").rows() == [(3, 0.0)]
