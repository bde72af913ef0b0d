"""The release map: built, kept, added to, and the commands that do it."""

import argparse
import datetime
import json

import pytest
from small_wheels import SmallIndex, wheel_bytes, wheel_name

from rackbook import published
from rackbook.commands import releases as commands
from rackbook.errors import DataError, RackbookError
from rackbook.releases import MAP, PRS, probes, release_map
from rackbook.releases.targets import Shelf

LIST = """
package = "pkg"
companions = ["pkg-cpu"]
[commit]
path = "pkg/version.py"
pattern = "commit = '([0-9a-f]+)'"

[[pr]]
number = 11
title = "the new thing"
[[pr.probe]]
kind = "brings"
path = "pkg/new.py"
reason = "its file"
confidence = "likely"
[[pr.probe]]
kind = "brings"
path = "pkg/core.py"
pattern = "^import new"
reason = "its use"
confidence = "firm"

[[pr]]
number = 12
title = "the old thing replaced"
undetermined = "the old thing is gone, whoever took it"
[[pr.probe]]
kind = "replaces"
path = "pkg/core.py"
pattern = "old = "
reason = "its line"
confidence = "likely"
"""
FIRST, LATER = datetime.date(2026, 11, 1), datetime.date(2026, 11, 20)


def content(version: str, **files: str) -> bytes:
    named = {f"pkg/{name}.py": text for name, text in files.items()}
    return wheel_bytes({"pkg/version.py": f"commit = 'abc{version[-1]}'\n", **named})


@pytest.fixture
def server():
    with SmallIndex() as running:
        running.add(wheel_name("1.0"), content("1.0", core="old = 1\n"), uploaded="2026-10-01T00:00:00Z")
        running.add(wheel_name("1.1"), content("1.1", core="import new\nold = 1\n", new=""))
        running.add(wheel_name("1.0", "pkg_cpu"), b"", package="pkg-cpu", uploaded="2026-10-02T00:00:00Z")
        running.add(wheel_name("0.9", "pkg_cpu"), b"", package="pkg-cpu")
        yield running


@pytest.fixture
def changes(tmp_path):
    path = tmp_path / "prs.toml"
    path.write_text(LIST)
    return probes.read(path)


def updated(server, changes, old=None, *versions, today=FIRST, cache=None):
    shelf = Shelf(changes.package, changes.platform, cache=cache, settings=server.settings)
    return release_map.update(changes, shelf, old, versions=versions, today=today)


def test_a_map_of_two_releases(server, changes):
    built = updated(server, changes, None, "1.1", "1.0")
    assert list(built.releases) == ["1.0", "1.1"], "oldest first, however they are named"
    assert built.releases["1.0"].uploaded_on == datetime.date(2026, 10, 1)
    assert (built.releases["1.1"].commit, built.releases["1.1"].probed_on) == ("abc1", FIRST)
    assert built.change(11).releases == {"1.0": False, "1.1": True}
    assert built.change(11).confidence("1.1") == "firm"
    assert built.change(11).probes[1].evidence["1.1"].at == "pkg/core.py:1"
    assert built.change(12).releases == {"1.0": False, "1.1": False}
    assert built.change(12).confidence("1.1") == "likely"
    assert (built.first_release(11), built.first_release(12)) == ("1.1", None)
    assert built.companions == {"pkg-cpu": {"1.0": datetime.date(2026, 10, 2)}}, "from the oldest release of the map on"
    with pytest.raises(DataError, match=r"unknown pull request in the map of pkg: got '13', allowed: 11, 12"):
        built.change(13)


def test_a_second_look_reads_no_wheel_and_gives_the_same_file(server, changes, tmp_path):
    built = updated(server, changes, None, "1.0", "1.1")
    assert release_map.write(built, tmp_path / "map.json")
    text = (tmp_path / "map.json").read_text()
    before = len(server.file_requests())
    again = updated(server, changes, release_map.read(tmp_path / "map.json"), today=LATER)
    assert len(server.file_requests()) == before
    assert not release_map.write(again, tmp_path / "map.json")
    assert (tmp_path / "map.json").read_text() == text
    # the same wheels looked into afresh, in another order, give the same map
    assert updated(server, changes, None, "1.1", "1.0").text() == text


def test_a_new_release_is_added_without_being_named(server, changes):
    old = updated(server, changes, None, "1.0")
    before = len(server.file_requests())
    server.add(wheel_name("1.2rc1"), content("1.2", core=""))
    server.add(wheel_name("1.3"), content("1.3", core=""), yanked=True)
    server.add(wheel_name("1.2"), content("1.2", core="import new\n", new=""))
    new = updated(server, changes, old, today=LATER)
    assert list(new.releases) == ["1.0", "1.1", "1.2"], "neither early nor yanked ones"
    assert [r.probed_on for r in new.releases.values()] == [FIRST, LATER, LATER]
    assert wheel_name("1.0") not in str(server.file_requests()[before:])
    assert new.change(12).releases["1.2"] is None
    assert new.change(12).notes == {"1.2": "the old thing is gone, whoever took it"}
    named = updated(server, changes, old, "1.2")
    assert list(named.releases) == ["1.0", "1.2"]


def test_what_a_newer_release_lost_is_an_open_question(server, changes):
    server.add(wheel_name("1.2"), content("1.2", core="old = 1\n"))
    built = updated(server, changes, None, "1.0", "1.1", "1.2")
    assert built.change(11).releases == {"1.0": False, "1.1": True, "1.2": None}
    assert built.change(11).notes["1.2"].startswith("1.1 has it: renamed or taken out since")
    assert updated(server, changes, built).text() == built.text(), "the note survives a look that reads nothing"


