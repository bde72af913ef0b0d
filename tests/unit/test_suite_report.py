"""The report: complete, honest about failures, safe against its own content, and alone in the world."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from small_notebooks import notebook, png, record, show_verdicts, spec

from rackbook.errors import DataError
from rackbook.suite import excerpt, outcomes, report, vega
from rackbook.suite.artefacts import VEGALITE_MIME, VERDICTS_MIME
from rackbook.suite.batch import Folders
from rackbook.suite.notebooks import load_json

PARAMETERS = {"seed": 12345, "rate": 0.5, "label": "x", "fast": True, "sizes": [1], "points_path": "", "limit": None}
HOSTILE = "</script><script>alert(1)</script><!-- \u2028"


def executed(
    folders: Folders, name: str, *texts: str, charts=(), records=None, reason="", error=None, run="r1", day=1, given=()
) -> Path:
    """Write a notebook as the batch would have left it: Markdown cells first, then charts, then the verdicts."""
    topic = name.partition("_")[2]
    path = notebook(folders.notebooks, name, *texts, *["chart"] * len(charts), verdicts=True)
    content = load_json(path)
    code = [c for c in content["cells"] if c["source"] == "chart" or c["source"] == ["chart"]]
    for cell, chart in zip(code, charts, strict=True):
        cell["outputs"] = [
            {"output_type": "display_data", "metadata": {}, "data": {VEGALITE_MIME: chart, "image/png": png() + "\n"}}
        ]
    records = [record(topic)] if records is None else records
    last = content["cells"][-1]
    if error:
        last["outputs"] = [{"output_type": "error", "ename": "ValueError", "evalue": reason, "traceback": [error]}]
    else:
        last["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": {VERDICTS_MIME: records}}]
    outcome = outcomes.Outcome(
        notebook=name, succeeded=not reason, reason=reason, failed_cell=3 if reason else None,
        parameters=PARAMETERS,
        given=given, duration_s=4.25, run=run, finished_at=f"2026-11-{day:02}T10:30:00+00:00",
    )  # fmt: skip
    outcomes.write(content, path, outcome)
    return path


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Folders:
    monkeypatch.setattr(vega, "bundle", lambda: "window.vegaEmbed = () => '</script>';")
    return Folders(tmp_path)


def page_of(folders: Folders) -> str:
    report.write(folders)
    return folders.report.read_text("utf-8")


class Page(HTMLParser):
    """Text, element counts and ids of a page; fails on what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text, self.ids, self.scripts, self._open = [], [], "", [], [], []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "img", "br", "link", "input", "hr"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data


READING = "**Reading it.** Lower is *better*."


def test_a_chart_comes_with_its_question_its_reading_its_picture_and_its_specification(folders):
    path = executed(
        folders, "01_alpha", "#md ## How does it grow?\n\nOne line.", charts=[spec()], given=("seed",),
    )  # fmt: skip
    content = load_json(path)
    content["cells"].insert(-1, {"cell_type": "markdown", "id": "r", "metadata": {}, "source": READING})
    outcomes.write(content, path)
    page = Page(page_of(folders))
    for words in ("How does it grow?", "One line.", "Reading it.", "Does alpha hold?", "4.2 s", "12,345", "(given)"):
        assert words in page.text
    assert json.loads(page.scripts[0]) == spec()
    assert any(name == "src" and value.startswith("data:image/png;base64,iVBOR") for name, value in page.attributes)
    assert ("alt", "Chart: Dots") in page.attributes


def test_the_vector_picture_is_preferred_to_the_bitmap(folders):
    executed(folders, "01_alpha", "#md ## Q?", charts=[spec()])
    svg = folders.charts / "01_alpha" / "dots.svg"
    svg.parent.mkdir(parents=True)
    svg.write_text("<svg/>")
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+"' in page_of(folders)


