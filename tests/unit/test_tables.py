from datetime import date

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from rackbook.errors import DataError
from rackbook.tables import COLUMNS, SCHEMAS, Schema, column, require, schema, title

TOY = Schema(
    name="toy",
    grain="a test row",
    coordinates=("setting", "context_tokens", "stage", "approximate"),
    values=("step_ms", "merged_on", "step_share_percent"),
    optional=("stage", "approximate", "step_ms", "merged_on", "step_share_percent"),
)
HEADER = (
    "setting,context_tokens,stage,approximate,step_ms,merged_on,step_share_percent,"
    "origin,source,locator,formula,missing_reason"
)
GOOD = "a,65536,before,true,8.86,2026-10-14,62,published,S1,8.86ms,,"


def read(tmp_path, *lines):
    path = tmp_path / "toy.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return TOY.read_csv(path)


def test_a_row_is_read_with_the_types_of_the_vocabulary(tmp_path):
    assert read(tmp_path, HEADER, GOOD).row(0, named=True) == {
        "setting": "a",
        "context_tokens": 65536,
        "stage": "before",
        "approximate": True,
        "step_ms": 8.86,
        "merged_on": date(2026, 10, 14),
        "step_share_percent": 62.0,
        "origin": "published",
        "source": "S1",
        "locator": "8.86ms",
        "formula": None,
        "missing_reason": None,
    }


@pytest.mark.parametrize(
    ("cell", "bad", "column_name", "got", "allowed"),
    [
        ("65536", "64K", "context_tokens", "'64K'", "a whole number ≥ 1 [tokens]"),
        ("65536", "65_536", "context_tokens", "'65_536'", "a whole number ≥ 1 [tokens]"),
        ("65536", "0", "context_tokens", "0", "a whole number ≥ 1 [tokens]"),
        ("65536", "", "context_tokens", "nothing", "a whole number ≥ 1 [tokens]"),
        ("before", "during", "stage", "'during'", "one of before, after"),
        ("true", "yes", "approximate", "'yes'", "true or false"),
        ("8.86", "fast", "step_ms", "'fast'", "a number ≥ 0 [ms]"),
        ("8.86", "-1", "step_ms", "-1.0", "a number ≥ 0 [ms]"),
        ("8.86", "inf", "step_ms", "inf", "a number ≥ 0 [ms]"),
        ("62", "101", "step_share_percent", "101.0", "a number from 0 to 100 [%]"),
        ("2026-10-14", "14.10.2026", "merged_on", "'14.10.2026'", "a date as YYYY-MM-DD"),
        (
            "published",
            "guessed",
            "origin",
            "'guessed'",
            "one of published, derived, measured, modelled, simulated",
        ),
        ("S1", "", "source", "nothing", "a published point must have it"),
        ("8.86ms", "", "locator", "nothing", "a published point must have it"),
    ],
)
def test_a_bad_cell_is_named_with_file_row_column_got_and_allowed(tmp_path, cell, bad, column_name, got, allowed):
    broken = ",".join(bad if part == cell else part for part in GOOD.split(","))
    with pytest.raises(DataError) as caught:
        read(tmp_path, HEADER, GOOD.replace("a,", "b,", 1), broken)
    message = str(caught.value)
    assert "toy.csv, row 3, " in message
    assert f"column {column_name}: got {got}," in message
    assert allowed in message


@pytest.mark.parametrize(
    ("origin", "column_name"),
    [("derived", "formula"), ("modelled", "formula"), ("measured", "source"), ("simulated", "source")],
)
def test_each_origin_must_say_where_it_comes_from(origin, column_name):
    row = {
        "setting": "a",
        "context_tokens": 1,
        "step_ms": 1.0,
        "merged_on": date(2026, 1, 1),
        "step_share_percent": 1.0,
    }
    given_origin = {"source": "S1", "formula": "1 + 1"}
    TOY.frame([row | given_origin | {"origin": origin}])
    del given_origin[column_name]
    with pytest.raises(
        DataError, match=f"toy, row 1, column {column_name}: got nothing, a {origin} point must have it"
    ):
        TOY.frame([row | given_origin | {"origin": origin}])


