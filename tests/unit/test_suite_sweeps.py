"""What a SUITE.toml and a command line ask for: values, combinations, repeats, and the words for what is wrong."""

from __future__ import annotations

import pytest
from small_notebooks import notebook, register_experiment

from rackbook.errors import DataError, ParameterError
from rackbook.suite import parameters, sweeps
from rackbook.suite.executions import Execution, Limits
from rackbook.suite.notebooks import discover

NO_SEED = 'rate: float = 0.5  # [req/s] arrival rate\nlabel: str = "a"  # [-] a text\n'


@pytest.fixture
def read(tmp_path, monkeypatch):
    for topic in ("one", "two", "bare"):
        register_experiment(monkeypatch, topic)
    notebook(tmp_path / "nb", "01_one")
    notebook(tmp_path / "nb", "02_two")
    notebook(tmp_path / "nb", "03_bare", parameters=NO_SEED)
    notebooks = discover(tmp_path / "nb")

    def reader(text: str) -> sweeps.Sweep:
        (tmp_path / "suite.toml").write_text(text)
        return sweeps.read(tmp_path / "suite.toml", notebooks)

    reader.notebooks = notebooks
    return reader


def block(text: str, notebooks: str = "['01']") -> str:
    return f"[[sweep]]\nnotebooks = {notebooks}\n{text}\n"


def values(sweep: sweeps.Sweep) -> list[dict]:
    return [execution.values for execution in sweep.executions]


def test_a_grid_is_every_combination_and_pairs_go_together(read):
    found = read(block("grid = { rate = [0.25, 0.5] }\nzip = { seed = [1, 2], label = ['x', 'y'] }"))
    assert values(found) == [
        {"rate": 0.25, "seed": 1, "label": "x"},
        {"rate": 0.25, "seed": 2, "label": "y"},
        {"rate": 0.5, "seed": 1, "label": "x"},
        {"rate": 0.5, "seed": 2, "label": "y"},
    ]


def test_a_list_gives_single_points_which_may_set_different_parameters(read):
    found = read(block("list = [ { rate = 0.25 }, { label = 'x', fast = true } ]\nset = { sizes = [7] }"))
    assert values(found) == [{"sizes": [7], "rate": 0.25}, {"sizes": [7], "label": "x", "fast": True}]


def test_several_notebooks_each_run_every_point(read):
    found = read(block("grid = { rate = [0.25, 1] }", "['01', 'two']"))
    assert [(e.notebook.name, e.values["rate"]) for e in found.executions] == [
        ("01_one", 0.25), ("01_one", 1.0), ("02_two", 0.25), ("02_two", 1.0),
    ]  # fmt: skip
    assert isinstance(found.executions[1].values["rate"], float)


def test_repeats_count_the_seed_up_and_seeds_name_it(read):
    assert [e.values["seed"] for e in read(block("repeats = 3")).executions] == [1, 2, 3]
    assert [e.values["seed"] for e in read(block("seeds = [7, 11]")).executions] == [7, 11]
    assert [e.label for e in read(block("seeds = [7, 11]")).executions] == ["01_one seed=7", "01_one seed=11"]


def test_without_a_seed_parameter_repeats_are_told_apart_by_their_number(read):
    found = read(block("repeats = 2", "['03']"))
    assert values(found) == [{}, {}]
    assert len({e.request for e in found.executions}) == 2
    assert [e.label for e in found.executions] == ["03_bare", "03_bare repeat 2"]


def test_the_same_execution_asked_for_twice_runs_once_and_the_user_is_told(read):
    found = read(block("grid = { rate = [0.25] }") + block("list = [ { rate = 0.25 }, { rate = 0.5 } ]"))
    assert values(found) == [{"rate": 0.25}, {"rate": 0.5}]
    assert found.notices == ("1 of 3 executions are asked for twice; each runs once",)


def test_a_request_depends_on_values_alone_whether_given_or_default(read):
    one, _, _ = read.notebooks
    limits = Limits()
    base = Execution(one, {}, {}, 1, limits)
    assert Execution(one, {"rate": 0.5}, {"rate": 0.5}, 1, Limits(timeout_s=1)).request == base.request
    assert Execution(one, {"rate": 0.25}, {}, 1, limits).request != base.request
    assert Execution(one, {}, {}, 2, limits).request == base.request  # its seed would tell repeats apart


def test_limits_of_the_file_hold_for_blocks_without_their_own(read):
    found = read("timeout_s = 60\nmemory_gib = 2\n" + block("timeout_s = 5\ngpus = 1") + block("", "['02']"))
    assert [e.limits for e in found.executions] == [
        Limits(timeout_s=5.0, memory_gib=2.0, gpus=1), Limits(timeout_s=60.0, memory_gib=2.0)
    ]  # fmt: skip


