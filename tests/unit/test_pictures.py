"""Pictures and the cache that keeps them."""

import base64
import os

import pytest
from small_notebooks import spec

from rackbook import cache, pictures


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rackbook"


def test_a_picture_is_what_the_converter_draws_at_once():
    import vl_convert

    direct = vl_convert.vegalite_to_png(pictures.text(spec()), scale=pictures.PNG_SCALE)
    assert base64.b64decode(pictures.png(spec())) == direct
    assert pictures.svg(spec()) == vl_convert.vegalite_to_svg(pictures.text(spec()))


def test_the_same_chart_is_drawn_once_and_another_is_drawn_anew(monkeypatch):
    first = pictures.svg(spec())
    monkeypatch.setattr("vl_convert.vegalite_to_svg", lambda text: f"<svg>{len(text)}</svg>")
    assert pictures.svg(spec()) == first
    assert pictures.svg(spec() | {"width": 10}) != first


def test_half_a_picture_is_not_used(private_cache):
    whole = pictures.png(spec())
    (kept,) = (private_cache / "pictures").glob("*.png")
    kept.write_bytes(kept.read_bytes()[:-5])
    assert pictures.png(spec()) == whole


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert cache.kept("kind", "name", lambda: b"made") == b"made"


def test_the_oldest_go_first(private_cache):
    for age, name in enumerate(("new", "middle", "old")):
        cache.kept("kind", name, lambda: b"x")
        os.utime(private_cache / "kind" / name, (1_000_000 - age, 1_000_000 - age))
    cache.prune("kind", 2)
    assert {path.name for path in (private_cache / "kind").iterdir()} == {"new", "middle"}
    cache.prune("nothing there", 2)


def test_what_cannot_be_drawn_is_an_error_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="no such mark|Vega"):
            pictures.svg(spec() | {"mark": "no such mark"})
