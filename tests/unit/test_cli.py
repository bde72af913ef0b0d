"""The command line as a person meets it: what it prints, how it refuses, with what status it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_notebooks import notebook, register_experiment

from rackbook import cli

COMMAND = [sys.executable, "-c", "from rackbook.cli import main; main()"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return ended.value.code


@pytest.fixture
def folder(tmp_path) -> Path:
    notebook(tmp_path, "01_alpha")
    notebook(tmp_path, "02_beta", "raise ValueError('no')", parameters="seed: int = 1  # [-] seed\n")
    return tmp_path


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["sweep", "--help"], ["run", "--jobs", "none"]])
def test_the_command_line_imports_nothing_heavy_before_it_knows_what_to_do(arguments):
    code = (
        "import contextlib, sys, rackbook.cli\n"
        "with contextlib.suppress(SystemExit):\n    rackbook.cli.main(sys.argv[1:])\n"
        "heavy = {'polars', 'pydantic', 'papermill', 'nbformat', 'altair', 'numpy', 'jinja2', 'zmq', 'asyncio'}\n"
        "print('heavy:', heavy & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "heavy: set()"


def test_list_shows_question_parameters_types_units_and_defaults(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run("list", "--notebooks", str(folder)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "01_alpha"
    assert lines[1] == "  does alpha hold?"
    assert "    rate: float = 0.5 [req/s]  arrival rate" in lines
    assert "    sizes: list[int] = 1,2 [tokens]  batch sizes" in lines
    assert '    points_path: str = "" [path]  a file of the user; empty for none' in lines
    assert "    limit: float | None = none [ms]  upper bound; none for no bound" in lines
    assert "    fast: bool = false  a switch" in lines
    assert run("list", "beta", "--notebooks", str(folder)) == 0
    assert "01_alpha" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["03_gamma"], "rackbook: unknown notebook: got '03_gamma', allowed: 01_alpha, 02_beta."),
        (["-p", "sead", "1"], "Did you mean 'seed'?"),
        (["-p", "seed", "many"], "rackbook: 01_alpha, parameter seed [-]: got 'many', allowed: a whole number"),
        (["01", "-p", "rate", "2"], "rackbook: 01_alpha, parameter rate [req/s]: got 2.0, allowed: less than"),
        (["02", "-p", "rate", "0.2"], "unknown parameter of 02_beta: got 'rate', allowed: seed."),
    ],
)
def test_bad_input_ends_with_2_before_anything_runs(folder, tmp_path, capsys, monkeypatch, arguments, message):
    register_experiment(monkeypatch, "alpha")
    register_experiment(monkeypatch, "beta")
    assert run("run", *arguments, "--notebooks", str(folder), "--out", str(tmp_path / "out")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [["run", "--jobs", "0"], ["run", "--timeout", "-1"], ["run", "-p", "x"], ["nothing"], []]
)
def test_bad_usage_ends_with_2(arguments, capsys):
    assert run(*arguments) == 2
    assert "usage: rackbook" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--partition", "batch", "--detach", "--dry-run"], "--partition belongs to --executor slurm"),
        (["--detach"], "--detach belongs to --executor slurm"),
        (["--time", "30"], "--time belongs to --executor slurm"),
        (["--executor", "slurm", "--jobs", "4"], "--jobs belongs to --executor local, on Slurm say --max-jobs"),
        (["--executor", "slurm", "--gpus", "0,1"], "--gpus belongs to --executor local"),
        (["--gpus", "0,1, 0"], "argument --gpus: got '0,1, 0', in which 0 stands twice"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path, capsys, options, message):
    assert run("sweep", str(tmp_path / "suite.toml"), *options) == 2
    assert message in capsys.readouterr().err


def test_a_run_with_a_failure_ends_with_1_and_says_what_and_where(folder, tmp_path):
    out = tmp_path / "out"
    command = [*COMMAND, "run", "--notebooks", str(folder), "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "1 of 2 notebooks done, 1 failed" in done.stdout
    assert "02_beta (code cell 2): ValueError: no" in done.stdout
    for place in ("out/report/index.html", "out/notebooks/", "out/charts/"):
        assert place in done.stdout
    page = (out / "report" / "index.html").read_text()
    assert "ValueError: no" in page
    assert "One is one." in page
    again = subprocess.run([*COMMAND, "report", "--out", str(out)], capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert again.stdout.strip() == str(out / "report" / "index.html")
    assert (out / "report" / "index.html").read_text() == page


def test_a_report_of_nothing_is_an_error(tmp_path, capsys):
    assert run("report", "--out", str(tmp_path)) == 2
    assert "no executed notebook; run `rackbook run` first" in capsys.readouterr().err


@pytest.fixture
def judged(monkeypatch):
    from rackbook import claims
    from rackbook.suite import board

    register = {c.id: c for c in claims.register().claims if c.topic == "context_sweep"}
    numbers = [c for c in register.values() if not isinstance(c.value, bool) and c.value][:3]
    findings = [
        claims.Finding(numbers[0].value, "derived"),
        claims.Finding(numbers[1].value * 2, "derived", "twice"),
        claims.OPEN,
    ]
    verdicts = claims.Verdicts(claims.Verdict(c, f) for c, f in zip(numbers, findings, strict=True))
    monkeypatch.setattr(board, "board", lambda: verdicts)
    return numbers


def test_claims_as_json_are_objects_with_the_promised_fields(judged, capsys):
    assert run("claims", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [f["id"] for f in found] == [c.id for c in judged]
    promised = {"id", "statement", "value", "unit", "found", "tolerance", "verdict", "source", "notebook"}
    assert all(promised <= f.keys() for f in found)
    assert [f["verdict"] for f in found] == ["consistent", "inconsistent", "open"]
    assert {f["notebook"] for f in found} == {"01_context_sweep"}
    assert found[2]["found"] is None


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_board_fits_the_terminal_and_shows_contradictions_first(judged, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert run("claims") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= max(width, 72)
    firsts = [line.split()[0] for line in out.splitlines() if line and not line[0].isspace()]
    assert firsts == ["verdict", "inconsistent", "open", "consistent", "3"]
    assert "3 claims: 0 refuted, 1 inconsistent, 1 open, 0 reproduced, 1 consistent" in out
    words = " ".join(out.split())
    assert all(claim.statement[:20] in words for claim in judged)


def test_lab_starts_jupyterlab_on_the_notebooks_with_this_python_on_loopback_only(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    run("lab", "--", "--no-browser")
    (program, command, environment) = started[0]
    assert program == sys.executable
    assert command[1:3] == ["-m", "jupyterlab"]
    assert "--ip=127.0.0.1" in command
    assert "--no-browser" in command
    assert ("--allow-root" in command) == (os.geteuid() == 0)
    from rackbook.locations import NOTEBOOKS

    assert f"--notebook-dir={NOTEBOOKS}" in command
    assert environment["JUPYTER_PATH"].startswith(str(Path(sys.prefix) / "share" / "jupyter"))


def test_an_unknown_experiment_behind_a_notebook_is_no_silent_success(folder, tmp_path, capsys):
    assert run("run", "01", "-p", "seed", "2", "--notebooks", str(folder), "--out", str(tmp_path / "out")) == 2
    assert "unknown experiment: got 'alpha'" in capsys.readouterr().err