def test_a_schema_can_refuse_an_origin():
    strict = Schema("strict", "a test row", ("context_tokens",), ("step_ms",), origins=("measured",))
    with pytest.raises(DataError, match="strict, row 1, column origin: got 'published', allowed: measured"):
        strict.frame(
            [
                {
                    "context_tokens": 1,
                    "step_ms": 1.0,
                    "origin": "published",
                    "source": "S1",
                    "locator": "x",
                }
            ]
        )


@pytest.mark.parametrize("missing", ["", "nan", "NaN", "  "])
def test_a_missing_value_is_null_and_must_say_why(tmp_path, missing):
    cells = GOOD.replace("8.86,", f"{missing},", 1)
    frame = read(tmp_path, HEADER, cells + "not printed")
    assert frame["step_ms"].to_list() == [None]
    with pytest.raises(
        DataError,
        match=r"toy\.csv, row 2, column missing_reason: got nothing, a missing value needs a reason",
    ):
        read(tmp_path, HEADER, cells)


def test_nan_in_a_frame_is_null_too():
    row = {
        "setting": "a",
        "context_tokens": 1,
        "origin": "measured",
        "source": "run",
        "missing_reason": "no timer",
    }
    frame = TOY.frame([row | {"step_ms": float("nan")}])
    assert frame["step_ms"].null_count() == 1
    assert frame["step_ms"].is_nan().sum() == 0


def test_the_same_point_twice_is_refused(tmp_path):
    same = GOOD.replace("8.86,", "9.99,", 1)
    with pytest.raises(
        DataError,
        match=r"toy\.csv, row 4: the same point as row 2: a, 65536, before, True, published, S1",
    ):
        read(tmp_path, HEADER, GOOD, GOOD.replace("a,", "b,", 1), same)
    assert read(tmp_path, HEADER, GOOD, same.replace("S1", "S2")).height == 2


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (HEADER.replace("step_ms", "step_s"), "missing: step_ms; unknown: step_s"),
        (HEADER.removesuffix(",missing_reason"), "missing: missing_reason"),
        (
            HEADER.replace("setting,context_tokens", "context_tokens,setting"),
            "got another order: context_tokens,setting,",
        ),
        ("", "missing: approximate, context_tokens,"),
    ],
)
def test_a_wrong_header_says_which_columns(tmp_path, header, complaint):
    with pytest.raises(DataError) as caught:
        read(tmp_path, header, GOOD)
    assert f"toy.csv, row 1: columns must be {HEADER} ({complaint}" in str(caught.value)


