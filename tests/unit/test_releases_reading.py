"""Reading wheels: from disk, in parts from a server, from a folder, from the cache; and pip's settings."""

import dataclasses
import datetime
import io
import json
import random
import sys

import pytest
import requests
from small_wheels import PLATFORM, SmallIndex, wheel_bytes, wheel_name

from rackbook.errors import DataError, RackbookError
from rackbook.releases import PRS, probes, release_map
from rackbook.releases import index as index_module
from rackbook.releases.contents import Cached, Folder, Wheel
from rackbook.releases.index import Index, PipSettings
from rackbook.releases.ranges import GAP_BYTES, TAIL_BYTES, NotReadError, RangeFile, RangesRefusedError
from rackbook.releases.targets import Shelf, installed, local_wheel

NOISE = random.Random(7).randbytes(400_000)
FILES = {
    "pkg/__init__.py": "import this\n",
    "pkg/lib.so": NOISE,
    "pkg/a.py": "one = 1\n",
    "pkg/sub/b.py": "two = 2\n",
    "pkg-1.0.dist-info/METADATA": "Name: pkg\n",
}


@pytest.fixture
def server():
    with SmallIndex() as running:
        running.add(wheel_name("1.0"), wheel_bytes(FILES))
        yield running


def shelf(server, **options) -> Shelf:
    settings = options.pop("settings", server.settings())
    return Shelf("pkg", "manylinux*_x86_64", **{"cache": None, "settings": lambda: settings} | options)


def remote(server, name=None) -> RangeFile:
    return RangeFile(requests.Session(), server.file_url(name or wheel_name("1.0")), timeout_s=5)


def test_a_file_read_in_parts_is_the_file(server):
    content = server.files["pkg"][wheel_name("1.0")].content
    file, local, draw = remote(server), io.BytesIO(content), random.Random(1)
    assert file.size == len(content)
    for _ in range(50):
        offset, length = draw.randrange(len(content) + 10), draw.choice([0, 1, 30, 5000, -1])
        assert file.seek(offset) == local.seek(offset)
        assert file.read(length) == local.read(length)
        assert file.tell() == min(local.tell(), file.size)
    assert file.seek(-10, io.SEEK_END) == local.seek(-10, io.SEEK_END)
    assert file.read() == local.read()


def test_near_parts_are_one_request_and_far_ones_are_not(server):
    file = remote(server)
    assert file.num_requests == 1
    file.prefetch([(1000, 1100), (1050, 2000), (2000 + GAP_BYTES, 2001 + GAP_BYTES)])
    assert file.num_requests == 2
    file.prefetch([(10_000, 10_010), (30_000, 30_010), (file.size - 10, file.size + 500)])
    assert file.num_requests == 3, "the first lies in what was read, the last in the tail"
    file.seek(1500)
    file.read(100)
    assert file.num_requests == 3


def test_a_wheel_is_read_in_small_parts(server):
    target = shelf(server).open("pkg==1.0")
    target.contents.fetch(["pkg/a.py", "pkg/sub/b.py"])
    assert target.contents.text("pkg/sub/b.py") == "two = 2\n"
    assert target.contents.matching("pkg/**/*.py") == ["pkg/__init__.py", "pkg/a.py", "pkg/sub/b.py"]
    assert target.contents.matching("pkg/*.py") == ["pkg/__init__.py", "pkg/a.py"]
    assert target.contents.matching("pkg/?.py") == ["pkg/a.py"]
    assert target.reading.num_bytes < TAIL_BYTES + 2000 < len(NOISE)
    assert not target.reading.in_full


@pytest.mark.parametrize("ranges", ["ignored", "refused"])
def test_a_server_without_ranges_sends_all_and_that_is_said(server, ranges):
    server.ranges, said = ranges, []
    target = shelf(server, say=said.append).open("1.0")
    assert target.contents.text("pkg/a.py") == "one = 1\n"
    assert target.reading.in_full
    assert said == ["pkg 1.0: the server does not serve parts of a file, so the whole wheel of 0 MB is downloaded"]
    assert target.reading.num_bytes == len(server.files["pkg"][wheel_name("1.0")].content)
    with pytest.raises(RangesRefusedError):
        remote(server)


