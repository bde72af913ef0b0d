"""Loads of experts from files, answers and records: what is refused, and that nothing is lost on the way."""

import base64
import io
import json
import struct

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackbook.errors import DataError, ParameterError
from rackbook.experts.loads import checked, from_frame
from rackbook.importers import load_matrices, routed_experts
from rackbook.tables import column

GOOD = np.array([[[4, 2, 3, 3], [3, 3, 3, 3]], [[2, 2, 0, 0], [1, 1, 2, 0]]])
"""Two steps of six and two tokens, two layers, top-2 of four experts."""


def test_tokens_of_each_step():
    loads = checked(GOOD, top_k=2, where="here")
    assert loads.num_tokens.tolist() == [6, 2]
    assert (loads.layers, loads.num_experts) == ((0, 1), 4)
    assert checked(GOOD[0], top_k=2, where="here").tokens.shape == (1, 2, 4)


def test_a_frame_and_back():
    loads = checked(GOOD, top_k=2, where="here", layers=[3, 7])
    frame = loads.frame()
    assert frame.height == 16
    assert frame.row(6, named=True) == {
        "step": 1,
        "layer": 7,
        "expert": 2,
        "expert_tokens": 3,
        "origin": "measured",
        "source": "here",
    }
    for name in frame.columns:
        column(name)
    again = from_frame(frame.sample(fraction=1, shuffle=True, seed=1), top_k=2, where="here")
    assert (again.tokens == GOOD).all()
    assert again.layers == (3, 7)


def test_steps_without_a_token_have_no_balancedness():
    idle = np.concatenate([GOOD, np.zeros((1, 2, 4), int)])
    loads = checked(idle, top_k=2, where="here")
    assert loads.with_tokens().tokens.shape == (2, 2, 4)
    with pytest.raises(DataError, match="here: no step routes a token"):
        checked(np.zeros((1, 2, 4), int), top_k=2, where="here").with_tokens()


def changed(*at, to):
    table = GOOD.astype(float)
    table[at] = to
    return table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(1, 0, 2, to=-1), "step 2, layer 0, expert 2 is negative: got -1"),
        (changed(0, 1, 3, to=np.nan), "step 1, layer 1, expert 3 is missing"),
        (changed(0, 1, 3, to=2.5), "step 1, layer 1, expert 3 is not a whole number of tokens: got 2.5"),
        (changed(0, 1, 3, to=1), r"step 1 does not conserve its tokens: layer 1 has 10 .* other layers 12"),
        (GOOD[:, :, :3], r"step 1 does not conserve|no multiple of top_k 2"),
        ([[3, 2, 0, 0], [2, 1, 1, 1]], "5 .token, expert. pairs in a layer, no multiple of top_k 2"),
        ([[5, 1, 0, 0], [2, 2, 1, 1]], "expert 0 has 5 tokens of 3: a token cannot go to one expert twice"),
        (GOOD[0].T, r"looks transposed, experts × layers \(each of its columns has the same sum"),
        (np.zeros((2, 2, 2, 2)), r"got \(2, 2, 2, 2\)"),
        ([], r"got \(0,\)|\(0,\)"),
        ([["a", "b"]], "got <U1, allowed: whole numbers"),
    ],
)
def test_loads_that_cannot_be_are_refused(table, message):
    with pytest.raises(DataError, match=f"dump.csv: .*({message})"):
        checked(np.asarray(table), top_k=2, where="dump.csv")


def test_a_layer_that_lost_tokens_is_named():
    table = np.tile([3, 3, 2, 4], (5, 1))
    table[3, 1] = 1
    with pytest.raises(DataError, match=r"layer 3 has 10 \(token, expert\) pairs, other layers 12"):
        checked(table, top_k=2, where="here")


