"""Finding notebooks and reading what they declare."""

import json

import pytest
from small_notebooks import notebook

from rackbook.errors import DataError, ParameterError
from rackbook.suite.notebooks import Kind, discover, load_json, read, read_parameters, select


def names(found):
    return [n.name for n in found]


@pytest.fixture
def folder(tmp_path):
    for name in ("10_decode_parity", "02_step_breakdown", "06_expert_balance"):
        notebook(tmp_path, name)
    (tmp_path / "scratch.ipynb").write_text("{}")
    return tmp_path


def test_notebooks_are_found_by_number_and_others_are_left_alone(folder):
    assert names(discover(folder)) == ["02_step_breakdown", "06_expert_balance", "10_decode_parity"]


def test_a_notebook_knows_its_title_its_question_and_its_parameters(folder):
    found = read(folder / "06_expert_balance.ipynb")
    assert (found.topic, found.title) == ("expert_balance", "Expert balance")
    assert found.question == "does expert_balance hold?"
    rate = found.parameter("rate")
    assert (rate.default, rate.unit, rate.meaning, str(rate.kind)) == (0.5, "req/s", "arrival rate", "float")
    assert [str(p.kind) for p in found.parameters] == [
        "int", "float", "str", "bool", "list[int]", "str", "float | None",
    ]  # fmt: skip


def test_an_unknown_parameter_names_the_closest_and_the_notebook(folder):
    with pytest.raises(ParameterError, match=r"parameter of 06_expert_balance: got 'sed'.*Did you mean 'seed'"):
        read(folder / "06_expert_balance.ipynb").parameter("sed")


@pytest.mark.parametrize(
    "given", [["06"], ["6"], ["expert_balance"], ["06_expert_balance"], ["some/where/06_expert_balance.ipynb"]]
)
def test_short_names_mean_the_same_notebook(folder, given):
    assert names(select(given, discover(folder))) == ["06_expert_balance"]


def test_a_selection_keeps_the_suites_order_and_counts_each_once(folder):
    assert names(select(["10", "02", "decode_parity"], discover(folder))) == ["02_step_breakdown", "10_decode_parity"]
    assert len(select([], discover(folder))) == 3


@pytest.mark.parametrize(("given", "close"), [("06_expert_balanse", "06_expert_balance"), ("parity", "decode_parity")])
def test_an_unknown_notebook_names_the_closest(folder, given, close):
    with pytest.raises(DataError, match=rf"unknown notebook: got '{given}', allowed: 02_.*Did you mean '{close}'"):
        select([given], discover(folder))


def test_an_empty_folder_and_a_topic_that_stands_twice_are_errors(tmp_path):
    with pytest.raises(DataError, match="no notebook here"):
        discover(tmp_path)
    notebook(tmp_path, "01_same")
    notebook(tmp_path, "02_same")
    with pytest.raises(DataError, match="01_same and 02_same have the same topic"):
        discover(tmp_path)


def test_units_and_defaults_come_from_the_code_not_from_its_looks():
    code = 'a: str = "0012 # [no] no"  # [B/token] what = it is\nb: list[str] = ["x"]  # [-] words'
    found = read_parameters(code, "n")
    assert (found[0].default, found[0].unit, found[0].meaning) == ("0012 # [no] no", "B/token", "what = it is")
    assert found[1].default == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a = 1  # [-] x", "got 'a = 1', allowed: name: type = literal"),
        ("a: int  # [-] x", "got 'a: int', allowed"),
        ("a: int = 2 * 3  # [-] x", r"got the default '2 \* 3', allowed: a literal"),
        ("a: int = 1.5  # [-] x", "got the default 1.5, declared: int"),
        ("a: int = True  # [-] x", "got the default True, declared: int"),
        ("a: float = None  # [-] x", "got the default None, declared: float"),
        ("a: dict = {}  # [-] x", "got the type 'dict', allowed: int, float"),
        ("a: int = 1", r"must end with '# \[unit\] meaning'"),
        ("a: int = 1  # seconds", r"must end with '# \[unit\] meaning'"),
        ("a: int = 1  # [-] x\na: int = 2  # [-] x", "a stands twice"),
        ("a: int = (", "was never closed"),
    ],
)
def test_a_line_of_another_form_says_where_and_what_is_allowed(line, message):
    with pytest.raises(DataError, match=rf"^here, parameters cell, line \d.*{message}"):
        read_parameters(line, "here")


def test_a_float_parameter_may_have_a_whole_default():
    assert read_parameters("a: float = 2  # [ms] x", "n")[0].kind == Kind("float")


@pytest.mark.parametrize("content", ['{"cells": [', "[]", '{"nbformat": 3, "cells": []}'])
def test_what_is_no_notebook_is_refused(tmp_path, content):
    path = tmp_path / "01_x.ipynb"
    path.write_text(content)
    with pytest.raises(DataError, match=r"01_x.ipynb: not a notebook"):
        load_json(path)


def test_exactly_one_cell_is_tagged_parameters(tmp_path):
    path = notebook(tmp_path, "01_x")
    content = json.loads(path.read_text())
    for cell in content["cells"]:
        cell["metadata"] = {"tags": ["parameters"]}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="got 3 cells tagged 'parameters', expected 1"):
        read(path)
