"""Every committed notebook keeps the form: an unexecuted notebook would pass nbval, a loose one would rot."""

import ast
import json
import re

import pytest

from rackbook.experiments import load
from rackbook.locations import without_folders
from rackbook.suite.artefacts import VEGALITE_MIME, charts, verdicts
from rackbook.suite.notebooks import load_json, source
from rackbook.suite.refresh import committed

CELLS, LINES_PER_CELL, LINES = 25, 15, 200
FORBIDDEN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Try)
ABSOLUTE = re.compile(
    r"(?<![\w.:/<])/(?:home|root|work|tmp|usr|opt|var|etc|mnt|Users|data|srv)/\w|\b[A-Z]:\\\\|/ipykernel_\d+", re.ASCII
)


@pytest.fixture
def content(notebook):
    return load_json(notebook.path)


@pytest.fixture
def code(content):
    return [c for c in content["cells"] if c["cell_type"] == "code"]


def test_it_is_small(notebook, code):
    sizes = [len(source(c).splitlines()) for c in code]
    assert len(code) <= CELLS
    assert max(sizes) <= LINES_PER_CELL, f"cell {sizes.index(max(sizes)) + 1}"
    assert sum(sizes) <= LINES


def test_it_is_committed_executed_in_order_and_without_errors(notebook, code):
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1)), "run `make notebooks`"
    wrong = [o for c in code for o in c["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert wrong == [], "errors or warnings in the outputs"


def test_every_cell_that_ends_in_a_value_shows_it(notebook, code):
    for number, cell in enumerate(code, start=1):
        last = (ast.parse(source(cell)).body or [ast.Pass()])[-1]
        has_value = isinstance(last, ast.Expr) and ast.unparse(last) != "charts.enable()"
        assert bool(cell["outputs"]) == has_value, f"code cell {number}"


def test_its_file_is_as_refresh_writes_it(notebook, content):
    text = notebook.path.read_text("utf-8")
    expected = json.dumps(committed(content), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert text == expected, "stray metadata or another layout: run `make notebooks`"


def test_kernel_and_cell_ids(notebook, content):
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    ids = [c["id"] for c in content["cells"]]
    assert len(ids) == len(set(ids))


def test_it_defines_nothing_and_hides_nothing(notebook, code):
    for number, cell in enumerate(code, start=1):
        text = source(cell)
        assert not re.search(r"^\s*[%!]", text, re.MULTILINE), f"code cell {number}: a magic or an installation"
        assert not text.rstrip().endswith(";"), f"code cell {number}: a trailing semicolon"
        found = [type(node).__name__ for node in ast.walk(ast.parse(text)) if isinstance(node, FORBIDDEN)]
        assert found == [], f"code cell {number}"
        assert not re.search(r"os\.chdir|filterwarnings|simplefilter|sys\.path", text), f"code cell {number}"


def test_no_absolute_path_in_source_or_output(notebook, content):
    for number, cell in enumerate(content["cells"]):
        texts = [source(cell)]
        for output in cell.get("outputs", []):
            texts += [json.dumps(v, ensure_ascii=False) for k, v in output.get("data", {}).items() if "image/" not in k]
            texts.append(str(output.get("text", "")))
        for text in texts:
            found = ABSOLUTE.search(text)
            assert found is None, f"cell {number}: …{text[max(0, found.start() - 20) : found.end() + 40]}…"
            assert without_folders(text) == text, f"cell {number} names a folder of this machine"


def test_the_order_of_its_parts(notebook, content):
    cells = content["cells"]
    assert [c["cell_type"] for c in cells[:3]] == ["markdown", "code", "code"]
    assert source(cells[0]).startswith(f"# {notebook.name[:2]} ")
    assert notebook.question.endswith("?")
    assert source(cells[1]).rstrip().endswith("charts.enable()")
    assert cells[2]["metadata"].get("tags") == ["parameters"]
    lines = [line for c in cells if c["cell_type"] == "markdown" for line in source(c).splitlines()]
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[-1] == "## Result and limits"
    assert len(set(headings)) == len(headings)


def test_parameters_agree_with_the_experiment(notebook):
    fields = load(notebook.topic).Params.model_fields
    assert [p.name for p in notebook.parameters] == list(fields)
    for parameter in notebook.parameters:
        assert parameter.default == fields[parameter.name].get_default(call_default_factory=True), parameter.name
        assert parameter.unit, parameter.name
        assert len(parameter.meaning) > 5, parameter.name


def test_the_experiment_takes_every_type_that_the_notebook_declares(notebook):
    schema = load(notebook.topic).Params.model_json_schema()["properties"]
    names = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
    for parameter in notebook.parameters:
        options = schema[parameter.name].get("anyOf", [schema[parameter.name]])
        kinds = {o.get("type", "string") for o in options}
        wanted = {"array" if parameter.kind.is_list else names[parameter.kind.scalar]}
        assert kinds == (wanted | {"null"} if parameter.kind.optional else wanted), parameter.name


def test_its_last_cell_shows_its_verdicts(notebook, content):
    found = verdicts(content)
    assert found is not None, "the last code cell must be experiment.CHECKS.judge(evidence)"
    assert found, "no claim is judged"


def test_every_chart_has_a_name_of_its_own_a_picture_and_a_reading(notebook, content):
    found = charts(content)
    assert all(chart.png for chart in found)
    for chart in found:
        after = content["cells"][chart.cell + 1 :]
        readings = (source(c).startswith("**Reading it.**") for c in after if c["cell_type"] == "markdown")
        assert next(readings, False), f"{chart.name}: the next text must start with '**Reading it.**'"


def test_outputs_have_a_picture_wherever_they_have_a_chart(notebook, code):
    for cell in code:
        for output in cell["outputs"]:
            data = output.get("data", {})
            assert (VEGALITE_MIME in data) == ("image/png" in data)
            assert not any("<script" in str(v) for k, v in data.items() if k == "text/html")