def test_the_models_sizes_are_held_against_the_table():
    square = np.array([[2, 2, 1, 1], [1, 1, 2, 2], [2, 1, 2, 1]])
    with pytest.raises(
        DataError, match="looks transposed, experts × layers .it has 3 rows.; expected layers × experts"
    ):
        checked(square, top_k=2, where="here", num_experts=3)
    with pytest.raises(DataError, match="got 4 experts in a layer, expected the 384 of the model"):
        checked(square, top_k=2, where="here", num_experts=384)
    with pytest.raises(DataError, match="top_k is 5, but a layer has 4 experts"):
        checked(square, top_k=5, where="here")
    with pytest.raises(ParameterError, match="top_k: got 0"):
        checked(square, top_k=0, where="here")
    with pytest.raises(DataError, match="2 layer numbers for 3 layers"):
        checked(square, top_k=2, where="here", layers=[1, 2])


FRAME = checked(GOOD, top_k=2, where="here").frame().drop("origin", "source")


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (FRAME.filter(~pl.col("expert").is_in([1, 3])), "step 1, layer 0 lacks 2 of 4 experts: 1, 3; write 0"),
        (FRAME.head(15), "step 2, layer 1 lacks 1 of 4 experts: 3"),
        (pl.concat([FRAME, FRAME.head(2)]), "step 1, layer 0, expert 0 is there 2 times"),
        (FRAME.with_columns(expert=pl.col("expert") - 1), "got expert -1, allowed: 0 to 3"),
        (FRAME.with_columns(expert=pl.col("expert") + 1), "got expert 4, allowed: 0 to 3"),
        (FRAME.drop("layer"), "column 'layer' is missing; got step, expert, expert_tokens"),
        (FRAME.drop("expert_tokens"), "column 'expert_tokens' is missing"),
        (FRAME.with_columns(pl.col("layer").cast(pl.Float64)), "column layer: got Float64, allowed: whole numbers"),
        (FRAME.clear(), "no rows"),
    ],
)
def test_rows_that_are_missing_or_too_many_are_named(frame, message):
    with pytest.raises(DataError, match=message):
        from_frame(frame, top_k=2, where="here", num_experts=4)


# files


def write(folder, kind, table=GOOD[0], names=None):
    path = folder / f"loads{kind}"
    if kind == ".npy":
        np.save(path, table)
    elif kind == ".parquet":
        pl.DataFrame(table, schema=[f"e{n}" for n in range(table.shape[1])]).write_parquet(path)
    else:
        lines = [",".join(map(str, row)) for row in ([names] if names else []) + table.tolist()]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("kind", load_matrices.KINDS)
def test_a_matrix_in_every_kind_of_file(tmp_path, kind):
    loads = load_matrices.read(write(tmp_path, kind), top_k=2, num_experts=4)
    assert (loads.tokens == GOOD[:1]).all()
    assert loads.source.endswith(f"loads{kind}")
    with pytest.raises(DataError, match="transposed"):
        load_matrices.read(write(tmp_path, kind, GOOD[0].T), top_k=2, num_experts=4)
    with pytest.raises(DataError, match="does not conserve"):
        load_matrices.read(write(tmp_path, kind, GOOD[0] + np.eye(2, 4, dtype=int)[::-1] * [1, 0, 0, 0]), top_k=2)


def test_rows_in_csv_and_parquet_and_steps_in_npy(tmp_path):
    rows = FRAME.rename({"expert_tokens": "tokens"})
    rows.write_csv(tmp_path / "rows.csv")
    rows.write_parquet(tmp_path / "rows.parquet")
    np.save(tmp_path / "steps.npy", GOOD.astype(np.int32))
    for name in ("rows.csv", "rows.parquet", "steps.npy"):
        assert (load_matrices.read(tmp_path / name, top_k=2).tokens == GOOD).all()


