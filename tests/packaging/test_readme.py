"""The README names every notebook, shows the committed board, and its commands exist."""

import re

from readme_picture import PICTURE, ROOT, picture

from rackbook.suite.notebooks import discover

README = (ROOT / "README.md").read_text("utf-8")


def test_the_table_has_every_notebook_with_its_question():
    rows = dict(re.findall(r"^\| \[(\d\d_\w+)\]\(notebooks/\1\.ipynb\) \| ([^|]+) \|", README, re.MULTILINE))
    assert rows == {n.name: n.question for n in discover(ROOT / "notebooks")}


def test_the_picture_is_the_board_of_the_committed_notebook():
    assert PICTURE.read_bytes() == picture(), "run `make notebooks`"


def test_make_targets_and_commands_exist(capsys):
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    from rackbook import cli

    known = cli._parser()._subparsers._group_actions[0].choices
    for command in set(re.findall(r"bin/rackbook (\w+)", README)):
        assert command in known