def test_the_board_counts_by_verdict_and_shows_contradictions_first(folders):
    executed(folders, "01_alpha", records=[record("alpha"), record("alpha", id="alpha.two", verdict="open", found=None,
             difference=None, basis=None, needs="Eight trays.", command="run it")])  # fmt: skip
    executed(folders, "02_beta", records=[record("beta", verdict="refuted", statement="Two is one.")])
    text = page_of(folders)
    page = Page(text)
    counts = dict(re.findall(r'<div class="(\w+)"><dt>.*?</dt><dd>(\d+)</dd>', text))
    assert counts == {"refuted": "1", "inconsistent": "0", "open": "1", "reproduced": "0", "consistent": "1"}
    assert page.text.index("Two is one.") < page.text.index("One is one.")
    assert "Eight trays." in page.text
    assert "run it" in page.text
    assert "more claims have no verdict here" in page.text


def test_a_notebook_that_shows_the_verdicts_of_others_does_not_count_them_twice(folders):
    executed(folders, "00_overview", records=[record("alpha")])
    executed(folders, "01_alpha")
    counts = dict(re.findall(r'<div class="(\w+)"><dt>.*?</dt><dd>(\d+)</dd>', page_of(folders)))
    assert counts["consistent"] == "1"


def test_a_failed_notebook_is_shown_as_failed_with_its_error_without_colours_or_homes(folders):
    home = Path.home()
    executed(folders, "01_alpha", reason="ValueError: no", error=f"\x1b[31mValueError\x1b[0m in {home}/secret/x.py: no")
    executed(folders, "02_beta")
    text = page_of(folders)
    page = Page(text)
    assert "What failed" in page.text
    assert "01_alpha, code cell 3: ValueError: no" in " ".join(page.text.split()).replace(" ,", ",")
    assert "ValueError in ~/secret/x.py: no" in page.text
    assert "\x1b" not in text
    assert f"{home}/" not in text


def test_the_report_is_written_when_every_notebook_failed(folders):
    executed(folders, "01_alpha", reason="KernelDied: gone", error="KernelDied: gone")
    assert "KernelDied: gone" in Page(page_of(folders)).text


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("02_half.ipynb", '{"cells": [', "02_half.ipynb: not a notebook"),
        ("02_foreign.ipynb", '{"cells": [], "metadata": {}, "nbformat": 4}', "not a notebook that"),
    ],
)
def test_a_half_written_or_foreign_file_is_reported_not_read(folders, name, content, complaint):
    executed(folders, "01_alpha")
    (folders.notebooks / name).write_text(content)
    (problem,) = report.write(folders)
    assert complaint in problem
    assert complaint in Page(folders.report.read_text()).text


def test_a_renamed_file_is_reported(folders):
    executed(folders, "01_alpha").rename(folders.notebooks / "02_beta.ipynb")
    (problem,) = report.write(folders)
    assert "02_beta.ipynb: holds the results of 01_alpha" in problem


def test_no_executed_notebook_is_an_error(folders):
    with pytest.raises(DataError, match="no executed notebook"):
        report.write(folders)


def test_nothing_in_a_notebook_can_break_out_of_its_place(folders):
    executed(
        folders, "01_alpha", f"#md ## Heading {HOSTILE}\n\n{HOSTILE} <img src=x onerror=alert(1)>",
        charts=[spec(description=HOSTILE, title=HOSTILE)],
        records=[record("alpha", statement=HOSTILE, note=HOSTILE)],
    )  # fmt: skip
    page = Page(page_of(folders))
    assert page.tags.count("script") == 3  # the specification, Vega, the page's own
    assert json.loads(page.scripts[0])["description"] == HOSTILE
    assert page.tags.count("img") == 1
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_the_page_asks_for_nothing_from_elsewhere(folders):
    text = "#md ## Q?\n\n![a](http://x.invalid/a.png) [b](02_beta.ipynb) [c](data/x.csv)"
    executed(folders, "01_alpha", text, charts=[spec()])
    page = Page(page_of(folders))
    assert not set(page.tags) & {"link", "iframe", "object", "embed", "video", "audio", "base"}
    assert all(value.startswith("data:") for name, value in page.attributes if name in ("src", "srcset"))
    assert [v for n, v in page.attributes if n == "href" and not v.startswith("#")] == []
    assert ("href", "#02_beta") in page.attributes
    (policy,) = [v for _, v in page.attributes if v and v.startswith("default-src")]
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_ids_are_unique_and_links_in_the_page_lead_somewhere(folders):
    executed(folders, "01_alpha", "#md ## Q?", charts=[spec(), spec("more")])
    executed(folders, "02_beta", "#md ## Q?", charts=[spec()])
    page = Page(page_of(folders))
    assert len(page.ids) == len(set(page.ids))
    assert {v[1:] for n, v in page.attributes if n == "href"} <= set(page.ids)