def test_a_whole_wheel_must_be_the_one_that_the_index_announces(server):
    server.ranges = "ignored"
    opened = shelf(server)
    assert opened.page.versions == ("1.0",)
    server.add(wheel_name("1.0"), wheel_bytes({"pkg/a.py": "other\n"}))
    with pytest.raises(DataError, match="pkg 1.0: the downloaded wheel has another SHA-256"):
        opened.open("1.0")


def test_an_answer_that_breaks_off_is_asked_for_again(server):
    server.ranges, server.num_cuts = "cut", 2
    assert shelf(server).open("1.0").contents.text("pkg/a.py") == "one = 1\n"
    server.num_cuts = 10**6
    with pytest.raises(NotReadError, match="a part of the wheel could not be read: the answer broke off"):
        shelf(server).open("1.0")


def test_a_server_that_sends_less_than_was_asked_for(server):
    file = remote(server)
    server.ranges = "short"
    with pytest.raises(NotReadError, match="asked for 100 bytes of the wheel, got 99; try again"):
        file.prefetch([(1000, 1100)])


def test_an_index_that_is_not_there_is_named_by_no_host(server):
    gone = dataclasses.replace(server.settings(), index_urls=("http://127.0.0.1:9/simple",))
    with pytest.raises(NotReadError, match="the package index cannot be reached: no connection") as caught:
        shelf(server, settings=gone).open("latest")
    assert "127.0.0.1" not in str(caught.value)
    server.files.clear()
    with pytest.raises(DataError, match="the package index has no package 'pkg'"):
        shelf(server).open("latest")


def test_damaged_wheels(server, tmp_path):
    content = bytearray(wheel_bytes(FILES))
    server.add(wheel_name("1.1"), bytes(content[: len(content) - 100]))
    with pytest.raises(DataError, match=r"pkg 1\.1: the wheel is damaged or no zip archive, its list of files"):
        shelf(server).open("1.1")
    content[content.index(b"pkg/a.py") + len("pkg/a.py") + 2] ^= 0xFF
    (tmp_path / wheel_name("1.2")).write_bytes(content)
    with pytest.raises(DataError, match=r"damaged or no zip archive, pkg/a\.py cannot be read"):
        local_wheel(tmp_path / wheel_name("1.2")).contents.text("pkg/a.py")


def test_wheel_folder_and_server_give_the_same(server, tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / wheel_name("1.0")).write_bytes(wheel_bytes(FILES))
    opened = shelf(server)
    everywhere = [opened.open(name) for name in ("1.0", str(tmp_path / wheel_name("1.0")), str(tmp_path / "tree"))]
    assert [target.label for target in everywhere] == ["1.0", "1.0", "tree"]
    for glob in ("pkg/a.py", "pkg/*.py", "**/*.py", "pkg/none.py", "*"):
        found = [target.contents.matching(glob) for target in everywhere]
        assert found[0] == found[1] == found[2], glob
    assert len({target.contents.text("pkg/sub/b.py") for target in everywhere}) == 1


def test_what_was_read_is_kept(server, tmp_path):
    first = shelf(server, cache=tmp_path / "kept").open("1.0")
    assert first.contents.matching("pkg/a.py") == ["pkg/a.py"]
    assert first.contents.text("pkg/sub/b.py") == "two = 2\n"
    before = len(server.file_requests())
    again = shelf(server, cache=tmp_path / "kept").open("1.0")
    again.contents.fetch(["pkg/sub/b.py"])
    assert again.contents.matching("pkg/**/b.py") == ["pkg/sub/b.py"]
    assert again.contents.text("pkg/sub/b.py") == "two = 2\n"
    assert len(server.file_requests()) == before
    assert str(again.reading) == "read from the cache"
    again.contents.text("pkg/a.py")
    assert len(server.file_requests()) > before


