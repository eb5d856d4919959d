"""`browse`: what is shown, told without a widget; the keys, in Textual's pilot; a real terminal, tmux's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from ckpttool.browser import details, lines, numbers, overview
from ckpttool.browser.comparison import ComparisonState
from ckpttool.browser.listing import AliasRow, BrowserListing, list_for_browser
from ckpttool.browser.numbers import TensorNumbers, read_numbers
from ckpttool.browser.outline import Outline
from ckpttool.browser.reader import ReaderThread
from ckpttool.browser.search import SearchIndex, next_hit
from ckpttool.browser.value_table import (
    CellDifference,
    TensorCells,
    ValueGrid,
    choose_cell_format,
    format_exactly,
)
from ckpttool.core import Leaf, UsageError
from ckpttool.core.source import LARGE
from ckpttool.listing.modules import ModuleSummary
from ckpttool.listing.rows import TensorRow
from ckpttool.verification.moments import Moments
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden

OLDER = TF_SAMPLE.with_name("ckpt-7500")
HOSTILE = [
    "[bold red]x[/bold red]",
    "[@click=app.bell]click[/]",
    "[/]",
    "a\x1b[2Jb\x07c\x1b]0;owned\x07",
    "rtl\u202eevil\u2066",
    "z" * 10_000,
    "日本語テンソル名前がとても長い重み" * 3,
    "zalgo" + "\u0301" * 300,
    "new\nline\ttab",
    "null\x00byte",
    "a//b",
    "",
]


def safetensors(file: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write the arrays as float32; the names may be anything."""
    arrays = {name: array.astype("<f4") for name, array in arrays.items()}
    head: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        head[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header = json.dumps(head).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return str(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browse")


@pytest.fixture(scope="module")
def sample() -> BrowserListing:
    return list_for_browser(str(TF_SAMPLE))


@pytest.fixture(scope="module")
def hostile(folder: Path) -> str:
    return safetensors(folder / "hostile.safetensors", {name: np.eye(2) for name in HOSTILE})


@pytest.fixture(scope="module")
def many(folder: Path) -> str:
    names = [f"model.layers.{n // 10}.block{n % 10}.weight" for n in range(10_000)]
    return safetensors(folder / "many.safetensors", {name: np.zeros(1) for name in names})


@pytest.fixture(scope="module")
def tied(folder: Path) -> str:
    """A checkpoint with a second name, a NaN, a text, four axes, no elements and a large tensor."""
    torch = pytest.importorskip("torch")
    weight = torch.arange(12.0).reshape(4, 3)
    content = {
        "actor": {"l1": {"weight": weight}},
        "best": {"weight": weight},
        "note": "[bold]hi[/] \x1b[31m " + "y" * 3000,
        "bad": torch.tensor([1.0, float("nan"), float("inf")]),
        "deep": torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5),
        "none": torch.zeros(0, 3),
        "long": torch.arange(23),
        "large": torch.arange(1_200_000.0).reshape(1200, 1000),
        "bits": torch.tensor([True, False]),
        "half": torch.full((2, 2), 0.5).bfloat16(),
        "wave": torch.tensor([1 + 2j]),
    }
    torch.save(content, folder / "tied.pt")
    return str(folder / "tied.pt")


@pytest.fixture(scope="module")
def damaged(folder: Path) -> str:
    for file in TF_SAMPLE.parent.glob(f"{TF_SAMPLE.name}.[id]*"):
        shutil.copy(file, folder)
    data = folder / f"{TF_SAMPLE.name}.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[0:200_000:300] = bytes(byte ^ 1 for byte in content[0:200_000:300])
    data.write_bytes(content)
    return str(folder / TF_SAMPLE.name)


# --- What is shown, without a widget -----------------------------------------------------------------


def names(outline: Outline) -> list[str]:
    return ["  " * line.level + line.name for line in outline.lines]


def test_the_tree_unfolds_level_by_level_as_far_as_there_is_room(sample: BrowserListing) -> None:
    assert names(Outline(sample.root)) == ["save_counter", "policy"]
    first = Outline(sample.root, 12)
    assert names(first)[:5] == ["save_counter", "policy", "  total_it", "  actor", "  actor_target"]
    assert len(first.lines) <= 12
    assert len(Outline(sample.root, 1000).lines) > 78


def test_lines_fold_unfold_and_lead_up(sample: BrowserListing) -> None:
    outline = Outline(sample.root, 12)
    before = names(outline)
    at = outline.reveal("policy/actor/l1/kernel")
    assert at is not None
    assert names(outline)[at - 2 : at + 2] == ["  actor", "    l1", "      kernel", "      bias"]
    assert outline.lines[outline.above(at)].path == "policy/actor/l1"
    outline.close(outline.above(outline.above(at)))
    assert names(outline) == before
    policy = 1
    outline.open_all(policy)
    everything = {line.path for line in outline.lines}
    assert set(sample.rows) <= everything
    outline.order("size")
    sizes = [
        line.entry.nbytes
        for line in outline.lines
        if line.level == 1 and isinstance(line.entry, ModuleSummary)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert outline.reveal("policy/nothing") is None


def test_a_module_that_only_holds_a_module_is_no_line_of_its_own(many: str) -> None:
    shown = list_for_browser(many)
    outline = Outline(shown.root, 20)
    assert names(outline) == ["model/layers"]
    at = outline.reveal("model/layers/777/block3/weight")
    assert at is not None
    # Only what leads there was unfolded.
    assert len(outline.lines) < 1100


@pytest.mark.parametrize(
    ("query", "first", "number"),
    [
        ("ACTOR", "policy/actor", 3),
        ("l1/ker", "policy/actor/l1/kernel", 6),
        ("*/l3/bias", "policy/actor/l3/bias", 6),
        ("_trainable_variables", "policy/critic/q1/l1/kernel", 12),
        ("no such thing", None, 0),
        ("", None, 0),
    ],
)
def test_search_by_part_pattern_and_native_key(
    sample: BrowserListing, query: str, first: str, number: int
) -> None:
    index = SearchIndex(sample.root, "file")
    hits = index.find(query)
    assert len(hits) == number
    assert (index.path(hits[0]) if hits else None) == first


def test_hits_go_round(sample: BrowserListing) -> None:
    assert [next_hit([2, 5, 9], at) for at in (-1, 2, 9)] == [2, 5, 2]
    assert [next_hit([2, 5, 9], at, backwards=True) for at in (2, 5)] == [9, 2]
    assert next_hit([], 3) is None


def test_names_and_slots_that_belong_together(sample: BrowserListing, tied: str) -> None:
    ring = sample.relatives("policy/actor/l1/kernel")
    assert ring[0] == "policy/actor/l1/kernel"
    assert len(ring) == 3
    assert all(sample.relatives(slot) == ring for slot in ring)
    assert sample.relatives("policy/total_it") == ("policy/total_it",)
    shown = list_for_browser(tied)
    assert shown.ways("best/weight") == shown.ways("actor/l1/weight") == ("actor/l1/weight", "best/weight")
    assert isinstance(shown.rows["best/weight"], AliasRow)
    # A link adds nothing to the sums.
    assert shown.root.nbytes == shown.summaries[0].totals.nbytes


def read(row: TensorRow) -> TensorNumbers | None:
    readings: list[TensorNumbers | None] = []
    for _ in read_numbers(row, readings.append):
        pass
    return readings[-1]


def details_text(
    shown: BrowserListing, name: str, comparison: ComparisonState | None = None, cells: int = 60
) -> str:
    row = shown.rows[name]
    numbers = (read(row),) if isinstance(row, TensorRow) else None
    return lines.to_plain_text(details.detail_lines(shown, comparison, row, numbers, cells))


def test_the_details_of_a_tensor(sample: BrowserListing) -> None:
    text = details_text(sample, "policy/actor/l1/kernel")
    array = sample.rows["policy/actor/l1/kernel"].leaf.array()  # type: ignore[union-attr]
    for part in (
        "float32[3, 64]",
        "192 elements",
        "768 B",
        "parameter, trained",
        "actor/kernel",
        "slot m",
        "also",
    ):
        assert part in text, part
    for value in (array.min(), array.mean(), array.std(), np.linalg.norm(array)):
        assert f"{float(value):.5g}" in text
    slot = details_text(sample, sample.relatives("policy/actor/l1/kernel")[1])
    assert "m of" in slot
    assert "policy/actor/l1/kernel" in slot
    module = next(child for child in sample.root.below["policy"].below.values() if child.name == "critic")
    assert "9,090 parameters" in lines.to_plain_text(details.detail_lines(sample, None, module, None, 40))


def test_large_tensors_are_read_in_pieces_and_give_the_same(tied: str) -> None:
    row = list_for_browser(tied).rows["large"]
    assert isinstance(row, TensorRow)
    assert row.leaf.nbytes > LARGE
    readings: list[TensorNumbers | None] = []
    assert sum(1 for _ in read_numbers(row, readings.append)) > 4
    (numbers,) = readings
    assert numbers is not None
    assert numbers.moments is not None
    array = row.leaf.array().astype(np.float64)
    assert numbers.moments.mean == pytest.approx(array.mean())
    assert numbers.moments.std == pytest.approx(array.std())
    assert numbers.histogram == (75_000,) * 16


def test_warning_signs_and_what_cannot_be_counted(tied: str, golden: Golden) -> None:
    shown = list_for_browser(tied)
    golden(details_text(shown, "bad"))
    golden(details_text(shown, "none"))
    assert "\x1b" not in details_text(shown, "note")
    assert details_text(shown, "best/weight").endswith("actor/l1/weight")


def test_an_error_of_reading_is_one_sentence(damaged: str, folder: Path, golden: Golden) -> None:
    text = details_text(list_for_browser(damaged), "policy/actor/l2/kernel", cells=400)
    golden(text.replace(str(folder), "FOLDER"))


def test_two_checkpoints_are_marked() -> None:
    shown = list_for_browser(str(TF_SAMPLE), str(OLDER))
    assert shown.alignment is not None
    comparison = ComparisonState(shown, shown.alignment)
    assert not comparison.finished
    assert "compared" in comparison.state()
    for _ in comparison.steps(comparison.note):
        pass
    assert comparison.finished
    assert comparison.state() == "76 differ"
    assert comparison.marks["policy/actor/l1/kernel"] == "changed"
    assert comparison.below["policy/actor/l1"] == 2
    text = details_text(shown, "policy/actor/l1/kernel", comparison)
    assert "of 192 differ" in text
    assert "cosine" in text
    equal = "policy/actor_optimizer/_learning_rate"
    assert equal in comparison.known
    assert equal not in comparison.marks
    assert "identical" in details_text(shown, equal, comparison)


def test_a_conversion_is_compared_by_meaning_and_forms_are_seen_at_once(folder: Path, golden: Golden) -> None:
    shown = list_for_browser(str(TF_SAMPLE), str(TORCH_SAMPLE))
    assert shown.alignment is not None
    assert shown.alignment.by == "agent"
    assert shown.relatives("actor/0/kernel")[1:] == (
        "actor_optimizer/m/0/kernel",
        "actor_optimizer/v/0/kernel",
    )
    left = {"same": np.eye(2), "shape": np.eye(2), "left": np.eye(2), "values": np.eye(2)}
    right = {"same": np.eye(2), "shape": np.eye(3), "right": np.eye(2), "values": np.zeros((2, 2))}
    files = [
        safetensors(folder / f"{word}.safetensors", arrays) for word, arrays in (("a", left), ("b", right))
    ]
    pair = list_for_browser(*files)
    assert pair.alignment is not None
    comparison = ComparisonState(pair, pair.alignment)
    assert comparison.marks == {"shape": "changed", "left": "left", "right": "right"}
    for name in ("shape", "right", "same"):
        golden(details_text(pair, name, comparison))
    for _ in comparison.steps(comparison.note):
        pass
    assert comparison.marks["values"] == "changed"
    golden(overview.title_line(pair, comparison, 80)[1].text)


def test_a_member_of_an_archive_is_named_as_people_write_it(folder: Path) -> None:
    file = safetensors(folder / "inner.safetensors", {"a": np.eye(2)})
    with zipfile.ZipFile(folder / "old.zip", "w") as archive:
        archive.write(file, "inner.safetensors")
    text = lines.to_plain_text(
        overview.about_lines(list_for_browser(f"zip://inner.safetensors::{folder}/old.zip"), 300)
    )
    assert text.count(f"zip://inner.safetensors::{folder}/old.zip") == 2
    assert "old.zip::" not in text


def test_the_page_about_the_checkpoint(sample: BrowserListing, golden: Golden) -> None:
    text = lines.to_plain_text(overview.about_lines(sample, 78))
    for part in ("tensor_bundle (crc32c checksums)", "td3_tf", "2 files", "27,142"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 78
    two = lines.to_plain_text(overview.key_help(78, two=True))
    golden(two)
    assert "difference" not in lines.to_plain_text(overview.key_help(78, two=False))


# --- Tables of values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 5)])
def test_every_cell_has_its_index(shape: tuple[int, ...]) -> None:
    array = np.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    grid = ValueGrid(shape, 3)
    texts = set()
    for table in range(grid.slices):
        for row in range(grid.rows):
            for column in range(grid.columns):
                index = grid.index(table, row, column)
                if index is not None:
                    assert grid.cell(index) == (table, row, column)
                    texts.add(array[index].item())
    assert texts == set(array.reshape(-1).tolist())
    with pytest.raises(ValueError, match="index"):
        grid.cell((99,) * max(1, len(shape)))


def test_cells_are_those_of_the_array_whether_read_whole_or_in_part(tied: str) -> None:
    rows = list_for_browser(tied).rows
    for name, table in (("deep", 4), ("large", 0), ("long", 0), ("half", 0)):
        leaf = rows[name].leaf
        assert isinstance(leaf, Leaf)
        grid = ValueGrid(leaf.shape, 5)
        block = TensorCells(leaf).read(
            grid, table, range(1, min(3, grid.rows)), range(1, min(4, grid.columns))
        )
        for row in range(block.shape[0]):
            for column in range(block.shape[1]):
                index = grid.index(table, row + 1, column + 1)
                assert block[row, column] == leaf.array()[index]
    large = rows["large"].leaf
    assert isinstance(large, Leaf)
    values = TensorCells(large)
    values.read(ValueGrid(large.shape, 5), 0, range(2), range(2))
    assert values._whole is None
    lying = CellDifference(values, values).read(ValueGrid(large.shape, 5), 0, range(2), range(2))
    assert not lying.any()


@pytest.mark.parametrize("largest", [3e-9, 0.0023, 0.5, 12.3, 12_345.6, 1e30])
def test_numbers_take_one_width_and_no_small_one_looks_like_zero(largest: float) -> None:
    as_text = choose_cell_format(np.dtype("f4"), Moments(size=2, low=-largest, high=largest))
    texts = [as_text(value) for value in (largest, -largest, largest * 1e-9, 0.0, float("nan"))]
    assert all(len(text) <= as_text.width for text in texts)
    assert float(texts[2]) > 0
    assert texts[3:] == ["0", "nan"]
    assert float(texts[0]) == pytest.approx(largest, rel=1e-4)


def test_all_of_a_value_is_told_exactly() -> None:
    assert format_exactly(np.float32(0.1)) == "0.1"
    assert format_exactly(np.int64(-3)) == "-3"
    assert format_exactly(b"[b]\x1b\xff") == "[b]\\x1b\\xff"


def test_a_histogram_shows_what_there_is_at_all() -> None:
    counts = (1, 0, *[10_000] * 13, 1)
    counted = TensorNumbers(Moments(130_002, -1.0, 1.0), counts)
    columns, bars = numbers.column_lines(counted, 40), lines.to_plain_text(numbers.bar_lines(counted, 60))
    assert lines.to_plain_text(columns).splitlines()[3].startswith("▁▁  ██")
    assert bars.splitlines()[0].count("▏") == 1
    assert "10,000" in bars
    assert max(map(len, bars.splitlines())) <= 60


def test_lines_are_fitted_by_cells_and_inert() -> None:
    for name in HOSTILE:
        for cells in (8, 20, 60):
            assert cell_len(lines.pad_text(name, cells)) == cells
            assert all(cell_len(line) <= cells for line in lines.wrap_text(name, cells))
            assert lines.pad_text(name, cells).isprintable()


def test_what_is_looked_at_is_read_before_what_is_compared() -> None:
    done: list[str] = []
    started, requested = threading.Event(), threading.Event()

    def job(name: str, number: int) -> Iterator[None]:
        for _ in range(number):
            done.append(name)
            started.set()
            requested.wait(10)
            yield

    failed: list[Exception] = []
    reader = ReaderThread(failed.append)
    reader.request("comparison", job("compared", 20))
    assert started.wait(10)
    reader.request("numbers", job("given up", 20))
    reader.request("numbers", job("looked at", 3))
    requested.set()
    while not reader.idle():
        time.sleep(0.001)
    assert done.index("looked at") < len(done) - 10
    assert done.count("compared") == 20
    assert done.count("given up") <= 1
    reader.request("values", (item for item in [1 / 0][:0]) if done == [] else _fails())
    while not reader.idle():
        time.sleep(0.001)
    assert isinstance(failed[0], ZeroDivisionError)


def _fails() -> Iterator[None]:
    yield
    raise ZeroDivisionError


# --- The command ----------------------------------------------------------------------------------------


def test_without_a_terminal_the_hint_is_inspect(golden: Golden) -> None:
    ran = in_process("browse", TF_SAMPLE)
    refused(ran)
    golden(ran)


def test_there_is_no_document() -> None:
    ran = in_process("browse", TF_SAMPLE, "--json")
    assert ran.status == 2
    assert ran.json()["error"]["hint"] == f"ckpttool inspect {TF_SAMPLE} --json"


def test_without_textual_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    from ckpttool import browser

    result = importlib.util.find_spec
    monkeypatch.setattr(browser, "require_terminal", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "textual" else result(name))
    ran = in_process("browse", TF_SAMPLE)
    refused(ran)
    golden(ran)


def test_a_folder_of_which_no_checkpoint_is_the_latest_is_refused(tmp_path: Path, golden: Golden) -> None:
    for name in ("a.pt", "b.pt"):
        shutil.copy(TORCH_SAMPLE, tmp_path / name)
    with pytest.raises(UsageError) as caught:
        list_for_browser(str(tmp_path))
    golden(caught.value)


# --- The keys, in Textual's pilot -------------------------------------------------------------------------

Talk = Callable[["Played"], Awaitable[None]]


class Played:
    """A browser without a terminal: keys go in, the lines of its screen come out."""

    def __init__(self, app: Any, pilot: Any) -> None:
        self.app, self.pilot = app, pilot

    async def settled(self) -> None:
        """Wait until the listing is there, and what the cursor rests on has been read."""
        from ckpttool.browser.app import MainScreen

        for _ in range(2):
            await asyncio.sleep(0.02)
            await self.pilot.pause()
            while not any(isinstance(s, MainScreen) and s.reader.idle() for s in self.app.screen_stack):
                assert self.app.fault is None
                await asyncio.sleep(0.005)
        await self.pilot.pause()

    async def press(self, *keys: str) -> list[str]:
        await self.pilot.press(*keys)
        await self.settled()
        return self.lines()

    def to(self, name: str) -> None:
        """Put the cursor on an entry, as a search would, without its letters."""
        assert self.app.screen.tree_pane.reveal(name)

    async def type(self, words: str) -> list[str]:
        return await self.press(*["slash" if letter == "/" else letter for letter in words])

    def lines(self) -> list[str]:
        return ["".join(part.text for part in strip) for strip in self.app.screen._compositor.render_strips()]

    def on(self) -> str:
        """Return the name that the cursor is on."""
        return str(self.app.screen.tree_pane.entry.path)


def play(talk: Talk, *paths: object, size: tuple[int, int] = (80, 24)) -> None:
    pytest.importorskip("textual")
    from ckpttool.browser import BackgroundListing
    from ckpttool.browser import app as main_screen
    from ckpttool.browser.app import Browser

    async def whole() -> None:
        app = Browser(BackgroundListing(str(paths[0]), lambda: list_for_browser(*map(str, paths))))
        async with app.run_test(size=size) as pilot:
            played = Played(app, pilot)
            await played.settled()
            await talk(played)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main_screen, "_REST_S", 0.001)
        asyncio.run(whole())


def screen(lines: list[str]) -> list[str]:
    """Return a screen as the page shows it, without the mark of how far a pane is scrolled."""
    return [line.replace("┃", " ").rstrip() for line in lines]


def documented(number: int) -> list[str]:
    page = (ROOT / "docs" / "howto" / "browse_in_the_terminal.md").read_text(encoding="utf-8")
    return page.split("```text\n")[number + 1].partition("\n```")[0].split("\n")


def test_a_walk_with_the_keys(golden: Golden) -> None:
    async def talk(browser: Played) -> None:
        lines = browser.lines()
        assert "78 tensors" in lines[0]
        assert all(word in lines[-1] for word in ("search", "values", "help", "quit"))
        assert all(len(line) == 80 for line in lines)
        await browser.press("slash")
        lines = await browser.type("l1/k")
        assert lines[-1].startswith("/l1/k")
        assert lines[-1].rstrip().endswith("1 of 6")
        assert any("policy/actor/l1/kernel" in line for line in lines)
        assert any("-1.3527" in line for line in lines)
        lines = await browser.press("enter")
        assert screen(lines)[: len(documented(0))] == documented(0)
        lines = await browser.press("n")
        assert "2 of 6" in lines[-1]
        assert browser.on() == "policy/actor_target/l1/kernel"
        await browser.press("N", "N")
        assert browser.on() == "policy/critic_target/q2/l1/kernel"
        await browser.press("b")
        assert browser.on() == "policy/actor/l1/kernel"
        await browser.press("o")
        assert browser.on() == "policy/actor_optimizer/_momentums/0"
        await browser.press("o", "o")
        assert browser.on() == "policy/actor/l1/kernel"
        await browser.press("left", "left")
        assert browser.on() == "policy/actor/l1"
        assert any("▸ l1" in line for line in browser.lines())
        lines = await browser.press("s")
        golden(lines[-1])
        lines = await browser.press("home", "enter")
        assert browser.on() == "policy"
        await browser.press("slash", "x", "escape")
        assert browser.on() == "policy"
        lines = await browser.press("i")
        assert any("crc32c checksums" in line for line in lines)
        golden("\n".join(await browser.press("escape", "question_mark", "end")))
        lines = await browser.press("escape", "d")
        golden(lines[-1])
        await browser.press("q")
        assert browser.app.return_value == 0

    play(talk, TF_SAMPLE)


def test_values_histogram_and_second_names(tied: str, golden: Golden) -> None:
    async def talk(browser: Played) -> None:
        browser.to("best/weight")
        assert browser.on() == "best/weight"
        await browser.press("enter")
        assert browser.on() == "actor/l1/weight"
        lines = await browser.press("a", "a", "v")
        assert lines[3].split() == ["1", "3.000", "4.000", "5.000"]
        lines = await browser.press("end")
        assert lines[-2].startswith("[3, 2] = 11.0")
        lines = await browser.press("escape", "h")
        assert any("█" in line and "8.3%" in line for line in lines)
        lines = await browser.press("escape")
        browser.to("deep")
        lines = await browser.press("v", "right_square_bracket", "end")
        assert "[0, 1, :, :]  2 of 6" in lines[0]
        assert lines[-2].startswith("[0, 1, 3, 4] = 39")
        lines = await browser.press("g", *"1,2,0,9", "enter")
        golden(lines[-2])
        lines = await browser.press(*"1 2 0 3".replace(" ", ","), "enter")
        assert lines[-2].startswith("[1, 2, 0, 3] = 103")
        await browser.press("escape")
        browser.to("large")
        lines = await browser.press("v", "end")
        assert lines[-2].startswith("[1199, 999] = 1.199999e+06")
        await browser.press("escape")
        browser.to("none")
        lines = await browser.press("v")
        golden(lines[-1])
        browser.to("note")
        lines = await browser.press("v")
        golden(lines[-1])
        for name, value_text in (("bits", "true"), ("half", "0.5000"), ("wave", "1+2j"), ("bad", "nan")):
            browser.to(name)
            lines = await browser.press("v")
            assert value_text in lines[2], name
            await browser.press("escape")

    play(talk, tied)


def test_marks_and_differences() -> None:
    async def talk(browser: Played) -> None:
        lines = browser.lines()
        assert "76 differ" in lines[0]
        assert lines[2].startswith("~ ▾ policy")
        lines = await browser.press("d", "d")
        assert browser.on() == "policy/actor/l1/kernel"
        assert any("of 192 differ" in line for line in lines)
        assert any("left         right" in line for line in lines)
        lines = await browser.press("D")
        assert browser.on() == "policy/total_it"
        lines = await browser.press("d", "v")
        assert lines[0].rstrip().endswith("left")
        at = lines[-2]
        lines = await browser.press("x", "x")
        assert "left - right" in lines[0]
        assert lines[-2].partition(" = ")[0] == at.partition(" = ")[0]

    play(talk, TF_SAMPLE, OLDER)


def test_hostile_names_are_inert_and_keep_their_columns(hostile: str) -> None:
    async def talk(browser: Played) -> None:
        for _ in HOSTILE:
            lines = await browser.press("e", "down")
            assert all(cell_len(line) == 80 for line in lines)
            assert all(line.isprintable() for line in lines)
        lines = browser.lines()
        assert any("[bold red]x[" in line for line in lines)
        assert any("a\\x1b[2Jb" in line for line in lines)
        lines = await browser.press("home", "v")
        assert "1.0000" in lines[2]

    play(talk, hostile)


def test_an_error_of_reading_stays_in_the_details(damaged: str) -> None:
    async def talk(browser: Played) -> None:
        browser.to("policy/actor/l2/kernel")
        await browser.settled()
        lines = browser.lines()
        assert any("crc32c" in line and "16,384" in line for line in lines)
        lines = await browser.press("v")
        assert any(word in lines[2] for word in ("crc32c", "checksum", "damaged", "found"))
        lines = await browser.press("escape", "down")
        assert browser.app.fault is None

    play(talk, damaged)


@pytest.mark.parametrize("size", [(60, 20), (40, 10), (200, 50)])
def test_other_sizes(size: tuple[int, int]) -> None:
    async def talk(browser: Played) -> None:
        browser.to("policy/actor/l1/kernel")
        await browser.settled()
        lines = browser.lines()
        assert len(lines) == size[1]
        assert all(len(line) == size[0] for line in lines)
        assert any("kernel" in line for line in lines)
        if size[0] >= 60:
            assert any("-1.3527" in line for line in lines)
            assert "quit" in lines[-1]
        for key in ("v", "i", "question_mark", "h"):
            lines = await browser.press(key)
            assert all(len(line) == size[0] for line in lines)
            await browser.press("escape")

    play(talk, TF_SAMPLE, size=size)


def test_ten_thousand_tensors_and_the_mouse(many: str) -> None:
    async def talk(browser: Played) -> None:
        assert "10,000 tensors" in browser.lines()[0]
        await browser.press("slash", "9", "enter")
        browser.to("model/layers/777/block3/weight")
        assert browser.on() == "model/layers/777/block3/weight"
        await browser.pilot.click("#tree", offset=(8, 3))
        await browser.settled()
        assert browser.on() != "model/layers/777/block3/weight"

    play(talk, many)


def test_what_cannot_be_opened_ends_it_with_the_error() -> None:
    pytest.importorskip("textual")
    from ckpttool.browser import BackgroundListing
    from ckpttool.browser.app import Browser

    async def whole() -> Browser:
        app = Browser(BackgroundListing("none", lambda: list_for_browser("none.pt")))
        async with app.run_test() as pilot:
            while app.fault is None:
                await pilot.pause(0.01)
        return app

    assert "none.pt" in str(asyncio.run(whole()).fault)


# --- A real terminal ------------------------------------------------------------------------------------


class Terminal:
    """A screen of tmux with a shell in it, on a socket of its own."""

    def __init__(self, folder: Path) -> None:
        self.command = ["tmux", "-L", f"ckpttool-{os.getpid()}", "-f", "/dev/null"]
        program = f"{sys.executable} -m ckpttool browse"
        (folder / "browse").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / "browse").chmod(0o755)
        (folder / "sh").write_text(
            f"export PYTHONPATH={ROOT} PATH={folder}:$PATH PS1='ready> ' TERM=screen\n"
        )
        self._run("new-session", "-d", "-x", "80", "-y", "24", f"ENV={folder}/sh exec sh -i")

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout

    def screen(self, *options: str) -> str:
        return self._run("capture-pane", "-p", *options)

    def keys(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def wait(self, *words: str) -> str:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            screen = self.screen()
            if all(word in screen for word in words):
                return screen
            time.sleep(0.05)
        raise AssertionError(f"{words} never came:\n{self.screen()}")


@pytest.fixture(scope="module")
def terminal(folder: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    pytest.importorskip("textual")
    terminal = Terminal(folder)
    try:
        terminal.wait("ready>")
        yield terminal
    finally:
        terminal._run("kill-server")


def test_a_real_screen(terminal: Terminal, hostile: str) -> None:
    terminal.keys(f"clear; NO_COLOR=1 browse {TF_SAMPLE}; echo left $?", "Enter")
    terminal.wait("78 tensors", "quit")
    terminal.keys("/", "l", "1", "/", "k")
    terminal.wait("-1.3527", "1 of 6")
    terminal.keys("Enter")
    terminal.wait("▾ l1", "search")
    screen = terminal.screen("-e")
    # Without colours, and the cursor is seen all the same.
    assert "\x1b[7m" in screen
    assert not any(f"\x1b[{code}m" in screen for code in (31, 33, 36))
    terminal.keys("v")
    terminal.wait("-0.0696", "[0, 0] = -0.0696")
    terminal.keys("Escape")
    terminal.wait("▾ l1")
    terminal.keys("q")
    screen = terminal.wait("left 0", "ready>")
    # What was there before is there again.
    assert "tensors" not in screen
    terminal.keys(f"clear; browse {hostile}; echo left $?", "Enter")
    terminal.wait("[bold red]x[", "a\\x1b[2Jb", "quit")
    assert "\x1b[33m" in terminal.screen("-e")
    terminal.keys("C-c")
    terminal.wait("left 130")


def test_a_signal_and_a_wrong_path_leave_the_terminal_as_it_was(terminal: Terminal, folder: Path) -> None:
    terminal.keys("clear; browse none.pt; echo left $?", "Enter")
    assert "none.pt" in terminal.wait("left 2")
    pid_file = folder / "pid"
    terminal.keys(f"clear; sh -c 'echo $$ > {pid_file}; exec browse {TF_SAMPLE}'; echo left $?", "Enter")
    terminal.wait("78 tensors", "quit")
    os.kill(int(pid_file.read_text()), signal.SIGTERM)
    screen = terminal.wait("left 143", "ready>")
    assert "Traceback" not in screen
    terminal.keys("clear; echo it is $((6 * 7))", "Enter")
    terminal.wait("it is 42")
