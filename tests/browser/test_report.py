"""The report in a real browser without a network: it draws, it prints, it works by keyboard and without scripts."""

import base64
import re
from pathlib import Path

import pytest
from chromium import PROGRAM, tab

from rackbook.suite import batch, report
from rackbook.suite.notebooks import discover

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine: the report was not opened")

ROOT = Path(__file__).resolve().parents[2]
FAILING = "1 / 0"
POINT = "svg .mark-symbol.role-mark path"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A report of one notebook of the suite and of one that fails."""
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from small_notebooks import notebook

    folder, out = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("out")
    failing = notebook(folder, "98_failing", FAILING)
    real = next(n for n in discover() if n.name.startswith("01_"))
    folders = batch.Folders(out)
    batch.execute([real, *discover(failing.parent)], {}, folders)
    report.write(folders)
    return folders.report


@pytest.fixture
def browser(tmp_path):
    with tab(tmp_path / "profile") as found:
        yield found


def enliven_all(browser) -> None:
    for index in range(browser.value("document.querySelectorAll('figure').length")):
        browser.value(f"document.querySelectorAll('figure')[{index}].scrollIntoView()")
        browser.wait_for(f"document.querySelectorAll('figure')[{index}].dataset.state")


def test_every_chart_becomes_interactive_and_nothing_is_requested(page, browser):
    browser.open(page)
    assert browser.value("document.querySelectorAll('figure').length") >= 1
    enliven_all(browser)
    states = browser.value("[...document.querySelectorAll('figure')].map((f) => f.dataset.state)")
    assert set(states) == {"live"}
    assert browser.value(
        "[...document.querySelectorAll('figure')].every("
        f"(f) => f.querySelector('{POINT}') && f.querySelector('img').hidden)"
    )
    assert browser.complaints == []
    outside = [url for url in browser.requests if not re.match(r"data:|blob:", url)]
    assert outside == [page.as_uri()]


def test_a_chart_answers_the_pointer(page, browser):
    browser.open(page)
    enliven_all(browser)
    x, y = browser.value(f"""(() => {{
      const mark = document.querySelector("{POINT}");
      mark.scrollIntoView({{block: "center"}});
      const r = mark.getBoundingClientRect();
      return [r.x + r.width / 2, r.y + r.height / 2];
    }})()""")
    for step in (1, 0):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)
    browser.wait_for("document.querySelector('#vg-tooltip-element.visible')", 5)
    assert "published" in browser.value("document.querySelector('#vg-tooltip-element').textContent")


def test_without_scripts_the_pictures_and_the_words_are_there(page, browser):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.value(
        "[...document.querySelectorAll('figure img')].every((i) => !i.hidden && i.complete && i.naturalWidth > 200)"
    )
    assert browser.value("document.querySelectorAll('figure[data-state]').length") == 0
    text = browser.value("document.body.innerText")
    for words in ("The board", "What failed", "98_failing", "ZeroDivisionError: division by zero"):
        assert words in text


def test_a_failed_notebook_is_plain_to_see(page, browser):
    browser.open(page)
    text = browser.value("document.querySelector('article[id=\"98_failing\"] .alarm').innerText")
    assert "This notebook failed in code cell 2: ZeroDivisionError: division by zero" in text
    assert browser.value("document.querySelector('nav .failed').innerText") == "failed"


def test_the_keyboard_reaches_the_board_and_the_navigation(page, browser):
    browser.open(page)
    browser.press("Tab")
    assert browser.value("document.activeElement.className") == "skip"
    browser.press("Tab")
    assert browser.value("document.activeElement.getAttribute('href')") == "#main"
    order = browser.value(
        "[...document.querySelectorAll('a, summary, [tabindex=\"0\"]')].filter((e) => e.tabIndex < 0).length"
    )
    assert order == 0


def test_words_carry_the_verdict_not_colour_alone(page, browser):
    browser.open(page)
    words = browser.value("[...new Set([...document.querySelectorAll('.verdict')].map((v) => v.textContent.trim()))]")
    assert all(re.search(r"refuted|inconsistent|open|reproduced|consistent", word) for word in words)


def test_text_has_enough_contrast(page, browser):
    browser.open(page)
    ratio = browser.value("""(() => {
      const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
      const light = (c) => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
      const numbers = (s) => s.match(/[\\d.]+/g).map(Number);
      const back = (e) => {
        for (; e; e = e.parentElement) {
          const c = numbers(getComputedStyle(e).backgroundColor);
          if (c.length < 4 || c[3] > 0) return c;
        }
        return [255, 255, 255];
      };
      return Math.min(...[...document.querySelectorAll("body *")].filter((e) =>
        e.childElementCount === 0 && e.textContent.trim() && !e.closest("script, style, figure .live")).map((e) => {
          const [a, b] = [light(numbers(getComputedStyle(e).color)), light(back(e))].sort((x, y) => y - x);
          return (a + 0.05) / (b + 0.05);
        }));
    })()""")
    assert ratio >= 4.5


@pytest.mark.parametrize("width", [390, 1300])
def test_no_width_makes_the_page_itself_scroll_sideways(page, browser, width):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.open(page)
    enliven_all(browser)
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_it_prints_with_charts_and_without_the_navigation(page, browser, tmp_path):
    browser.open(page)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.value("getComputedStyle(document.querySelector('figure')).display") == "block"
    pdf = base64.b64decode(browser.call("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF")
    assert browser.value("[...document.querySelectorAll('main details:not(figure details)')].every((d) => d.open)")