def test_a_line_of_names_is_no_layer(tmp_path):
    path = write(tmp_path, ".csv", names=["e0", "e1", "e2", "e3"])
    assert load_matrices.read(path, top_k=2).tokens.shape == (1, 2, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3\n4,5\n", "row 2: got 2 cells, expected 3, one per expert"),
        ("1,2,3\n4,x,6\n", "row 2, column 2: got 'x', allowed: a number"),
        ("2,2\n4,\n", "layer 1, expert 1 is missing"),
        ("a,b\n", "names but no rows"),
        ("\n", "the file is empty"),
        ("layer,expert\n0,1\n", "column 'expert_tokens' is missing"),
    ],
)
def test_csv_that_is_no_matrix(tmp_path, text, message):
    path = tmp_path / "loads.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"loads.csv.*{message}"):
        load_matrices.read(path, top_k=1)


def test_files_that_are_none(tmp_path):
    (tmp_path / "loads.npy").write_bytes(b"nothing")
    (tmp_path / "loads.parquet").write_bytes(b"nothing")
    (tmp_path / "loads.csv").write_bytes(b"\xff\xfe1")
    for kind, message in ((".npy", "no readable NPY"), (".parquet", "no readable Parquet"), (".csv", "not UTF-8")):
        with pytest.raises(DataError, match=message):
            load_matrices.read(tmp_path / f"loads{kind}", top_k=1)
    with pytest.raises(DataError, match="no such file"):
        load_matrices.read(tmp_path / "absent.csv", top_k=1)
    (tmp_path / "loads.pt").touch()
    with pytest.raises(DataError, match=r"got '.pt', allowed: .csv, .npy, .parquet"):
        load_matrices.read(tmp_path / "loads.pt", top_k=1)


def test_pickles_are_not_opened(tmp_path):
    np.save(tmp_path / "loads.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="no readable NPY array"):
        load_matrices.read(tmp_path / "loads.npy", top_k=1)


# the lab's record


HEADER = {"num_layers": 2, "top_k": 2, "num_experts": 4, "dtype": "int16"}
STEPS = [
    [[[0, 1], [0, 2]], [[3, 2], [3, 1]]],
    [[[2, 1]], [[0, 3]]],
]


def recorded(folder, name="0.17.routed", header=HEADER, steps=STEPS, tail=b""):
    body = b""
    for step in steps:
        for layer, ids in enumerate(step):
            body += struct.pack("<ii", layer, len(ids)) + np.array(ids, "<i2").tobytes()
    path = folder / name
    path.write_bytes(json.dumps(header).encode() + b"\n" + body + tail)
    return path


def test_a_record_becomes_loads(tmp_path):
    found = routed_experts.read_file(recorded(tmp_path))
    assert (found.rank, found.unfinished, len(found.steps)) == (0, False, 2)
    loads = routed_experts.read_folder(tmp_path)
    assert loads.tokens.tolist() == [[[2, 1, 1, 0], [0, 1, 1, 2]], [[0, 1, 1, 0], [1, 0, 0, 1]]]
    assert loads.num_tokens.tolist() == [2, 1]


def test_engines_are_summed_where_their_steps_match(tmp_path):
    recorded(tmp_path)
    recorded(tmp_path, "1.18.routed", steps=STEPS[::-1])
    loads = routed_experts.read_folder(tmp_path)
    assert loads.num_tokens.tolist() == [3, 3]
    recorded(tmp_path, "2.19.routed", steps=STEPS[:1])
    with pytest.raises(DataError, match=r"recorded 2 .rank 0., 2 .rank 1., 1 .rank 2. steps, which cannot be matched"):
        routed_experts.read_folder(tmp_path)


def test_a_record_that_is_still_written_loses_its_last_step(tmp_path):
    whole = recorded(tmp_path).read_bytes()
    for length in range(len(whole) - 1, len(whole) - 20, -1):
        (tmp_path / "0.17.routed").write_bytes(whole[:length])
        found = routed_experts.read_file(tmp_path / "0.17.routed")
        assert (len(found.steps), found.unfinished) == (1, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": HEADER | {"dtype": "int32"}}, "got ids of 'int32', expected 'int16'"),
        ({"header": {"top_k": 2}}, "the first line is no header"),
        ({"header": HEADER | {"top_k": 5}}, "a header of no model"),
        ({"steps": [STEPS[0][:1], STEPS[0]]}, "got layer 0, expected layer 1"),
        ({"steps": [[STEPS[0][0], STEPS[1][1]]]}, "step 1, layer 1: got 1 tokens, expected the 2 of layer 0"),
        ({"steps": []}, "no step is complete"),
        ({"name": "x.17.routed"}, "the name does not begin with the rank"),
        ({"steps": [[[[0, 4]], [[0, 1]]]]}, "step 1: got expert 4, allowed: 0 to 3"),
        ({"steps": [[[[0, 1]], [[2, 2]]]]}, "layer 1 sends token 0 to one expert twice"),
    ],
)
def test_records_of_another_form(tmp_path, change, message):
    recorded(tmp_path, **change)
    with pytest.raises(DataError, match=message):
        routed_experts.read_folder(tmp_path)


