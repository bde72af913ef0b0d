"""Step records of an engine: what is read, and what is refused."""

import polars as pl
import pytest

from rackbook.errors import DataError
from rackbook.importers.engine_steps import FILE, read_engine_steps

HEADER = "phase,ctx_tokens,ctx_requests,decode_requests,decode_kv_tokens,latency_ms\n"


def read(folder, text):
    (folder / FILE).write_text(text)
    return read_engine_steps(folder, hardware="H", model="M")


def test_rows_become_measured_points(tmp_path):
    frame = read(tmp_path, HEADER + "context,128,1,0,0,50.5\ndecode,0,0,4,1000,12.0\nidle,0,0,0,0,1.0\n")
    assert frame.height == 2, "a step without work is not a point"
    first, second = frame.to_dicts()
    assert first["mean_context_tokens"] is None
    assert (first["num_prefill_tokens"], first["step_ms"], first["locator"]) == (128, 50.5, "row 2")
    assert (second["num_decode_requests"], second["mean_context_tokens"]) == (4, 250.0)
    assert second["origin"] == "measured"
    assert second["source"] == tmp_path.name


GOOD = "decode,0,0,4,1000,9\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_context_tokens,num_decode_tokens,latency_ms\n1,0,2\n", "row 1: .* are missing.*records context depths"),
        (HEADER.replace("phase", "latency_ms") + GOOD, "row 1: column 'latency_ms' stands twice"),
        (HEADER + "decode,0,0,4,1000,0\n", r"row 2, column latency_ms: got '0', allowed: a number > 0 \[ms\]"),
        (HEADER + GOOD + "decode,0,0,4,1000,abc\n", "row 3, column latency_ms: got 'abc', allowed: a number > 0"),
        (HEADER + GOOD + "decode,0,0,4,1000,inf\n", "row 3, column latency_ms: got 'inf'"),
        (HEADER + "idle,0,0,0,0,1\n\n" + GOOD + "decode,0,0,4,1000,inf\n", "row 5, column latency_ms: got 'inf'"),
        (
            HEADER + GOOD + "decode,0,0,4,abc,9\n",
            "row 3, column decode_kv_tokens: got 'abc', allowed: a whole number ≥ 0",
        ),
        (HEADER + "decode,0,0,4,NaN,9\n", "row 2, column decode_kv_tokens: got 'NaN'"),
        (HEADER + "context,inf,0,4,1000,9\n", "row 2, column ctx_tokens: got 'inf', allowed: a whole number ≥ 0"),
        (HEADER + "context,1e30,0,4,1000,9\n", "row 2, column ctx_tokens: got '1e30'"),
        (HEADER + "decode,0,0,-2,1000,9\n", "row 2, column decode_requests: got '-2', allowed: a whole number ≥ 0"),
        (HEADER + "decode,0,0,2.5,1000,9\n", "row 2, column decode_requests: got '2.5', allowed: a whole number ≥ 0"),
        (HEADER + "decode,0,0,,1000,9\n", "row 2, column decode_requests: got ''"),
        (HEADER + "decode,0,0,4,1_000,9\n", "row 2, column decode_kv_tokens: got '1_000'"),
        (HEADER + GOOD + "decode,0,0,4\n", "row 3: got 4 cells, expected 6, one per column; is the file half written"),
        (HEADER + GOOD + 'decode,0,0,4,"1000,9\n', "row 3: not a readable CSV"),
        (HEADER, "no step with work in 0 rows"),
        (HEADER + "idle,0,0,0,0,1\n", "no step with work in 1 rows"),
        ("", r"row 1: .*are missing, got \(none\)"),
    ],
)
def test_bad_files_are_refused_with_the_cell(tmp_path, text, words):
    with pytest.raises(DataError, match=f"{FILE}.*{words}"):
        read(tmp_path, text)


def test_a_byte_order_mark_blank_lines_and_spaces_mean_nothing(tmp_path):
    header = "\ufeffctx_tokens,decode_requests, decode_kv_tokens,latency_ms\n"
    frame = read(tmp_path, header + "\n0, 4,1000.0 ,9\n ,\n0,4,1000,9\n")
    assert frame.select("step", "locator", "mean_context_tokens").rows() == [(1, "row 3", 250), (2, "row 5", 250)]


def test_a_file_named_without_its_folder_has_a_source(tmp_path, monkeypatch):
    (tmp_path / FILE).write_text(HEADER + GOOD)
    monkeypatch.chdir(tmp_path)
    for path in (FILE, "."):
        assert read_engine_steps(path, hardware="H", model="M")["source"].to_list() == [tmp_path.name]


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"\x00\xff\xfe")
    with pytest.raises(DataError, match=f"{FILE}: not UTF-8 text"):
        read_engine_steps(tmp_path, hardware="H", model="M")


def test_absent_file_is_named(tmp_path):
    with pytest.raises(DataError, match=f"{FILE}: no such file"):
        read_engine_steps(tmp_path, hardware="H", model="M")


@pytest.mark.parametrize(
    "run", ["tp1_ep4_dp4_official_20260614_023637", "tp2_tp4_ep4_official_20260614_070344/tp4_ep4_past4096"]
)
def test_real_recordings_keep_every_step(realdata, run):
    file = realdata / "steptime" / run / FILE
    frame = read_engine_steps(file, hardware="not recorded", model="DeepSeek-V4-Flash")
    raw = pl.read_csv(file)
    busy = raw.filter((pl.col("ctx_tokens") > 0) | (pl.col("decode_requests") > 0))
    assert frame.height == busy.height
    assert frame["step_ms"].sum() == pytest.approx(busy["latency_ms"].sum())
    decode = busy.filter(pl.col("decode_requests") > 0)
    assert frame["mean_context_tokens"].drop_nulls().to_list() == pytest.approx(
        decode["mean_decode_kv_tokens"].to_list(), abs=1e-3
    )