def test_a_damaged_cache_is_read_again(tmp_path):
    (tmp_path / "files.json").write_text("[")
    kept = Cached(tmp_path, lambda: Wheel(io.BytesIO(wheel_bytes(FILES)), "pkg"))
    assert kept.matching("pkg/a.py") == ["pkg/a.py"]
    assert "pkg/a.py" in json.loads((tmp_path / "files.json").read_text())


def test_which_wheel_of_a_release(server):
    server.add(wheel_name("2.0", platform="macosx_14_0_arm64"), b"")
    server.add(wheel_name("2.0", platform="win_amd64"), b"")
    server.add(wheel_name("2.1", platform="any"), wheel_bytes(FILES))
    server.add("pkg-2.2.tar.gz", b"")
    server.add(wheel_name("3.0rc1"), wheel_bytes(FILES))
    server.add(wheel_name("2.3"), wheel_bytes(FILES), yanked="broken")
    server.add("pkg-2.4-1-py3-none-any.whl", b"", yanked=True)
    server.add("pkg-2.4-2-py3-none-any.whl", b"")
    page, said = shelf(server).page, []
    assert page.versions == ("1.0", "2.0", "2.1", "2.3", "2.4", "3.0rc1")
    assert page.wheel("2.4", PLATFORM).filename == "pkg-2.4-2-py3-none-any.whl", "the build that is not yanked"
    assert page.stable == ("1.0", "2.0", "2.1", "2.4"), "neither an early one, nor a yanked one, nor one without wheels"
    with pytest.raises(
        DataError, match=r"pkg 2\.0 has no wheel for manylinux\*_x86_64; .*macosx_14_0_arm64, win_amd64"
    ):
        page.wheel("2.0", "manylinux*_x86_64")
    assert page.wheel("v2.1", PLATFORM).filename == wheel_name("2.1", platform="any")
    with pytest.raises(DataError, match=r"pkg 9\.9 is not on the package index; the newest there: .*2\.4, 3\.0rc1"):
        page.wheel("9.9", PLATFORM)
    del server.files["pkg"]["pkg-2.4-1-py3-none-any.whl"], server.files["pkg"]["pkg-2.4-2-py3-none-any.whl"]
    assert shelf(server).open("latest").label == "2.1"
    assert shelf(server, say=said.append).open("2.3").contents.matching("pkg/a.py")
    assert said == ["pkg 2.3 was yanked: its makers took it back"]


def test_dates_and_digests_of_both_forms_of_an_index(server):
    server.add(wheel_name("1.1"), wheel_bytes(FILES), uploaded="2026-10-18T23:30:00-04:00", yanked=True)
    as_json = {f.version: f for f in shelf(server).page.files}
    assert as_json["1.1"].uploaded_on == datetime.date(2026, 10, 19), "the day in UTC"
    server.form = "html"
    as_html = {f.version: f for f in shelf(server).page.files}
    assert as_html["1.1"].uploaded_on is None
    for version in ("1.0", "1.1"):
        assert as_html[version].sha256 == as_json[version].sha256
        assert as_html[version].yanked == as_json[version].yanked == (version == "1.1")
        assert as_html[version].url == as_json[version].url
    assert shelf(server).open("1.0").contents.text("pkg/a.py") == "one = 1\n"


def test_the_second_index_is_asked_for_what_the_first_does_not_have(server):
    with SmallIndex() as empty:
        both = dataclasses.replace(server.settings(), index_urls=(empty.url, server.url))
        assert Index(both).page("PKG").versions == ("1.0",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other==1.0", "the list of pull requests is of pkg, expected pkg==…"),
        ("no such thing", "neither a wheel nor a folder nor a version; allowed: pkg==VERSION"),
        ("missing.whl", "missing.whl: no such wheel"),
        ("installed", "pkg is not installed in this environment"),
    ],
)
def test_names_that_are_nothing(server, name, message):
    with pytest.raises(DataError, match=message):
        shelf(server).open(name)


