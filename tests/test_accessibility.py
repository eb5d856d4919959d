"""Pages for keyboards, screen readers and weak eyes: axe-core finds no violation in reports and site.

axe-core comes with the package axe-core-python (extra `dev`); the variable AXE_JS names a newer file of it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.report_pages import write_gif, write_hostile, write_results
from tests.test_report_browser import CHROMIUM, DRIVER, Browser
from tests.test_site import build_site

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not here")

SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
SCHEMES = ("light", "dark")
# Everything that axe checks only if it is shown.
OPENED = """
document.getElementById('unfold')?.click();
document.querySelectorAll('details').forEach((each) => each.open = true);
if (typeof rows !== 'undefined') {
  rows.forEach((row, index) => { if (row.picture && opened.size < 2) opened.add(index) });
  show();
}
"""
# The site stores the scheme of its first page.
FORGET = "localStorage.clear()"
CHECK = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ['violations']}).then((found) => done(found.violations.flatMap((rule) =>
  rule.nodes.map((node) => `${rule.id}: ${node.target.join(' ')}: ${node.any.concat(node.all, node.none)
  .map((each) => each.message).join('; ')}`))), (error) => done([`axe failed: ${error}`]));
"""


@functools.cache
def axe_source() -> str:
    """Return axe-core's script; skip the test where it is not installed."""
    if (named := os.environ.get("AXE_JS")) is not None:
        return Path(named).read_text(encoding="utf-8")
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-core-python is not installed, and AXE_JS names no file")
    return (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def prefer(browser: Browser, scheme: str) -> None:
    """Let the reader prefer light or dark pages."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def violations(browser: Browser, page: Path, size: str, scheme: str) -> list[str]:
    """Return what axe finds in a page, with everything opened."""
    prefer(browser, scheme)
    browser.open(page, *SIZES[size])
    browser.run(FORGET)
    browser.open(page, *SIZES[size])
    browser.run(OPENED)
    browser.run(axe_source())
    problems: list[str] = browser.driver.execute_async_script(CHECK)
    return problems


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    axe_source()
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


# --- Reports ------------------------------------------------------------------------------------------------


def one(folder: Path) -> tuple[object, ...]:
    return (TF_SAMPLE,)


def two(folder: Path) -> tuple[object, ...]:
    return (TORCH_SAMPLE.with_name("ckpt-2500.pt"), TORCH_SAMPLE)


def played(folder: Path) -> tuple[object, ...]:
    """Evaluate a run, and report its last checkpoint with conversion and returns."""
    pytest.importorskip("gymnasium", reason="the agents play in Gymnasium's environment")
    assert in_process("convert", TF_SAMPLE, folder / "agent.pt", "--no-verify").status == 0
    ran = in_process("eval", TF_SAMPLE.parent, "--env", "Pendulum-v1", "--episodes", "3", "--json")
    (folder / "run.json").write_text(ran.out, encoding="utf-8")
    return folder / "agent.pt", "--eval", folder / "run.json"


def hostile(folder: Path) -> tuple[object, ...]:
    return (write_hostile(folder / "hostile.pkl"),)


def run(folder: Path) -> tuple[object, ...]:
    """Report a run with results, a film, a damaged checkpoint and findings."""
    run_folder = folder / "run"
    run_folder.mkdir()
    for step in (2500, 5000, 10000):
        shutil.copy(TORCH_SAMPLE.with_name(f"ckpt-{step}.pt"), run_folder)
    (run_folder / "ckpt-5000.pt").write_bytes((run_folder / "ckpt-5000.pt").read_bytes()[:9000])
    write_gif(run_folder / "ckpt-10000.gif")
    return run_folder, "--eval", write_results(folder, {2500: -900.0, 10000: -150.0}, run=run_folder)


REPORTS: dict[str, Any] = {"one": one, "two": two, "played": played, "hostile": hostile, "run": run}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a report once."""
    folder = tmp_path_factory.mktemp("reports")

    @functools.cache
    def write(kind: str) -> Path:
        page = folder / f"{kind}.html"
        ran = in_process("report", *REPORTS[kind](folder), "--out", page)
        assert ran.status == 0, ran.err
        return page

    return write


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of an agent's modules."""
    page = tmp_path_factory.mktemp("modules") / "agent.html"
    assert in_process("inspect", TF_SAMPLE, "--graph", page).status == 0
    return page


@pytest.mark.parametrize(("size", "scheme"), [("wide", "dark"), ("narrow", "light")])
def test_the_page_of_modules_can_be_used_by_all(
    size: str, scheme: str, browser: Browser, modules: Path
) -> None:
    assert violations(browser, modules, size, scheme) == []
    browser.run("document.getElementById('show-tree').click()")
    browser.run(OPENED)
    browser.run(axe_source())
    assert browser.driver.execute_async_script(CHECK) == []
    assert browser.complaints() == []


def test_the_page_of_modules_needs_no_mouse(browser: Browser, modules: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    def focused() -> str:
        return str(browser.run("return document.activeElement.firstElementChild?.firstChild.data ?? ''"))

    def visible() -> list[str]:
        shown = "each => each.checkVisibility()"
        names = f"[...document.querySelectorAll('#tree li .row')].filter({shown})"
        return list(browser.run(f"return {names}.map(each => each.firstElementChild.firstChild.data)"))

    browser.open(modules)
    assert visible() == []
    browser.press("/")
    assert browser.run("return document.activeElement.id") == "search"
    browser.press(*"critic/q1/l2")
    deadline = time.monotonic() + 60
    while not (count := browser.text("count")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert count.startswith("3 of ")
    assert visible() == ["policy", "critic", "q1", "l2"]
    browser.press(Keys.ESCAPE)
    assert len(visible()) > 20
    browser.run("document.querySelector('#tree summary').focus()")
    assert focused() == "policy"
    everything = len(visible())
    browser.press(Keys.ARROW_LEFT)
    assert visible() == ["save_counter", "policy"]
    browser.press(Keys.ARROW_UP)
    assert focused() == "save_counter"
    browser.press(Keys.END, Keys.ENTER)
    assert focused() == "policy"
    assert len(visible()) == everything
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert focused() == "actor"
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert focused() == "kernel"
    browser.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert focused() == "actor"
    assert browser.requests() <= {modules.as_uri()}


def test_a_report_can_be_used_by_all(browser: Browser, reports: Any) -> None:
    """The two cases that differ most; all others are checked at night."""
    assert violations(browser, reports("two"), "wide", "light") == []
    assert violations(browser, reports("one"), "narrow", "dark") == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", REPORTS)
def test_every_report_can_be_used_by_all(
    kind: str, size: str, scheme: str, browser: Browser, reports: Any
) -> None:
    assert violations(browser, reports(kind), size, scheme) == []


# --- Site ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


PAGES = ("index", "tutorial", "comparison", "cli", "howto/see_an_agent", "howto/live_objects", "gpu")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", PAGES)
def test_the_site_can_be_used_by_all(page: str, size: str, scheme: str, browser: Browser, site: Path) -> None:
    assert violations(browser, site / f"{page}.html", size, scheme) == []


@pytest.mark.slow
def test_the_site_is_searched_by_keyboard_and_without_a_network(browser: Browser, site: Path) -> None:
    """From the folder, as `make site` leaves it: the skip link, the search, a result; nothing is fetched."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser.driver, 20)
    browser.open(site / "index.html")
    browser.press(Keys.TAB)
    assert "md-skip" in browser.run("return document.activeElement.className")
    browser.press("/")
    wait.until(lambda _: browser.run("return document.activeElement.classList.contains('md-search__input')"))
    browser.press("pickle audit")
    results = ".md-search-result__item a"
    wait.until(lambda driver: driver.find_elements(By.CSS_SELECTOR, results))
    browser.press(Keys.ARROW_DOWN, Keys.ENTER)
    wait.until(lambda driver: "index.html" not in driver.current_url)
    assert "pickle" in browser.run("return document.body.innerText").lower()
    assert {url.partition(":")[0] for url in browser.requests()} <= {"file", "about", "data"}
    assert [complaint for complaint in browser.complaints() if "ERR_" in complaint] == []