def test_a_path_is_relative_to_the_file_and_none_is_a_word(read, tmp_path):
    found = read(block("list = [ { points_path = 'data.csv', limit = 'none' } ]"))
    assert values(found) == [{"points_path": str(tmp_path / "data.csv"), "limit": None}]


def test_texts_with_quotes_and_line_breaks_stay_data(read):
    text = "it's \\\"x\\\"\\n__import__('os')"
    found = read(block(f'set = {{ label = "{text}" }}'))
    assert values(found) == [{"label": "it's \"x\"\n__import__('os')"}]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", DataError, r"got no \[\[sweep\]\], expected at least one"),
        ("[[sweep]", DataError, "not a TOML file"),
        (block("gird = {}"), DataError, "sweep 1: unknown entry: got 'gird'.*Did you mean 'grid'"),
        ("nmae = 'x'\n" + block(""), DataError, "entry: got 'nmae'.*Did you mean 'name'"),
        ("name = '../x'\n" + block(""), DataError, "name: got '../x', allowed: letters"),
        (block("grid = { ranks = [1] }"), ParameterError, "01_one: unknown parameter: got 'ranks'"),
        (block("grid = { rate = 0.5 }"), DataError, r"grid.rate: got 0.5, allowed: a list of values"),
        (block("grid = { rate = ['x'] }"), ParameterError, r"rate \[req/s\]: got 'x', allowed: float"),
        (block("grid = { rate = [true] }"), ParameterError, r"rate \[req/s\]: got True, allowed: float"),
        (
            block("grid = { rate = [2.0] }"),
            ParameterError,
            "parameter rate .*got 2.0, allowed: less than or equal to 1",
        ),
        (block("grid = { rate = [nan] }"), ParameterError, r"rate \[req/s\]: got nan, allowed: float"),
        (
            block("grid = { sizes = [32, 64] }"),
            ParameterError,
            r"got 32, allowed: list\[int\]; in grid .* like \[\[32\]\]",
        ),
        (block("zip = { rate = [0.5], seed = [1, 2] }"), DataError, r"different lengths \{'rate': 1, 'seed': 2\}"),
        (block("set = { rate = 0.5 }\ngrid = { rate = [0.5] }"), DataError, "rate stands in set and in grid"),
        (block("repeats = 0"), DataError, "repeats: got 0, allowed: a whole number from 1"),
        (block("seeds = [1, 1]"), DataError, "in which one stands twice"),
        (block("seeds = [1]\nrepeats = 2"), DataError, "got both repeats and seeds"),
        (block("repeats = 2\nset = { seed = 1 }"), DataError, "seed is set, and repeats or seeds would set it too"),
        (block("seeds = [1]", "['03']"), ParameterError, "got seeds, but the notebook has no parameter seed"),
        (block("gpus = -1"), DataError, "gpus: got -1, allowed: a whole number from 0"),
        (block("timeout_s = 0"), DataError, "timeout_s: got 0, allowed: a number above 0"),
        (block("", "['99']"), DataError, "unknown notebook: got '99'"),
        ("[slurm]\npartitoin = 'x'\n" + block(""), DataError, "Did you mean 'partition'"),
        ("[slurm]\nnodes = 0\n" + block(""), DataError, "slurm.nodes: got 0, allowed: a number above 0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(read, text, kind, message):
    with pytest.raises(kind, match=message):
        read(text)


def test_on_the_command_line_numbers_with_commas_are_swept_and_lists_and_texts_are_not(read):
    notebooks = read.notebooks[:1]
    pairs = [("seed", "1, 2,3"), ("fast", "true,false"), ("sizes", "4,5"), ("label", "a,b"), ("limit", "none,2.5")]
    found, _ = parameters.assign_several(pairs, notebooks)
    assert found["01_one"] == {
        "seed": [1, 2, 3], "fast": [True, False], "sizes": [[4, 5]], "label": ["a,b"], "limit": [None, 2.5]
    }  # fmt: skip
    swept = sweeps.of_values("run", found, notebooks, Limits())
    assert len(swept.executions) == 12
    assert swept.executions[0].swept == {"seed": 1, "fast": True, "limit": None}
    assert swept.executions[0].values["sizes"] == [4, 5]


@pytest.mark.parametrize("text", ["1,x", "1,,2", "1,"])
def test_one_wrong_value_of_several_stops_all(read, text):
    with pytest.raises(ParameterError, match=r"01_one, parameter seed \[-\]: got '.*', allowed: a whole number"):
        parameters.assign_several([("seed", text)], read.notebooks[:1])


def test_a_value_out_of_range_on_the_command_line_stops_all(read):
    found, _ = parameters.assign_several([("rate", "0.5,2")], read.notebooks[:1])
    with pytest.raises(ParameterError, match="rate .*got 2.0, allowed: less than or equal to 1"):
        sweeps.of_values("run", found, read.notebooks[:1], Limits())