def test_a_file_that_is_named_like_no_wheel(tmp_path):
    (tmp_path / "pkg.whl").write_bytes(b"")
    with pytest.raises(DataError, match="not the name of a wheel, expected NAME-VERSION"):
        local_wheel(tmp_path / "pkg.whl")


def test_what_is_installed(tmp_path, monkeypatch):
    assert installed("packaging").contents.matching("packaging/version.py") == ["packaging/version.py"]
    info = tmp_path / "site" / "pkg-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pkg\nVersion: 1.5\n")
    source = tmp_path / "source code"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg" / "a.py").write_text("edited = 1\n")
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    target = installed("pkg")
    assert (target.label, target.contents.text("pkg/a.py")) == ("1.5", "edited = 1\n")


LISTING = """\
:env:.index-url='http://env.test/simple'
:env:.timeout='7'
global.cert='/etc/ca.pem'
global.extra-index-url='file:///srv/simple http://extra.test/simple'
global.index-url='http://global.test/simple'
install.index-url='http://install.test/simple'
global.trusted-host='extra.test'
freeze.timeout='1'
"""


def settings(monkeypatch, listing, help_text=""):
    monkeypatch.setattr(index_module, "_pip", lambda *a: help_text if "--help" in a else listing)
    return PipSettings.read()


def test_pip_settings_in_pips_order(monkeypatch):
    found = settings(monkeypatch, LISTING)
    assert found.index_urls == ("http://env.test/simple", "http://extra.test/simple")
    assert (found.cert, found.trusted_hosts, found.timeout_s, found.retries) == ("/etc/ca.pem", ("extra.test",), 7, 5)
    without_environment = "\n".join(line for line in LISTING.splitlines() if not line.startswith(":env:"))
    assert settings(monkeypatch, without_environment).index_urls[0] == "http://install.test/simple"


def test_pips_own_default_is_asked_for_only_where_nothing_is_set(monkeypatch):
    help_text = "  -i, --index-url <url>   Base URL (default http://default.test/simple). This should\n"
    assert settings(monkeypatch, "", help_text).index_urls == ("http://default.test/simple",)
    with pytest.raises(DataError, match="pip names no default index"):
        settings(monkeypatch, "", "nothing")
    with pytest.raises(DataError, match="says no-index"):
        settings(monkeypatch, "global.no-index='true'\n")
    with pytest.raises(DataError, match="no index with an http or https address"):
        settings(monkeypatch, "global.index-url='file:///srv/simple'\n")


def test_the_certificate_and_proxy_of_pip_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/environment.pem")
    monkeypatch.setenv("HTTPS_PROXY", "http://environment.test:1")
    session = PipSettings(("http://x.test",), cert="/pip.pem", proxy="http://pip.test:1").session()
    merged = session.merge_environment_settings("https://x.test", {}, None, None, None)
    assert merged["verify"] == "/pip.pem"
    assert merged["proxies"]["https"] == "http://pip.test:1"
    session = PipSettings(("http://x.test",)).session()
    merged = session.merge_environment_settings("https://x.test", {}, None, None, None)
    assert merged["verify"] == "/environment.pem"
    assert merged["proxies"]["https"] == "http://environment.test:1"


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="none: no such folder"):
        Folder(tmp_path / "none")


def test_a_real_release():
    """The one test that needs the package index; skipped, visibly, where it cannot be reached."""
    changes = probes.read(PRS)
    try:
        quick = dataclasses.replace(PipSettings.read(), retries=0, timeout_s=10)
        opened = Shelf(changes.package, changes.platform, cache=None, settings=lambda: quick)
        target = opened.open("vllm==0.32.0")
    except RackbookError as problem:
        pytest.skip(f"no package index: {problem}")
    judged, commit = release_map.look(changes, target)
    committed = release_map.read()
    assert {n: j.contained for n, j in judged.items()} == {r.pr: r.releases["0.32.0"] for r in committed.prs}
    assert commit == committed.releases["0.32.0"].commit
    assert target.reading.in_full or target.reading.num_bytes <= 1_000_000
