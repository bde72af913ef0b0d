"""Lists of pull requests: what a find or a miss says, and what a list may hold."""

from pathlib import Path

import pytest

from rackbook import published
from rackbook.errors import DataError
from rackbook.releases import PRS, probes
from rackbook.releases.contents import Folder

HEAD = 'package = "pkg"\n[[pr]]\nnumber = 7\ntitle = "a change"\n'
SILENT = 'undetermined = "x"\n'
REASON = 'reason = "because"\nconfidence = "firm"\n'


def folder(root: Path, files: dict[str, str]) -> Folder:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Folder(root)


def change(*kinds_and_patterns: tuple[str, str | None], path: str = "a.py") -> probes.PullRequest:
    return probes.PullRequest(
        number=7,
        title="a change",
        undetermined="it leaves no trace",
        probe=[
            {"kind": kind, "path": path, "pattern": pattern, "reason": "because", "confidence": "firm"}
            for kind, pattern in kinds_and_patterns
        ],
    )


@pytest.mark.parametrize(
    ("kind", "found", "missing"),
    [("brings", True, False), ("removes", False, True), ("needs", None, False), ("replaces", False, None)],
)
def test_what_a_find_and_a_miss_say(tmp_path, kind, found, missing):
    contents = folder(tmp_path, {"a.py": "new = 1\n"})
    assert change((kind, "^new")).judge(contents).contained is found
    assert change((kind, "^old")).judge(contents).contained is missing
    # without a pattern, the file itself is what is looked for
    assert change((kind, None)).judge(contents).contained is found
    assert change((kind, None), path="b.py").judge(contents).contained is missing


@pytest.mark.parametrize(("kind", "says"), [("brings", False), ("needs", False), ("removes", None), ("replaces", None)])
def test_a_file_that_is_gone_does_not_prove_that_a_line_was_removed(tmp_path, kind, says):
    assert change((kind, "x"), path="renamed.py").judge(folder(tmp_path, {})).contained is says


def test_one_voice_decides_and_two_that_contradict_do_not(tmp_path):
    contents = folder(tmp_path, {"a.py": "new\nold\n"})
    together = change(("needs", "new"), ("replaces", "old")).judge(contents)
    assert (together.contained, together.note) == (False, "")
    against = change(("brings", "new"), ("replaces", "old")).judge(contents)
    assert (against.contained, against.note) == (None, "the probes contradict each other")
    silent = change(("needs", "new")).judge(contents)
    assert (silent.contained, silent.note) == (None, "it leaves no trace")


def test_evidence_is_the_first_file_and_line(tmp_path):
    contents = folder(tmp_path, {"m/one/a.py": "x\ny\nnew\nnew\n", "m/two/a.py": "new\n", "m/a.py": "new\n"})
    (sighting,) = change(("brings", "^new$"), path="m/*/a.py").judge(contents).sightings
    assert sighting.at == "m/one/a.py:3"
    (sighting,) = change(("brings", "^new$"), path="m/**/a.py").judge(contents).sightings
    assert sighting.at == "m/a.py:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD + '[[pr.probe]]\nkind = "brings"\npath = "a"\npattern = "("\n' + REASON,
            r"pr\.0\.probe\.0\.pattern: got '\(', value error, not a regular expression: missing \)",
        ),
        (HEAD + '[[pr.probe]]\nkind = "adds"\npath = "a"\n' + REASON, "kind: got 'adds', input should be 'brings', "),
        (HEAD + '[[pr.probe]]\nkind = "brings"\npath = "../a"\n' + REASON, "from the root of the wheel downwards"),
        (HEAD + '[[pr.probe]]\nkind = "needs"\npath = "a"\n' + REASON, "undetermined must say why"),
        (HEAD, "undetermined must say why"),
        (HEAD + 'state = "merged"\n', "merged_on belongs to the state merged"),
        (HEAD + SILENT + HEAD.partition("\n")[2] + SILENT, "pull request 7 stands twice"),
        (HEAD + SILENT + "probes = []\n", "unknown key: got 'probes', allowed: .*Did you mean 'probe'"),
        ('package = "pkg"\n', "field pr: got nothing"),
        ("package = ", "not valid TOML"),
    ],
)
def test_a_bad_list_is_refused(tmp_path, text, message):
    path = tmp_path / "prs.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        probes.read(path)


def test_the_commit_is_the_group_of_the_pattern(tmp_path):
    contents = folder(tmp_path, {"v/version.py": "commit_id = 'g12ab'\n"})
    assert probes.Commit(path="v/version.py", pattern="'g([0-9a-f]+)'").read(contents) == "12ab"
    assert probes.Commit(path="v/other.py", pattern="(x)").read(contents) is None
    with pytest.raises(ValueError, match="one group of the pattern, this has 0"):
        probes.Commit(path="v/version.py", pattern="x")


def test_the_list_that_comes_with_rackbook_says_what_the_source_says():
    listed = [(c.number, c.title, c.looked_up_on, c.state, c.merged_on) for c in probes.read(PRS).changes]
    table = published.read("release_map_prs").select("pr", "title", "looked_up_on", "state", "merged_on")
    assert listed == list(table.iter_rows())


def test_the_example_list_is_valid():
    assert probes.read(PRS.with_name("example_httpx.toml")).package == "httpx"
