"""Parameters from the command line: typed by their declaration, checked before anything runs."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator, model_validator
from small_notebooks import Params, notebook, register_experiment

from rackbook.errors import ParameterError, one_of
from rackbook.suite.notebooks import Kind, read
from rackbook.suite.parameters import assign, located, parse


@pytest.fixture
def one(tmp_path, monkeypatch):
    register_experiment(monkeypatch, "alpha")
    return read(notebook(tmp_path, "01_alpha"))


@pytest.fixture
def other(tmp_path, monkeypatch):
    register_experiment(monkeypatch, "beta")
    parameters = "seed: int = 1  # [-] seed\nfast: bool = True  # [-] switch\n"
    return read(notebook(tmp_path, "02_beta", parameters=parameters))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("0012", "str", "0012"),
        ("12345e7", "str", "12345e7"),
        ("false", "str", "false"),
        ("no", "str", "no"),
        ("", "str", ""),
        ("0012", "int", 12),
        ("-3", "int", -3),
        ("1_048_576", "int", 1048576),
        ("64", "float", 64.0),
        ("1e-3", "float", 0.001),
        ("false", "bool", False),
        ("true", "bool", True),
    ],
)
def test_the_declaration_decides_the_type(text, kind, value):
    parsed = parse(text, Kind(kind))
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("32,64", Kind("int", is_list=True), [32, 64]),
        ("[32, 64]", Kind("int", is_list=True), [32, 64]),
        ("", Kind("int", is_list=True), []),
        ("0012,b", Kind("str", is_list=True), ["0012", "b"]),
        ('["a,b"]', Kind("str", is_list=True), ["a,b"]),
        ("1,2.5", Kind("float", is_list=True), [1.0, 2.5]),
        ("[1, 2]", Kind("float", is_list=True), [1.0, 2.0]),
        ("none", Kind("float", optional=True), None),
        ("none", Kind("str", optional=True), None),
        ("none", Kind("str"), "none"),
        ("none", Kind("int", is_list=True, optional=True), None),
    ],
)
def test_lists_and_missing_values(text, kind, value):
    parsed = parse(text, kind)
    assert parsed == value
    if isinstance(value, list):
        assert [type(item) for item in parsed] == [type(item) for item in value]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1.0", Kind("int")), ("1e3", Kind("int")), ("", Kind("int")), ("none", Kind("int")), ("true", Kind("int")),
        ("nan", Kind("float")), ("inf", Kind("float")), ("1,5", Kind("float")),
        ("True", Kind("bool")), ("1", Kind("bool")), ("no", Kind("bool")),
        ("[1, true]", Kind("int", is_list=True)), ("[1.5]", Kind("int", is_list=True)),
        ("[1,", Kind("int", is_list=True)), ("1,,2", Kind("int", is_list=True)),
        ("[NaN]", Kind("float", is_list=True)), ('["1"]', Kind("int", is_list=True)),
    ],
)  # fmt: skip
def test_what_is_not_of_the_type_is_refused(text, kind):
    with pytest.raises(ValueError, match=r"number|true or false|JSON list"):
        parse(text, kind)


@given(st.lists(st.integers()))
def test_a_list_of_numbers_comes_back(values):
    assert parse(",".join(map(str, values)), Kind("int", is_list=True)) == values


@given(st.text())
def test_a_text_stays_the_text(text):
    assert parse(text, Kind("str")) == text


def test_values_are_plain_and_only_those_given(one):
    found = assign([("seed", "7"), ("sizes", "4,8"), ("limit", "none")], [one])
    assert found.values == {"01_alpha": {"seed": 7, "sizes": [4, 8], "limit": None}}
    assert found.notices == ()
    assert assign([], [one]).values == {"01_alpha": {}}


def test_a_path_is_taken_from_the_callers_folder(one, tmp_path):
    found = assign([("points_path", "runs/a.csv")], [one], folder=tmp_path)
    assert found.values["01_alpha"]["points_path"] == str(tmp_path / "runs" / "a.csv")
    assert assign([("points_path", "")], [one], folder=tmp_path).values["01_alpha"]["points_path"] == ""
    assert assign([("label", "runs/a.csv")], [one], folder=tmp_path).values["01_alpha"]["label"] == "runs/a.csv"


def test_a_parameter_goes_to_the_notebooks_that_have_it_and_the_others_are_named(one, other):
    found = assign([("seed", "3"), ("rate", "0.25")], [one, other])
    assert found.values == {"01_alpha": {"seed": 3, "rate": 0.25}, "02_beta": {"seed": 3}}
    assert found.notices == ("rate is no parameter of 02_beta: run without it",)


def test_a_parameter_that_no_notebook_has_is_an_error(one, other):
    with pytest.raises(ParameterError, match=r"unknown parameter of 01_alpha: got 'sizs', allowed: fast.*mean 'sizes'"):
        assign([("sizs", "1")], [one])
    with pytest.raises(ParameterError, match="unknown parameter of the 2 selected notebooks: got 'nothing'"):
        assign([("nothing", "1")], [one, other])


def test_the_same_parameter_twice_is_an_error(one):
    with pytest.raises(ParameterError, match="seed is given twice: '1' and '2'"):
        assign([("seed", "1"), ("seed", "2")], [one])


def test_a_wrong_type_names_notebook_parameter_unit_got_and_allowed(one):
    message = r"^01_alpha, parameter rate \[req/s\]: got 'often', allowed: a number like 0.95"
    with pytest.raises(ParameterError, match=message):
        assign([("rate", "often")], [one])


def test_a_value_out_of_range_is_refused_by_the_experiment(one):
    message = r"^01_alpha, parameter rate \[req/s\]: got 2.0, allowed: less than or equal to 1"
    with pytest.raises(ParameterError, match=message):
        assign([("rate", "2")], [one])


class Ruled(Params):
    """Parameters with rules of their own."""

    sizes: list[int] = Field(default=[1, 2], min_length=2)

    @field_validator("label")
    @classmethod
    def _known(cls, label: str) -> str:
        if label not in ("a", "b200"):
            raise ValueError(one_of(label, ("a", "b200"), "GPU"))
        return label

    @model_validator(mode="after")
    def _together(self) -> "Ruled":
        if self.fast and self.rate < 0.5:
            raise ValueError("rate: got less than 0.5, allowed: 0.5 or more if fast")
        return self


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("label", "b20")], r"01_alpha, parameter label \[-\]: unknown GPU: got 'b20', allowed: a, b200. .*'b200'\?"),
        ([("fast", "true"), ("rate", "0.25")], "01_alpha: rate: got less than 0.5, allowed: 0.5 or more if fast"),
        ([("sizes", "1")], r"01_alpha, parameter sizes \[tokens\]: got \[1\], list should have at least 2 items"),
    ],
)
def test_what_a_rule_of_the_experiment_says_is_told_in_its_own_words(one, monkeypatch, given, message):
    monkeypatch.setattr(sys.modules["rackbook.experiments.alpha"], "Params", Ruled)
    with pytest.raises(ParameterError, match=f"^{message}"):
        assign(given, [one])


def test_a_cluster_is_a_name_of_the_library_or_any_file_that_is_there(tmp_path):
    place = tmp_path / "nb"
    live = 'cluster: str = "b200x8"  # [-] where\nsource: str = "published"  # [-] from where\n'
    nb = read(notebook(place, "01_alpha", parameters=live))
    for name in ("mine.toml", "b200x8", "published"):
        (tmp_path / name).write_text("")

    def at(name, value):
        return located(value, nb.parameter(name), tmp_path)

    assert at("cluster", "mine.toml") == str(tmp_path / "mine.toml")
    assert at("cluster", "./mine.toml") == str(tmp_path / "mine.toml")
    assert at("cluster", "b200x8") == "b200x8"
    assert at("cluster", "nowhere.toml") == "nowhere.toml"
    assert at("source", "published") == "published"
    assert at("source", "./published") == str(tmp_path / "published")
