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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_context_tokens,num_decode_tokens,latency_ms\n1,0,2\n", "are missing.*records context depths"),
        (HEADER + "decode,0,0,4,1000,0\n", "row 2.*latency_ms > 0"),
        (HEADER + "decode,0,0,4,1000,9\ndecode,0,0,4,abc,9\n", "row 3"),
        (HEADER + "decode,0,0,4,NaN,9\n", "row 2"),
        (HEADER, "no step with work"),
        ("", "not a readable CSV"),
    ],
)
def test_bad_files_are_refused_with_the_row(tmp_path, text, words):
    with pytest.raises(DataError, match=words):
        read(tmp_path, text)


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