def test_other_probes_read_again_and_other_words_do_not(server, changes):
    old = updated(server, changes, None, "1.0")
    before = len(server.file_requests())
    first, second = changes.changes
    reworded = changes.model_copy(update={"changes": (first.model_copy(update={"title": "renamed"}), second)})
    assert updated(server, reworded, old, "1.0", today=LATER).change(11).title == "renamed"
    assert len(server.file_requests()) == before
    fewer = changes.model_copy(update={"changes": (first,)})
    new = updated(server, fewer, old, "1.0", today=LATER)
    assert len(server.file_requests()) > before
    assert new.releases["1.0"].probed_on == LATER


def test_a_release_that_is_yanked_later_stays_and_says_so(server, changes):
    old = updated(server, changes, None, "1.0", "1.1")
    server.files["pkg"][wheel_name("1.1")].yanked = "broken"
    new = updated(server, changes, old)
    assert (new.releases["1.0"].yanked, new.releases["1.1"].yanked) == (False, True)
    assert new.change(11).releases == old.change(11).releases


def test_the_first_map_needs_names(server, changes):
    with pytest.raises(DataError, match="there is no map of pkg yet: name the releases to begin with"):
        updated(server, changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[", "map.json: not valid JSON"), ("{}", "field package: got nothing"), (None, "begins one")],
)
def test_a_map_that_is_none(tmp_path, text, message):
    path = tmp_path / "map.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        release_map.read(path)


def run(*arguments):
    parser = argparse.ArgumentParser()
    commands.add_parsers(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["releases", *map(str, arguments)])
    return parsed.command(parsed)


@pytest.fixture
def configured(server, monkeypatch, tmp_path):
    """Pip set up, by its environment alone, to use the small index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "prs.toml").write_text(LIST)
    return server


def test_update_keeps_the_old_map_when_something_is_wrong(configured, tmp_path, capsys):
    path, options = tmp_path / "map.json", ("--map", tmp_path / "map.json", "--prs", tmp_path / "prs.toml")
    assert run("update", "1.0", *options) == 0
    out, said = capsys.readouterr()
    assert "map.json: written" in out
    assert "#11     no   the new thing" in out
    assert said.startswith("1.0: read in parts, 0.00 MB in 1 requests")
    before = path.read_bytes()
    configured.add(wheel_name("1.2", platform="win_amd64"), b"")
    with pytest.raises(DataError, match=r"pkg 1\.2 has no wheel for manylinux\*_x86_64; its wheels are for win_amd64"):
        run("update", *options)
    assert path.read_bytes() == before
    del configured.files["pkg"][wheel_name("1.2", platform="win_amd64")]
    configured.add(wheel_name("1.2"), b"no zip")
    with pytest.raises(DataError, match=r"pkg 1\.2: the wheel is damaged"):
        run("update", *options)
    configured.files.clear()
    with pytest.raises(RackbookError, match="has no package"):
        run("update", *options)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "map.json", "prs.toml"], "no leftovers"


def test_probe_and_check(configured, tmp_path, capsys):
    wheel = tmp_path / wheel_name("1.5")
    wheel.write_bytes(content("1.5", core="import new\n", new=""))
    assert run("probe", wheel, "--prs", tmp_path / "prs.toml") == 0
    assert capsys.readouterr().out.splitlines() == [
        "pkg 1.5, commit abc5",
        "change  in   title                   seen",
        "#11     yes  the new thing           pkg/new.py, pkg/core.py:1",
        "#12     ?    the old thing replaced  the old thing is gone, whoever took it",
    ]
    assert run("check", tmp_path / "prs.toml", "1.0", wheel) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pkg: yes, no, or ? where that cannot be told",
        "change  1.0  1.5  title",
        "#11     no   yes  the new thing",
        "#12     no   ?    the old thing replaced",
    ]
    assert run("check", tmp_path / "prs.toml") == 0
    assert "change  1.0  1.1  title" in capsys.readouterr().out
    with pytest.raises(DataError, match="the package index has no package 'other'"):
        run("check", tmp_path / "prs.toml", "--package", "other")


def test_probe_as_an_object(configured, tmp_path, capsys):
    assert run("probe", "pkg==1.1", "--prs", tmp_path / "prs.toml", "--json", "--no-cache") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["release"], found["commit"]) == ("1.1", "abc1")
    assert [(pr["pr"], pr["contained"]) for pr in found["prs"]] == [(11, True), (12, False)]
    assert found["prs"][0]["probes"][0] == {
        "kind": "brings", "path": "pkg/new.py", "pattern": None, "confidence": "likely", "found": True,
        "at": "pkg/new.py", "says": True,
    }  # fmt: skip
    assert not (tmp_path / "cache").exists()


def test_the_committed_map_is_of_the_committed_list():
    changes, committed = probes.read(PRS), release_map.read()
    assert {r.probes_sha256 for r in committed.releases.values()} == {release_map.probes_sha256(changes)}, (
        "data/releases/prs.toml has changed: run `rackbook releases update`"
    )
    assert [(c.number, c.title) for c in changes.changes] == [(r.pr, r.title) for r in committed.prs]
    assert MAP.read_text("utf-8") == committed.text()
    assert "://" not in committed.text(), "no address stands in the map"


def test_the_committed_map_has_the_published_dates():
    table = published.read("release_map").select("version", "released_on").unique()
    committed = release_map.read().releases
    for version, day in table.iter_rows():
        assert committed[version].uploaded_on == day


def test_a_map_that_cannot_be_written(server, changes, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written .*; name another file with --map"):
        release_map.write(updated(server, changes, None, "1.0"), tmp_path / "file" / "map.json")