def test_a_file_must_be_there_be_text_and_have_whole_rows(tmp_path):
    with pytest.raises(DataError, match=r"toy\.csv: no such file, expected a CSV with columns setting, context_tokens"):
        TOY.read_csv(tmp_path / "toy.csv")
    with pytest.raises(DataError, match=r"toy\.csv: the file has a header but no rows"):
        read(tmp_path, HEADER)
    with pytest.raises(DataError, match=r"toy\.csv, row 3: got 3 cells, expected 12"):
        read(tmp_path, HEADER, GOOD, "a,1,before")
    (tmp_path / "toy.csv").write_bytes(b"")
    with pytest.raises(DataError, match=r"toy\.csv, row 1: columns must be"):
        TOY.read_csv(tmp_path / "toy.csv")
    (tmp_path / "toy.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"toy\.csv: not UTF-8 text"):
        TOY.read_csv(tmp_path / "toy.csv")


def test_a_misspelt_column_of_a_frame_lists_the_valid_ones():
    with pytest.raises(
        DataError, match=r"toy, row 1: unknown column: got 'step_mss', allowed: .*Did you mean 'step_ms'"
    ):
        TOY.frame([{"step_mss": 1.0}])


def test_numbers_of_numpy_are_taken_and_booleans_are_no_numbers():
    row = {"setting": "a", "origin": "measured", "source": "run", "missing_reason": "toy"}
    frame = TOY.frame([row | {"context_tokens": np.int64(4), "step_ms": np.float32(0.5)}])
    assert frame.row(0)[1] == 4
    assert frame["step_ms"].to_list() == [0.5]
    for name in ("context_tokens", "step_ms"):
        with pytest.raises(DataError, match=f"column {name}: got True, allowed"):
            TOY.frame([row | {"context_tokens": 4, "step_ms": 1.0} | {name: True}])


texts = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1)
rows = st.fixed_dictionaries(
    {
        "setting": texts,
        "context_tokens": st.integers(1, 2**63 - 1),
        "stage": st.sampled_from(["before", "after", None]),
        "approximate": st.none() | st.booleans(),
        "step_ms": st.none() | st.floats(0, allow_infinity=False),
        "merged_on": st.none() | st.dates(),
        "step_share_percent": st.none() | st.floats(0, 100),
        "locator": texts,
        "missing_reason": texts,
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, unique_by=lambda row: (row["setting"], row["context_tokens"])))
def test_a_frame_survives_the_way_through_a_file(tmp_path_factory, rows):
    frame = TOY.frame([row | {"origin": "published", "source": "S1"} for row in rows])
    path = tmp_path_factory.mktemp("trip") / "toy.csv"
    frame.write_csv(path)
    assert_frame_equal(TOY.read_csv(path), frame)


def test_a_title_carries_the_unit():
    assert title("step_ms") == "Decode step time (ms)"
    assert title("hardware") == "Hardware"


@pytest.mark.parametrize(
    ("lookup", "name", "message"),
    [
        (column, "step_mss", "unknown column: got 'step_mss', .*Did you mean 'step_ms'"),
        (schema, "contxt_sweep", "unknown table: got 'contxt_sweep', .*Did you mean 'context_sweep'"),
    ],
)
def test_a_misspelt_name_lists_the_valid_ones(lookup, name, message):
    with pytest.raises(DataError, match=message):
        lookup(name)


def test_require_names_what_is_missing_or_of_another_type():
    frame = pl.DataFrame({"step_ms": [1], "hardware": ["GB300"]})
    require(frame, ["step_ms", "hardware"], "a chart")
    with pytest.raises(DataError, match="a chart: column 'ep_size' is missing, got columns: step_ms, hardware"):
        require(frame, ["ep_size"], "a chart")
    with pytest.raises(DataError, match="a chart: column 'step_ms' has type String, expected Float64"):
        require(frame.with_columns(step_ms=pl.lit("fast")), ["step_ms"], "a chart")


def test_the_unit_in_a_name_is_the_unit_of_the_column():
    endings = {
        "_ms": "ms",
        "_tokens": "tokens",
        "_percent": "%",
        "_tok_per_s": "tokens/s",
        "_tok_per_s_per_gpu": "tokens/s/GPU",
        "_gib_per_gpu": "GiB",
    }
    wrong = {
        name: col.unit
        for name, col in COLUMNS.items()
        for ending, unit in endings.items()
        if name.endswith(ending) and "_per_" not in name.removesuffix(ending) and col.unit != unit
    }
    assert wrong == {}


def test_no_two_columns_have_one_title():
    titles = [col.title for col in COLUMNS.values()]
    assert sorted({t for t in titles if titles.count(t) > 1}) == []


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_schema_is_made_of_vocabulary_and_its_optional_columns_are_its_own(name):
    own = (*SCHEMAS[name].coordinates, *SCHEMAS[name].values)
    assert len(set(own)) == len(own)
    assert set(SCHEMAS[name].optional) <= set(own)
    assert set(own) <= set(COLUMNS)
