"""`report` in a real browser: opened, searched, walked by keyboard, compared, printed; nothing leaves it.

Screens are kept in build/screens, or where CKPTTOOL_SCREENS says.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.cli.drawings import write_drawing
from ckpttool.commands.inspect import summary
from ckpttool.pages.checkpoint_page import render_page
from ckpttool.pages.report import report
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE
from tests.report_pages import HOSTILE, write_gif, write_hostile, write_results

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytest.importorskip("selenium", reason="selenium drives the browser")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not here")

SCREENS = Path(os.environ.get("CKPTTOOL_SCREENS", ROOT / "build" / "screens"))
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--force-device-scale-factor=1",
)  # fmt: skip
MANY = 10_000


class Browser:
    """One browser for all tests here; a page is opened anew by each."""

    def __init__(self, folder: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        for option in (*OPTIONS, f"--user-data-dir={folder}"):
            options.add_argument(option)
        options.binary_location = str(CHROMIUM)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(executable_path=str(DRIVER)))

    def open(self, file: Path, width: int = 1280, height: int = 900) -> None:
        """Show a page; what was said of the one before is forgotten."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(file.as_uri())

    def run(self, script: str, *arguments: object) -> Any:
        """Return what a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def text(self, name: str) -> str:
        """Return the text of the element with an id."""
        text: str = self.run("return document.getElementById(arguments[0]).textContent", name)
        return text

    def number(self, selector: str) -> int:
        """Return how many elements a selector finds."""
        count: int = self.run("return document.querySelectorAll(arguments[0]).length", selector)
        return count

    def is_expanded(self) -> bool:
        """Return whether the row that has the focus is open."""
        return bool(self.run("return document.activeElement.ariaExpanded === 'true'"))

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.driver)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    def focused(self) -> str:
        """Return the path of the row with the focus."""
        return str(self.run("return rows[Number(document.activeElement.dataset.index)]?.path ?? ''"))

    def complaints(self) -> list[str]:
        """Return what the page has written on its console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> set[str]:
        """Return what pages of ours have asked for; the browser's own first page asks for a great deal."""
        messages = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return {params["request"]["url"] for params in sent if params["documentURL"].startswith("file:")}

    def screen(self, name: str) -> None:
        """Keep a picture of what is seen."""
        SCREENS.mkdir(parents=True, exist_ok=True)
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
        (SCREENS / f"report-{name}.png").write_bytes(base64.b64decode(data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    browser = Browser(folder / "profile")
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def sample(folder: Path) -> Path:
    file = folder / "sample.html"
    report(str(TF_SAMPLE), out=str(file))
    return file


@pytest.fixture(scope="module")
def compared(folder: Path) -> Path:
    file = folder / "compared.html"
    report(str(TORCH_SAMPLE.with_name("ckpt-2500.pt")), str(TORCH_SAMPLE), out=str(file))
    return file


@pytest.fixture(scope="module")
def hostile(folder: Path) -> Path:
    file = folder / "hostile.html"
    report(str(write_hostile(folder / "hostile.pkl")), out=str(file))
    return file


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A page of a run with findings, a damaged checkpoint, results and a film."""
    run_folder = folder / "run"
    run_folder.mkdir()
    for step in (2500, 5000, 7500, 10000):
        shutil.copy(TORCH_SAMPLE.with_name(f"ckpt-{step}.pt"), run_folder)
    data = bytearray((run_folder / "ckpt-5000.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (run_folder / "ckpt-5000.pt").write_bytes(data)
    results = write_results(folder, {2500: -900.0, 10000: -150.0}, run=run_folder)
    write_gif(run_folder / "ckpt-10000.gif")
    file = folder / "run.html"
    report(str(run_folder), out=str(file), evaluations=[str(results)])
    return file


@pytest.fixture(scope="module")
def many(folder: Path) -> Path:
    """A page of ten thousand tensors, each as rich as the sample's largest."""
    content = report(str(TORCH_SAMPLE), out=str(folder / "one.html")).contents
    rich = next(row for row in content.rows if row["path"] == "critic/q1/l2/weight")
    rows: list[dict[str, Any]] = []
    for at in range(MANY):
        if at % 16 == 0:
            position = {"level": 0, "name": f"block{at // 16}", "path": f"block{at // 16}"}
            kind = {"kind": "Dense relu"} if at == 16 else {}
            rows.append({**position, **kind, "module": True, "tensors": 16, "parameters": 1, "nbytes": 1})
        shown = {"name": f"w{at % 16}", "path": f"block{at // 16}/w{at % 16}"}
        rows.append({**rich, **shown, "level": 1, "id": at, "slots": []})
    file = folder / "many.html"
    file.write_bytes(render_page(replace(content, rows=rows)))
    return file


def test_it_opens_and_nothing_leaves_it(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    assert browser.driver.title.startswith("ckpt-15000 ")
    assert browser.text("count") == "78 entries"
    assert browser.complaints() == []
    assert browser.requests() == {sample.as_uri()}
    items = browser.run(
        "const told = ['level', 'setsize', 'posinset'].map((word) => `aria-${word}`);"
        "return [...document.querySelectorAll('[role=treeitem]')]"
        ".map((item) => [...told.map((name) => item.getAttribute(name)), item.textContent])"
    )
    assert len(items) > 20
    assert all(all(item) for item in items)
    assert browser.number("#tree [tabindex='0']") == 1
    browser.screen("sample-light")
    # What a page may not do is not left to its own script.
    tried = (
        "const done = arguments[0];"
        "fetch('https://example.invalid/').then(() => done('left'), () => done('held'))"
    )
    assert browser.driver.execute_async_script(tried) == "held"
    assert any("Security" in complaint for complaint in browser.complaints())
    assert not [url for url in browser.requests() if not url.startswith("file:")]


def test_search_finds_by_words(browser: Browser, sample: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(sample)
    browser.press("/")
    browser.press("q1 l1 KERNEL", Keys.ENTER)
    # Critic and target: each has one, the critic's with two moments.
    assert browser.text("count") == "2 of 78"
    assert browser.focused() == "policy/critic/q1/l1/kernel"
    assert browser.number("mark") > 2
    browser.screen("search")
    browser.press("/", "no such thing")
    browser.press(Keys.ENTER)
    assert not browser.number("#tree [role=treeitem]")
    browser.press("/", Keys.ESCAPE)
    assert browser.text("count") == "78 entries"
    assert browser.complaints() == []


def test_what_is_cut_off_is_told_by_the_pointer(browser: Browser, folder: Path) -> None:
    """Names, classes of modules and owners of slots are as long as the file has them."""
    content = report(str(TORCH_SAMPLE), out=str(folder / "cut.html"), force=True).contents
    rich = next(row for row in content.rows if row["path"] == "critic/q1/l2/weight")
    module, name = "m" * 90, "w" * 90
    counts = {"module": True, "tensors": 2, "parameters": 1, "nbytes": 1}
    tensor = {**rich, "level": 1, "slots": [], "id": 0, "name": name, "path": f"{module}/{name}"}
    slot = {**tensor, "id": 1, "name": "v", "path": f"{module}/v", "role": "slot", "slot": "v", "of": 0}
    rows = [{"level": 0, "name": module, "path": module, "kind": "k" * 90, **counts}, tensor, slot]
    file = folder / "cut.html"
    file.write_bytes(render_page(replace(content, rows=rows)))
    browser.open(file, 1280)
    browser.run("document.getElementById('unfold').click()")
    cut = browser.run(
        "return [...document.querySelectorAll('.row .text, .row .type, .row .tag')]"
        ".filter((each) => each.scrollWidth > each.clientWidth + 1)"
        ".map((each) => [each.className, each.title.length >= each.textContent.length])"
    )
    assert sorted(cut) == [["tag", True], ["text", True], ["text", True], ["type", True]]


def test_whole_numbers_have_all_their_digits(browser: Browser, folder: Path) -> None:
    """Counters are read as numbers of steps: rounded ones would be wrong."""
    numbers = {"small": 7, "steps": 54321, "more": 1_234_567, "most": 9_876_543_210, "below": -65504}
    np.savez(
        folder / "counters.npz", pair=np.array([12345, 99999]), **{k: np.array(v) for k, v in numbers.items()}
    )
    file = folder / "counters.html"
    report(str(folder / "counters.npz"), out=str(file))
    browser.open(file)
    browser.run("document.getElementById('unfold').click()")
    shown = browser.run(
        "return Object.fromEntries(rows.map((row, at) => [row.name, elementOf(at).querySelector('.spark')])"
        ".map(([name, cell]) => [name, [cell.textContent, getComputedStyle(cell).overflowX]]))"
    )
    minus = {f"= {number:,}".replace("-", "\u2212"): name for name, number in numbers.items()}
    assert {text: name for name, (text, _) in shown.items() if text} == minus
    assert {shown[name][1] for name in numbers} == {"visible"}
    assert browser.run(
        "return rows.filter((row) => row.name === 'pair').map(numbersOf)[0].textContent"
    ).startswith("Numbersmin12,345max99,999mean56,172")


def test_the_tree_is_walked_by_keyboard(browser: Browser, sample: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(sample)
    browser.press(Keys.TAB, Keys.ENTER)  # the link that skips to the tensors
    browser.run("document.getElementById('fold').click(); focus(visible[0])")
    browser.press(Keys.END)
    assert browser.focused() == "policy"
    browser.press(Keys.RIGHT, Keys.RIGHT)
    assert browser.focused() == "policy/total_it"
    browser.press(Keys.DOWN, Keys.RIGHT, Keys.DOWN, Keys.RIGHT, Keys.DOWN, Keys.ENTER)
    assert browser.focused() == "policy/actor/l1/kernel"
    assert browser.is_expanded()
    panel = browser.run("return document.activeElement.nextElementSibling.textContent")
    assert "Optimizer state" in panel
    assert "policy/actor/l1/_kernel/.ATTRIBUTES/VARIABLE_VALUE" in panel
    colours = browser.run(
        "const c = document.activeElement.parentElement.querySelector('.heat canvas');"
        "return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert colours > 20
    browser.press(Keys.TAB, Keys.ENTER)  # the first slot's name leads to it
    assert browser.focused().startswith("policy/actor_optimizer/")
    browser.press(Keys.LEFT, Keys.LEFT)
    assert browser.is_expanded()
    assert browser.complaints() == []


def test_dark_and_light(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    browser.run("reveal(rows.findIndex((row) => row.path === 'policy/actor/l2/kernel'))")
    browser.run("scrollBy(0, -200)")
    look = (
        "const c = document.querySelector('.heat canvas').getContext('2d').getImageData(0, 0, 20, 20).data;"
        "const level = (rgb) => rgb[0] + rgb[1] + rgb[2];"
        "let sum = 0; for (let at = 0; at < c.length; at += 4) sum += level(c.slice(at, at + 3));"
        "const ground = getComputedStyle(root).backgroundColor.match(/\\d+/g).map(Number);"
        "return [level(ground), sum / (c.length / 4), theme.getAttribute('aria-pressed')]"
    )
    page_before, map_before, pressed_before = browser.run(look)
    browser.run("document.getElementById('theme').click()")
    page_after, map_after, pressed_after = browser.run(look)
    browser.screen("sample-dark")
    assert page_before > 600 > 150 > page_after
    assert map_before > map_after + 100
    assert (pressed_before, pressed_after) == ("false", "true")


def test_a_difference_leads_to_both_sides(browser: Browser, compared: Path) -> None:
    browser.open(compared, height=1400)
    browser.screen("compared")
    browser.run("document.querySelector('a[data-change]').click()")
    assert browser.focused() == "critic/q2/l2/weight"
    titles = browser.run(
        "return [...document.activeElement.parentElement.querySelectorAll('.heat h3')]"
        ".map((title) => title.textContent)"
    )
    assert titles == ["A", "B", "B \u2212 A"]
    browser.screen("compared-open")
    browser.run(
        "const pick = document.getElementById('filter'); pick.value = 'changed';"
        "pick.dispatchEvent(new Event('change'))"
    )
    assert browser.text("count") == "91 of 133"
    assert browser.complaints() == []


def test_hostile_names_stay_names(browser: Browser, hostile: Path) -> None:
    browser.open(hostile)
    browser.run("document.getElementById('unfold').click()")
    browser.run("rows.forEach((row, index) => { if (row.id !== undefined) opened.add(index) }); show()")
    text = browser.text("tree")
    for name in HOSTILE.values():
        assert name.partition("/")[0] in text
    browser.screen("hostile")
    assert browser.driver.title.startswith("hostile.pkl ")
    assert browser.number("img, b b, i b, script") == 3
    assert browser.complaints() == []
    assert browser.requests() == {hostile.as_uri()}


def time_to_open(browser: Browser, file: Path) -> float:
    """Return the milliseconds until the page's script has finished, the best of five times."""
    times_ms = []
    for _ in range(5):
        browser.open(file)
        times_ms.append(browser.run("return performance.getEntriesByName('ready')[0].startTime"))
    return min(times_ms)


def test_ten_thousand_tensors_open_in_half_a_second(browser: Browser, many: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    assert time_to_open(browser, many) < 500
    assert browser.text("count") == "10,000 entries"
    # A module is told by its class where the file names one.
    types = browser.run(
        "return [...document.querySelectorAll('.module .type')].map((each) => each.textContent)"
    )
    assert types[:3] == ["16 tensors", "Dense relu", "16 tensors"]
    drawn = "return document.querySelectorAll('[role=treeitem]').length"
    first = browser.run("document.getElementById('unfold').click();" + drawn)
    assert first <= 500
    browser.run("document.getElementById('more').scrollIntoView()")
    WebDriverWait(browser.driver, 10).until(lambda _: browser.run(drawn) > first)
    searched = (
        "const begin = performance.now(); field.value = 'block62 w7'; search();"
        "document.body.offsetHeight; return [performance.now() - begin, counted.textContent]"
    )
    best = min(browser.run(searched) for _ in range(3))
    assert best[0] < 500
    assert best[1] == "6 of 10,000"
    browser.screen("many")


def test_a_phone_scrolls_one_way(
    browser: Browser, sample: Path, compared: Path, hostile: Path, run: Path
) -> None:
    for file in (sample, compared, hostile, run):
        browser.open(file, width=360, height=740)
        browser.run(
            "document.getElementById('unfold')?.click();"
            "document.querySelectorAll('details').forEach((each) => each.open = true);"
        )
        browser.run(
            "if (typeof rows === 'undefined') return;"
            "rows.forEach((row, index) => { if (row.picture && opened.size < 4) opened.add(index) }); show()"
        )
        width = browser.run("return document.documentElement.scrollWidth")
        assert width <= 360, file.name
        browser.screen(f"phone-{file.stem}")


def test_a_run_is_shown_and_used_by_keyboard(browser: Browser, run: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(run)
    assert browser.driver.title.startswith("run ")
    assert browser.number(".cells path") > 100
    # A strip has the tooltip of the cell below the pointer.
    title = browser.run(
        "const strip = document.querySelector('.drift .cells'), box = strip.getBoundingClientRect();"
        "strip.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, clientX: box.right - 2 }));"
        "return strip.querySelector('title').textContent"
    )
    assert title.startswith("9,000: norm ")  # the last checkpoint's counter
    # The film plays, and can be stopped from the keyboard.
    assert browser.run("return document.getElementById('film').complete && film.naturalWidth > 0")
    for _ in range(20):
        browser.press(Keys.TAB)
        if browser.run("return document.activeElement.id") == "pause":
            break
    browser.press(Keys.ENTER)
    assert browser.run("return film.hidden && document.querySelector('.film canvas').width > 0")
    browser.press(Keys.ENTER)
    assert not browser.run("return film.hidden")
    # The numbers of all cells are a table, opened from the keyboard.
    for _ in range(20):
        browser.press(Keys.TAB)
        if browser.run("return document.activeElement.textContent") == "All numbers":
            break
    browser.press(Keys.ENTER)
    assert browser.run("return document.activeElement.parentElement.open")
    browser.screen("run-light")
    light = browser.run("return getComputedStyle(document.querySelector('rect.u9')).fill")
    browser.run("document.getElementById('theme').click()")
    assert browser.run("return getComputedStyle(document.querySelector('rect.u9')).fill") != light
    browser.screen("run-dark")
    assert browser.complaints() == []
    assert {url for url in browser.requests() if not url.startswith("data:")} == {run.as_uri()}


@pytest.fixture(scope="module")
def long_run(folder: Path) -> Path:
    """A page of a run of two hundred checkpoints, each played for a hundred episodes."""
    run_folder, random = folder / "long", np.random.default_rng(0)
    run_folder.mkdir()
    names = [f"block{n}/layer{at}/{w}" for n in range(6) for at in range(6) for w in ("kernel", "bias")]
    evaluations = []
    for step in range(1, 201):
        arrays = {name: random.standard_normal((3, 3)).astype(np.float32) * step for name in names}
        arrays["block0/layer0/bias"][0] = np.nan if step % 7 == 0 else 1
        np.savez(run_folder / f"ckpt-{step}.npz", **arrays)
        returns = (step * 3 % 200 + random.standard_normal(100)).tolist()
        summary = dict.fromkeys(("mean", "median", "iqm"), step * 3 % 200)
        verdict = {"sentence": "a sentence of many words about this checkpoint " * 3}
        file = {"checkpoint": str(run_folder / f"ckpt-{step}.npz"), "env": "E-v0", "judgement": verdict}
        evaluations.append({**file, "returns": returns, "std": 1.0, **summary})
    (folder / "long.json").write_text(json.dumps({"evaluations": evaluations, "notes": []}))
    report(str(run_folder), out=str(folder / "long-run.html"), evaluations=[str(folder / "long.json")])
    return folder / "long-run.html"


def test_the_page_of_a_long_run_ends(browser: Browser, long_run: Path) -> None:
    browser.open(long_run)
    browser.run("document.getElementById('networks')?.scrollIntoView()")
    assert browser.run("return document.documentElement.scrollHeight") < 4000
    assert browser.number("*") < 5000
    rows = "return [...document.querySelectorAll('#returns tbody tr')].filter((row) => !row.hidden)"
    names = f"{rows}.map((row) => row.cells[0].querySelector('bdi').textContent)"
    # The best first: step 133 has 199 as its mean, step 66 has 198.
    assert browser.run(names)[:2] == ["ckpt-133.npz", "ckpt-66.npz"]
    assert len(browser.run(names)) == 10
    assert browser.run("return document.querySelector('.best-row bdi').textContent") == "ckpt-133.npz"
    browser.screen("long-run")
    # By keyboard: all rows, and sorted by a column up and down.
    from selenium.webdriver.common.keys import Keys

    browser.run("document.querySelector('#returns .all').focus()")
    browser.press(Keys.ENTER)
    assert len(browser.run(names)) == 200
    browser.run("document.querySelector('#returns .sort').focus()")
    browser.press(Keys.ENTER)
    assert browser.run(names)[:3] == ["ckpt-1.npz", "ckpt-2.npz", "ckpt-3.npz"]
    browser.press(Keys.ENTER)
    assert browser.run(names)[:2] == ["ckpt-200.npz", "ckpt-199.npz"]
    assert browser.run("return document.querySelector('#returns th').ariaSort") == "descending"
    means = f"{rows}.map((row) => Number(row.querySelector('.strong').textContent))"
    browser.run(
        "[...document.querySelectorAll('#returns .sort')].find((e) => e.textContent === 'Mean').click()"
    )
    assert browser.run(means) == sorted(browser.run(means), reverse=True)
    browser.run("document.querySelector('#returns .all').click()")
    assert len(browser.run(names)) == 10
    # Curves are as wide as the tables.
    wide = "return document.querySelector(arguments[0]).getBoundingClientRect().width"
    assert browser.run(wide, ".chart") == browser.run(wide, "#returns table")
    assert browser.run("return document.documentElement.scrollWidth") <= 1280
    assert browser.complaints() == []


@pytest.fixture(scope="module")
def long_graphs(folder: Path) -> dict[str, Path]:
    """ONNX files of two hundred operations: each receives the two before, or blocks of four with a sum."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    first = helper.make_node("Relu", ["x"], ["v0"])
    steps = {"long": lambda at: max(at - 1, 0), "residual": lambda at: at - 3 if at % 4 == 3 else None}
    ends = [helper.make_tensor_value_info(name, kind, [1, 3]) for name in ("x", "v200")]
    files = {}
    for name, other in steps.items():
        nodes = [first]
        for at in range(200):
            inputs = [f"v{at}", *([] if other(at) is None else [f"v{other(at)}"])]
            nodes.append(helper.make_node("Relu" if len(inputs) == 1 else "Add", inputs, [f"v{at + 1}"]))
        files[name] = folder / f"{name}.onnx"
        onnx.save(helper.make_model(helper.make_graph(nodes, name, ends[:1], ends[1:])), str(files[name]))
    return files


# Points of edges inside of boxes, each with the edge; the ends of an edge are on the borders of boxes.
CROSSED = """
const boxes = [...document.querySelectorAll('.box:not(.title) rect')].map((each) => each.getBBox());
return [...document.querySelectorAll('.flow')].flatMap((edge, number) => {
  const length = edge.getTotalLength(), points = [];
  for (let at = 2; at < length - 2; at += 2) points.push(edge.getPointAtLength(at));
  return points.filter(({ x, y }) => boxes.some((box) => x > box.x + 2 && x < box.x + box.width - 2
    && y > box.y + 2 && y < box.y + box.height - 2)).map(({ x, y }) => [number, x, y]);
});
"""
INSIDE = """(box) => {
  const area = document.querySelector('.drawing').getBoundingClientRect(), at = box.getBoundingClientRect();
  return at.left >= area.left && at.right <= area.right && at.top >= area.top && at.bottom <= area.bottom;
}"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("source", ["agent", "long", "residual"])
def test_a_graph_page_opens_on_the_computation(
    browser: Browser, folder: Path, long_graphs: dict[str, Path], source: str, width: int
) -> None:
    from selenium.webdriver.common.keys import Keys

    file = folder / f"{source}-graph.html"
    write_drawing(summary(str(long_graphs.get(source, TF_SAMPLE))), str(file), force=True)
    browser.open(file, width)
    assert browser.complaints() == []
    assert browser.run("return document.getElementById('tree').hidden")
    # Letters of 12 pixels are drawn with 10 at least, and the first box is in sight.
    scale, first, area = browser.run(
        "const svg = document.querySelector('.drawing svg'), at = (e) => e.getBoundingClientRect().toJSON();"
        "return [svg.getScreenCTM().a, at(document.querySelector('.box')), at(svg.parentElement)]"
    )
    assert scale >= 0.83
    assert area["left"] <= first["left"] < first["right"] <= area["right"]
    assert area["top"] <= first["top"] < first["bottom"] <= area["bottom"]
    boxes = browser.run(
        "return [...document.querySelectorAll('.box rect')].map((each) => each.getBBox())"
        ".map((box) => [box.x, box.y, box.x + box.width, box.y + box.height])"
    )
    assert len(boxes) == (19 if source == "agent" else 202)
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 1 or b[3] <= a[1] + 1
    # No edge passes through a box, except where it begins and ends.
    assert browser.run(CROSSED) == []
    if width > 1000 and source != "long":
        # The first view shows much of the whole: columns side by side.
        visible = browser.run("return [...document.querySelectorAll('.box')].filter(" + INSIDE + ").length")
        assert visible >= 19
    # By pointer and keyboard: a panel for each box, and along the edges.
    browser.run("document.querySelectorAll('.box')[1].dispatchEvent(new Event('click'))")
    panel = "return document.querySelector('.box-panel').innerText"
    opened = browser.run(panel)
    assert "shape" in opened or "output" in opened
    browser.press(Keys.ARROW_DOWN)
    assert browser.run("return document.activeElement.classList.contains('chosen')")
    assert browser.run(panel) != opened
    browser.screen(f"graph-{source}-{width}")
    browser.run("document.getElementById('show-tree').click()")
    assert browser.run("return document.getElementById('computation').hidden")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []


def test_pages_are_short_on_a_phone(browser: Browser, sample: Path, compared: Path, run: Path) -> None:
    for page in (sample, compared, run):
        browser.open(page, 390, 844)
        for top in range(0, 4000, 400):  # what is drawn when it comes near the screen
            browser.run("window.scrollTo(0, arguments[0])", top)
            browser.driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
        assert browser.run("return document.documentElement.scrollHeight") < 4000, page.name
        assert browser.run("return document.documentElement.scrollWidth") <= 390, page.name


@pytest.mark.slow
def test_pages_of_ten_thousand_tensors_are_small_and_fast(browser: Browser, folder: Path) -> None:
    random, location = np.random.default_rng(0), folder / "large"
    location.mkdir()
    names = [f"m/block_{n // 50}/layer_{n % 50}/{w}" for n in range(MANY // 2) for w in ("kernel", "bias")]
    for step in (1000, 2000, 3000):
        arrays = {name: random.standard_normal((16, 16)[: 1 + (name[-1] == "l")]) for name in names}
        np.savez(
            location / f"ckpt-{step}.npz", **{name: item.astype(np.float32) for name, item in arrays.items()}
        )
    first, last = (str(location / f"ckpt-{step}.npz") for step in (1000, 3000))
    files = [
        report(first, out=str(folder / "large-1.html")).file,
        report(first, last, out=str(folder / "large-2.html")).file,
        report(str(location), out=str(folder / "large-run.html")).file,
    ]
    for file in map(Path, files):
        assert file.stat().st_size <= 5_000_000, file.name
        assert time_to_open(browser, file) < 500, file.name
        assert browser.complaints() == []


def test_on_paper_the_tree_is_whole_and_light(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    browser.run(
        "addEventListener('beforeprint', () => {"
        "window.onPaper = document.querySelectorAll('[role=treeitem]').length });"
        "document.getElementById('fold').click()"
    )
    paper = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert base64.b64decode(paper).startswith(b"%PDF")
    printed, rows = browser.run("return [window.onPaper, rows.length]")
    assert printed == rows
    assert browser.number("[role=treeitem]") == 2
    # Paper is as narrow as a tablet, and has the table of a wide window: every number below its title.
    browser.open(sample, 703, 1000)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    columns = browser.run(
        "const right = (row) => [...row.querySelectorAll('.size, .nbytes, .mean, .std')]"
        ".filter((cell) => cell.getClientRects().length).map((cell) => cell.getBoundingClientRect().right);"
        "document.getElementById('unfold').click();"
        "const rows = [...document.querySelectorAll('#tree .tensor > .row')];"
        "return [right(document.querySelector('.heads')), ...rows.map(right)]"
    )
    assert len(columns[0]) == 4
    assert len(columns) > 10
    assert all(column == pytest.approx(columns[0], abs=1) for column in columns[1:])
    browser.screen("print")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
