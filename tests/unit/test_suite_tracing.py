"""What a kernel's trace tells: each file in the state in which it was first read."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rackbook.suite.tracing import state

KERNEL = """\
import builtins, os, pathlib, sys

class Shell:
    def register(self, event, function):
        self.after_cell = function

shell = Shell()
shell.events = shell
builtins.get_ipython = lambda: shell
sys.path.insert(0, {root!r})
from rackbook.suite import tracing
tracing.start({into!r})
{cell}
shell.after_cell()
"""


@pytest.fixture
def traced(tmp_path):
    """Run a cell in a process that is traced like a kernel; what it read below the folder, by relative name."""
    root = tmp_path / "root"
    root.mkdir()

    def run(cell: str) -> dict[str, tuple[int, ...] | None]:
        into = tmp_path / "trace.json"
        text = KERNEL.format(root=str(root), into=str(into), cell=cell)
        variables = os.environ | {"RACKBOOK_TRACE_ROOTS": str(root)}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        subprocess.run([sys.executable, "-c", text], env=variables, cwd=root, check=True)
        found = {name: then and tuple(then) for name, then in json.loads(into.read_text()).items()}
        return {name.removeprefix(f"{root}/"): then for name, then in found.items() if name.startswith(str(root))}

    run.root = root
    return run


def test_each_file_has_the_state_in_which_it_was_first_read(traced):
    (traced.root / "a.csv").write_text("1")
    (traced.root / "sub").mkdir()
    before = state(traced.root / "a.csv")
    found = traced(
        "open('a.csv').read()\nopen('out.csv', 'w').write('x')\nos.listdir('sub')\n"
        "open('a.csv', 'a').write('2')\nopen('a.csv').read()\npathlib.Path('none.csv').exists()\n"
        "try:\n    open('gone.csv')\nexcept OSError:\n    pass"
    )
    assert found == {"a.csv": before, "sub": state(traced.root / "sub"), "gone.csv": None}
    assert before != state(traced.root / "a.csv")


def test_a_module_counts_by_its_source_as_it_was_when_it_was_loaded_compiled_or_not(traced):
    source = traced.root / "mine.py"
    source.write_text("x = 1\n")
    for _ in range(2):  # the second time it is compiled already
        before = state(source)
        found = traced("import mine\ntext = pathlib.Path('new')\ntext.write_text('x = 1\\n')\ntext.replace('mine.py')")
        assert found["mine.py"] == before
        assert state(source) != before
        os.utime(source, ns=before[1:2] * 2)  # or it would be compiled anew
    assert list((traced.root / "__pycache__").iterdir())


def test_a_file_that_takes_anothers_place_is_told_from_it_whatever_its_times(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("1")
    new.write_text("2")
    os.utime(new, ns=(state(old)[1],) * 2)
    before = state(old)
    new.replace(old)
    assert state(old)[:2] == before[:2]
    assert state(old) != before
    assert state(new) is None