def test_a_folder_without_records(tmp_path):
    with pytest.raises(DataError, match="no .routed file"):
        routed_experts.read_folder(tmp_path)


# answers of the API


def encoded(ids):
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(ids))
    return base64.b64encode(buffer.getvalue()).decode()


def answer(ids, prompt=1):
    return {"usage": {"prompt_tokens": prompt}, "choices": [{"routed_experts": encoded(np.array(ids, np.uint16))}]}


ONE = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 2], [0, 1]]]
"""A token of the prompt and two generated ones, two layers, top-2."""


def test_generated_tokens_of_all_requests_make_a_step(tmp_path):
    other = [*ONE, ONE[0]]
    loads = routed_experts.read_answers([answer(ONE), answer(other, prompt=2)], num_experts=4, where="here")
    # the first has two generated tokens, the second two: 0 2 | 1 3 with 3 2 | 0 1, then 3 2 | 0 1 with 0 1 | 2 3
    assert loads.tokens.tolist() == [[[1, 0, 2, 1], [1, 2, 0, 1]], [[1, 1, 1, 1], [1, 1, 1, 1]]]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps(a) for a in (answer(ONE), answer(other, prompt=2))) + "\n\n")
    assert (routed_experts.read_answers_file(path, num_experts=4).tokens == loads.tokens).all()


def test_a_dense_layer_can_be_left_out():
    ids = [[[0, 0], [2, 3]]] * 3
    with pytest.raises(DataError, match=r"layer 0 sends token 0 to one expert twice .* a dense layer reads so"):
        routed_experts.read_answers([answer(ids)], num_experts=4, where="here")
    loads = routed_experts.read_answers([answer(ids)], num_experts=4, where="here", layers=[1])
    assert loads.layers == (1,)
    assert loads.tokens.tolist() == [[[0, 0, 1, 1]]] * 2


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([{"choices": []}], "answer 1: got no 'usage'"),
        ([answer(ONE) | {"choices": [{"routed_experts": None}]}], "no routed_experts; start the server with"),
        ([answer(ONE) | {"choices": [{"routed_experts": "%%"}]}], "no NPY array in base64"),
        ([answer(ONE) | {"choices": [{"routed_experts": encoded(np.ones((2, 2)))}]}], r"float64 of shape \(2, 2\)"),
        ([answer(ONE, prompt=3)], "no generated token with experts"),
        ([answer(ONE, prompt=4)], "has 3 tokens, the prompt alone 4"),
        ([answer(ONE), answer(np.array(ONE)[:, :1])], "expected one model's"),
        ([answer(np.array(ONE) + 1)], "step 1: got expert 4, allowed: 0 to 3"),
        ([], "expected one model's"),
    ],
)
def test_answers_that_tell_nothing(answers, message):
    with pytest.raises(DataError, match=message):
        routed_experts.read_answers(answers, num_experts=4, where="here")


@given(st.binary(max_size=80))
def test_any_text_is_an_array_or_refused(noise):
    text = base64.b64encode(noise).decode()
    with pytest.raises(DataError, match="no NPY array"):
        routed_experts.decode(text)