def test_a_notebook_from_an_earlier_run_says_so(folders):
    executed(folders, "01_alpha", run="old", day=1)
    executed(folders, "02_beta", run="new", day=2)
    page = Page(page_of(folders))
    assert page.text.count("from an earlier run, 2026-11-01 10:30 UTC") == 1
    assert "Run finished 2026-11-02 10:30 UTC" in page.text


def test_the_machine_line_names_no_host_and_no_user():
    assert outcomes.machine().keys() == {"cores", "system", "python"}
    import platform

    assert platform.node() not in outcomes.machine().values()


def test_a_reading_belongs_to_the_chart_before_it_and_one_for_a_table_stays_in_the_notebook():
    def text(source):
        return {"cell_type": "markdown", "source": source, "metadata": {}}

    def code(*data):
        return {"cell_type": "code", "source": "", "metadata": {}, "outputs": [{"data": d} for d in data]}

    chart = {VEGALITE_MIME: spec(), "image/png": png()}
    content = {
        "cells": [
            text("# 01 T: q?\n\nIntroduction."), code(),
            text("## First?\n\nLead."), code(chart), code({"text/plain": "t"}),
            text("**Reading it.** Of the chart."), code({"text/plain": "t"}), text("**Reading it.** Of the table."),
            text("## Only a table?"), code({"text/plain": "t"}), text("**Reading it.** Table."),
            text("## Result and limits\n\nLimits."), code(),
        ]
    }  # fmt: skip
    first, last = excerpt.sections(content)
    assert (first.heading, first.lead, [c.name for c in first.charts]) == ("First?", "<p>Lead.</p>", ["dots"])
    assert first.readings == ["<p><strong>Reading it.</strong> Of the chart.</p>"]
    assert (last.heading, last.lead, last.charts) == ("Result and limits", "<p>Limits.</p>", [])


def test_the_chart_library_is_kept_between_runs_and_a_broken_copy_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    text = "window.vegaEmbed=1;" + "x" * 500_000
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda: calls.append(1) or text)
    assert vega.bundle() == vega.bundle() == text
    assert len(calls) == 1
    (kept,) = (tmp_path / "rackbook" / "vega").iterdir()
    kept.write_text("window.vegaEmbed=1;")
    assert vega.bundle() == text
    assert len(calls) == 2


def test_the_verdict_cell_of_the_tests_is_what_the_suite_looks_for():
    assert VERDICTS_MIME in show_verdicts()
    from rackbook import claims
    from rackbook.suite import verdicts as words

    assert claims.MIME == VERDICTS_MIME
    assert set(words.ORDER) == set(words.MARKS) == set(words.MEANINGS) == set(claims.VERDICTS)


def test_a_broken_register_of_claims_does_not_keep_the_report_from_saying_so(folders, monkeypatch):
    from rackbook import claims

    def broken():
        raise DataError("data/claims.toml: broken")

    monkeypatch.setattr(claims, "register", broken)
    executed(folders, "01_alpha", reason="DataError: broken", error="DataError: broken")
    assert "Not in this report: data/claims.toml: broken" in Page(page_of(folders)).text
