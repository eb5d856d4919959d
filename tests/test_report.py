"""`report`: what is on the page, taken apart as data; that it is one file, and that names stay names."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ckpttool
from ckpttool.core import File, Span
from ckpttool.core.source import StreamedArray
from ckpttool.formats import open_checkpoint
from ckpttool.pages import checkpoint_page as pages
from ckpttool.pages import rendering
from ckpttool.pages.checkpoint_page import HeatMapBuffer, cell_budget, matrix_shape, shrink_matrix
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.report_pages import HOSTILE, Page, write_hostile, write_results
from tests.test_architecture import keras_file, nested

EARLY = TORCH_SAMPLE.with_name("ckpt-2500.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


def written_page(folder: Path, name: str, *arguments: object) -> tuple[Page, dict[str, Any]]:
    """Write a report; return the page taken apart and the document."""
    ran = in_process("report", *arguments, "--out", folder / name, "--force", "--json")
    assert ran.status == 0, ran.out
    return Page.of(folder / name), ran.json()


@pytest.fixture(scope="module")
def sample(folder: Path) -> Page:
    return written_page(folder, "sample.html", TF_SAMPLE)[0]


# --- One checkpoint ---------------------------------------------------------------------------------


def test_the_tree_is_that_of_inspect(sample: Page) -> None:
    listed = in_process("inspect", TF_SAMPLE, "--json").json()
    rows = sample.rows
    assert set(rows) == {tensor["path"] for tensor in (*listed["tensors"], *listed["values"])}
    for tensor in listed["tensors"]:
        row = rows[tensor["path"]]
        assert (row["dtype"], row["shape"], row["nbytes"]) == (
            tensor["dtype"],
            tensor["shape"],
            tensor["nbytes"],
        )
        assert row.get("role", "parameter") == tensor["role"]
        assert set(row.get("aliases", ())) <= set(tensor["aliases"])
        assert row.get("key", row["path"]) == tensor["key"]
    modules = {row["path"]: row for row in sample.data["rows"] if row.get("module")}
    for module in listed["modules"]:
        if module["path"] in modules:
            shown = modules[module["path"]]
            assert shown["tensors"] == module["tensors"]
            assert shown.get("parameters", 0) == module["parameters"]


def test_rows_stand_below_their_modules(sample: Page) -> None:
    above: list[str] = []
    for row in sample.data["rows"]:
        del above[row["level"] :]
        assert len(above) == row["level"]
        assert all(row["path"].startswith(f"{path}/") for path in above)
        if row.get("module"):
            above.append(row["path"])


def test_the_optimizers_state_stands_beside_its_weights(sample: Page) -> None:
    by_id = {row["id"]: row for row in sample.rows.values() if "id" in row}
    kernel = sample.rows["policy/critic/q1/l1/kernel"]
    slots = [by_id[slot] for slot in kernel["slots"]]
    assert sorted(slot["slot"] for slot in slots) == ["m", "v"]
    assert {slot["of"] for slot in slots} == {kernel["id"]}


def test_the_numbers_are_those_of_stats(sample: Page) -> None:
    known = {row["path"]: row for row in in_process("stats", TF_SAMPLE, "--json").json()["tensors"]}
    for path, row in sample.rows.items():
        if "stats" in row:
            assert row.get("histogram", []) == known[path]["histogram"]
            assert row["stats"]["mean"] == pytest.approx(known[path]["mean"], rel=1e-5)
            assert row["stats"].get("zeros", 0) == known[path]["zeros"]
    assert sum("stats" in row for row in sample.rows.values()) == len(known)


def test_a_heat_map_shows_the_tensor(sample: Page) -> None:
    tree = open_checkpoint(str(TF_SAMPLE)).tree
    (leaf,) = (leaf for at, leaf in tree.tensors() if tree.names[at] == "policy/critic/q1/l1/kernel")
    picture = sample.rows["policy/critic/q1/l1/kernel"]["picture"]
    assert picture[1:5] == [4, 64, 4, 64]
    shown = sample.cells(picture)
    assert np.abs(shown - leaf.array()).max() <= picture[5] / 127


def test_everything_that_is_known_of_the_file_is_said(sample: Page) -> None:
    digest = in_process("digest", TF_SAMPLE, "--json").json()
    for text in (
        "ckpt-15000.data-00000-of-00001", digest["sha256"], "tensor_bundle", "td3_tf", "plain data",
        "crc32c", "27,142", "Pendulum-v1", "examples/train_td3.py",
    ):  # fmt: skip
        assert text in sample.words


def test_the_same_checkpoint_gives_the_same_bytes(sample: Page, folder: Path) -> None:
    written_page(folder, "again.html", TF_SAMPLE)
    assert (folder / "again.html").read_bytes() == (folder / "sample.html").read_bytes()


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({}, []),
        ({"a": 1, "b": {"c": "x"}}, ["a", "b/c"]),
        ({"none": np.zeros((0, 3)), "complex": np.ones((3, 3), complex), "bool": np.ones(5, bool)},
         ["none", "complex", "bool"]),
    ],
    ids=["nothing", "values alone", "unusual tensors"],
)  # fmt: skip
def test_whatever_is_in_it_there_is_a_page(
    content: dict[str, object], shown: list[str], tmp_path: Path
) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content))
    page, document = written_page(tmp_path, "x.html", tmp_path / "x.pkl")
    assert list(page.rows) == shown
    assert document["tensors"] + document["values"] == len(shown)


# --- One file ---------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(sample: Page) -> None:
    for tag, attributes in sample.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "audio", "video")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "style", "action", "data", "ping")
            if name == "href":
                assert (value or "").startswith("#")
    assert not re.search(r"url\(|@import", sample.styles[0])
    assert not re.search(r"fetch|XMLHttp|WebSocket|sendBeacon|innerHTML|eval\(|import\(", sample.scripts[2])


def test_its_policy_lets_only_its_own_script_and_style_count(sample: Page) -> None:
    (policy,) = (attributes["content"] for tag, attributes in sample.elements if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, content in (("style-src", sample.styles[0]), ("script-src", sample.scripts[2])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy


def test_hostile_names_are_text(tmp_path: Path, sample: Page) -> None:
    page, document = written_page(tmp_path, "hostile.html", write_hostile(tmp_path / "hostile.pkl"))
    assert [tag for tag, _ in page.elements].count("script") == 3 == len(page.scripts)
    shown = [row["path"] for row in page.data["rows"]]
    for name in HOSTILE.values():
        assert any(path.startswith(name) for path in shown), name
    assert max(map(len, shown)) <= 400
    assert page.rows["text"]["value"] == "</script><b>bold"
    whole = (tmp_path / "hostile.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u2028\u2029\u202a-\u202e\u2066-\u2069]", whole)
    assert len(whole) < 300_000
    # The only tags that a name could have brought in are not there.
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in sample.elements} | {
        "details",
        "summary",
        "br",
    }
    nan = page.rows["nan"]
    assert nan["signs"] == ["1 of 64 is NaN"]
    assert np.argwhere(np.isnan(page.cells(nan["picture"]))).tolist() == [[0, 0]]
    assert document["findings"] == 1


def test_words_stand_out_from_what_is_behind_them(sample: Page) -> None:
    # WCAG 2.2, success criterion 1.4.3: text has a contrast of 4.5 at least, here in both themes.
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", sample.styles[0])
    for theme in (1, 2):
        colours = {pair[0]: light(pair[theme]) for pair in pairs}
        for words in ("ink", "soft", "accent", "good", "bad", "mark"):
            for behind in ("ground", "sheet", "sunk", "tint", "good-tint", "bad-tint"):
                low, high = sorted((colours[words], colours[behind]))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (theme, words, behind)


# --- Pictures ---------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 300))
def test_a_cell_is_the_mean_of_its_block(height: int, width: int, most: int) -> None:
    array = np.random.default_rng(0).standard_normal((height, width))
    cells = shrink_matrix(array, array.shape, most)
    assert cells.size <= most
    tall, wide = -(-height // cells.shape[0]), -(-width // cells.shape[1])
    for row in range(0, cells.shape[0], 3):
        for column in range(0, cells.shape[1], 3):
            block = array[row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]
            assert cells[row, column] == pytest.approx(block.mean(), abs=1e-12)


@pytest.mark.parametrize("shape", [(1, 3_000_000), (3_000_000, 1), (1500, 2000)])
def test_a_large_tensor_is_not_copied(shape: tuple[int, int]) -> None:
    array = np.ones(shape, np.float32)
    tracemalloc.start()
    cells = shrink_matrix(array, array.shape, 4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (cells == 1).all()
    assert peak < array.nbytes / 2


def test_a_picture_of_pieces_is_that_of_the_array(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((1 << 12, 300), dtype=np.float32)
    (tmp_path / "a").write_bytes(array.tobytes())
    span = Span(File.stamp(str(tmp_path / "a")), 0, array.nbytes)
    streamed = StreamedArray(span, "float32", array.shape)
    assert (shrink_matrix(streamed, array.shape, 4096) == shrink_matrix(array, array.shape, 4096)).all()


def test_a_row_or_column_is_one_filter() -> None:
    assert matrix_shape("conv/weight", (2, 3, 4, 5)) == (2, 60)
    assert matrix_shape("conv/kernel", (4, 5, 3, 2)) == (60, 2)
    assert matrix_shape("bias", (7,)) == (1, 7)
    assert HeatMapBuffer(9).add("one", np.ones(())) is None


def test_many_tensors_have_smaller_pictures() -> None:
    assert cell_budget(1) == cell_budget(700) == 4096
    assert 250 < cell_budget(10_000) < 350
    assert cell_budget(10**7) == 64


# --- Two checkpoints --------------------------------------------------------------------------------


def test_what_differs_is_listed_and_marked(folder: Path) -> None:
    page, document = written_page(folder, "two.html", EARLY, TORCH_SAMPLE)
    known = in_process("diff", EARLY, TORCH_SAMPLE, "--json").json()
    assert document["changes"] == len(known["changed"]) == len(page.data["changes"])
    assert [item["path"] for item in page.data["changes"]] == [entry["path"] for entry in known["changed"]]
    biggest = known["changed"][0]
    assert page.rows[biggest["path"]]["change"] == 0
    change = page.data["changes"][0]
    assert change["at"] == str(biggest["values"]["at"])
    assert float(change["max_abs"]) == pytest.approx(biggest["values"]["max_abs"], rel=1e-2)
    left, right, more = (page.cells(picture) for picture in change["pictures"])
    assert np.abs(right - left - more).max() <= 3 * change["pictures"][0][5] / 127
    assert biggest["path"] in page.words


def test_both_sides_of_a_change_are_measured_in_the_same_bins(folder: Path) -> None:
    page, _ = written_page(folder, "sides.html", EARLY, TORCH_SAMPLE)
    sides = [ckpttool.open(str(path)) for path in (EARLY, TORCH_SAMPLE)]
    for path in ("critic/q1/l2/weight", "actor_optimizer/state/0/exp_avg"):
        arrays = [side[path].numpy() for side in sides]
        change = page.data["changes"][page.rows[path]["change"]]
        low, high = min(array.min() for array in arrays), max(array.max() for array in arrays)
        assert change["range"] == [low, high]
        assert change["bins"] == [np.histogram(array, 16, (low, high))[0].tolist() for array in arrays]
        norms = [side["norm"] for side in change["sides"]]
        assert norms == pytest.approx([np.linalg.norm(array) for array in arrays], rel=1e-5)


def test_the_state_of_optimizers_is_compared_by_kind(folder: Path) -> None:
    comparison = pages.gather_contents(str(EARLY), str(TORCH_SAMPLE), inputs=pages.ReportInputs()).comparison
    assert comparison is not None
    sides = [ckpttool.open(str(path)) for path in (EARLY, TORCH_SAMPLE)]
    slots = {(slot.optimizer, slot.slot): slot for slot in comparison.slots}
    assert sorted(slots) == [
        (name, slot) for name in ("actor_optimizer", "critic_optimizer") for slot in ("exp_avg", "exp_avg_sq")
    ]
    moments = [
        [side[f"actor_optimizer/state/{number}/exp_avg"].numpy().ravel() for number in range(6)]
        for side in sides
    ]
    one, other = (np.concatenate(moment) for moment in moments)
    shown = slots["actor_optimizer", "exp_avg"]
    assert [float(norm) for norm in shown.norms] == pytest.approx(
        [np.linalg.norm(one), np.linalg.norm(other)], rel=5e-3
    )
    assert float(shown.largest) == pytest.approx(np.abs(other - one).max(), rel=5e-3)
    assert shown.tensors == 6
    same = pages.gather_contents(str(EARLY), str(EARLY), inputs=pages.ReportInputs()).comparison
    assert same is not None
    assert same.slots == ()


def test_networks_of_both_are_shown_where_they_differ(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", w=np.ones(2))
    inputs = pages.ReportInputs()
    alike = pages.gather_contents(str(TF_SAMPLE), str(TORCH_SAMPLE), inputs=inputs)
    assert alike.networks
    assert alike.others is None
    unlike = pages.gather_contents(str(TORCH_SAMPLE), str(tmp_path / "other.npz"), inputs=inputs)
    assert unlike.others is not None
    assert unlike.others.boxes == ()
    page, _ = written_page(tmp_path, "unlike.html", TORCH_SAMPLE, tmp_path / "other.npz")
    ids = [attributes.get("id") for _, attributes in page.elements]
    assert "networks-a" in ids
    assert "networks-b" in ids


@pytest.mark.parametrize(
    ("layer", "shown"),
    [
        ({"class_name": "Dense", "config": {"name": "first", "units": 7, "activation": "relu"}}, True),
        ({"class_name": "Conv2D", "config": {"filters": 3, "kernel_size": [[3], 3], "strides": {}}}, True),
        ({"class_name": "Dense", "config": {"units": 10**30}}, True),
        (nested(60), False),
    ],
)
def test_layers_that_a_model_describes_are_on_its_page(
    layer: dict[str, Any], shown: bool, tmp_path: Path
) -> None:
    entries = [{"class_name": "InputLayer", "config": {"batch_shape": [None, 4]}}, layer]
    file = keras_file(tmp_path, {"class_name": "Sequential", "config": {"name": "m", "layers": entries}})
    page, _ = written_page(tmp_path, "model.html", file)
    ids = [attributes.get("id") for _, attributes in page.elements]
    assert "networks" in ids or not shown
    assert layer["class_name"] == "Sequential" or layer["class_name"] in page.words


def test_across_frameworks_the_marks_are_on_the_first_ones_own_paths(folder: Path) -> None:
    page, document = written_page(folder, "meaning.html", TF_SAMPLE.with_name("ckpt-12500"), TORCH_SAMPLE)
    marked = [path for path, row in page.rows.items() if "change" in row]
    assert "policy/actor/l1/kernel" in marked
    change = page.data["changes"][page.rows["policy/actor/l1/kernel"]["change"]]
    assert change["path"] == "actor/0/kernel"
    assert document["changes"]


def test_identical_is_said(folder: Path) -> None:
    page, document = written_page(folder, "same.html", TORCH_SAMPLE, TORCH_SAMPLE)
    assert document["changes"] == 0
    assert "Identical: 90 tensors" in page.words


def test_what_one_side_has_alone_and_other_shapes(tmp_path: Path) -> None:
    for name, entries in (
        ("a.npz", {"same": np.ones(3), "gone": np.ones(2), "shape": np.ones((2, 3))}),
        ("b.npz", {"same": np.ones(3), "new": np.ones(2), "shape": np.ones((3, 2))}),
    ):
        np.savez(tmp_path / name, **entries)
    page, _ = written_page(tmp_path, "alone.html", tmp_path / "a.npz", tmp_path / "b.npz")
    assert page.rows["gone"]["change"] == -1
    assert page.data["changes"][page.rows["shape"]["change"]]["sentence"] == "float64[2, 3] → float64[3, 2]"
    assert "change" not in page.rows["same"]
    assert "A: 1 gone" in page.words
    assert "B: 1 new" in page.words
    assert page.rows["new"]["change"] == -2
    (title,) = (row for row in page.data["rows"] if row["name"] == "Only in B")
    assert (title["tensors"], title["module"], title.get("kind")) == (1, True, None)
    assert page.rows["new"]["stats"] == {"min": 1, "max": 1, "mean": 1, "std": 0, "norm": 1.41421}
    assert (page.cells(page.rows["new"]["picture"]) == 1).all()


def test_rows_of_entries_only_in_b_are_those_of_its_own_page(folder: Path) -> None:
    """Names, types, numbers and pictures are those of B; each row of the page has its own number."""
    whole = folder / "whole"
    whole.mkdir()
    arrays = {
        f"{name}/{at}/w": np.random.default_rng(at).normal(size=(4, 3)) for at in range(3) for name in "ab"
    }
    np.savez(whole / "all.npz", **arrays)
    np.savez(whole / "a.npz", **{name: array for name, array in arrays.items() if name.startswith("a")})
    alone, _ = written_page(folder, "b-alone.html", whole / "all.npz")
    both, _ = written_page(folder, "b-both.html", whole / "a.npz", whole / "all.npz")
    for name, row in alone.rows.items():
        if not name.startswith("b"):
            continue
        other = both.rows[name]
        assert other["change"] == -2
        same = ("dtype", "shape", "nbytes", "stats", "histogram")
        assert {key: other.get(key) for key in same} == {key: row.get(key) for key in same}
        assert (both.cells(other["picture"]) == alone.cells(row["picture"])).all()
    numbers = [row["id"] for row in both.data["rows"] if "id" in row]
    assert sorted(numbers) == list(range(6))


@given(st.floats(-1e15, 1e15))
@example(54321.0)
@example(1234567.8)
def test_no_rounded_number_looks_exact(value: float) -> None:
    shown = pages.format_moments(pages.Moments(1, value, value, value))["min"]
    assert shown == pytest.approx(value, rel=1e-5)
    assert not shown.is_integer() or abs(shown - value) <= 0.5
    assert not value.is_integer() or shown == value or abs(value) < 1e-5


# --- What lies beside -------------------------------------------------------------------------------


def receipt_verdict(page: Page) -> str:
    """Return whether the section on the conversion shows the receipt as one of these weights."""
    section = [dict(attributes).get("id") for _, attributes in page.elements].index("conversion")
    classes = (str(attributes.get("class")).split() for _, attributes in page.elements[section:])
    return next(words[1] for words in classes if words[0] == "verdict")


def test_the_conversion_is_told_from_the_receipt_or_from_its_document(tmp_path: Path, golden: Golden) -> None:
    target = tmp_path / "agent.pt"
    saved = in_process("convert", TF_SAMPLE, target, "--json", "--no-verify")
    (tmp_path / "convert.json").write_text(saved.out)
    page, document = written_page(tmp_path, "a.html", target)
    assert document["conversion"]
    assert "94 moves" in page.words
    assert " ".join(("policy/actor/l1/kernel", "transpose", "actor/l1/weight")) in page.words
    assert receipt_verdict(page) == "good"
    page, _ = written_page(tmp_path, "b.html", target, "--conversion", tmp_path / "convert.json")
    assert "94 moves" in page.words
    assert receipt_verdict(page) == "good"
    # That of other weights is shown as such, and found beside the file it is a finding as well.
    page, _ = written_page(tmp_path, "c.html", EARLY, "--conversion", f"{target}.ckpttool.json")
    assert receipt_verdict(page) == "bad"
    shutil.copy(EARLY, target)
    page, document = written_page(tmp_path, "d.html", target)
    golden("\n".join(text.strip() for text in page.text if "sidecar" in text))
    assert document["findings"] == 3  # and what the sidecar stated


@pytest.mark.environment
def test_returns_and_learning_curves_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    options = ("--env", "Pendulum-v1", "--episodes", "3", "--json")
    (tmp_path / "run.json").write_text(in_process("eval", TORCH_SAMPLE.parent, *options).out)
    (tmp_path / "one.json").write_text(in_process("eval", TORCH_SAMPLE, *options).out)
    files = [word for name in ("run", "one") for word in ("--eval", tmp_path / f"{name}.json")]
    page, document = written_page(tmp_path, "r.html", TORCH_SAMPLE, *files)
    assert document["evaluations"] == 7
    assert "7 checkpoints" in page.words
    one = json.loads((tmp_path / "one.json").read_text())
    assert rendering.format_number(one["mean"]) in page.words
    dots = [attributes["d"] or "" for _, attributes in page.elements if attributes.get("class") == "dots"]
    assert [path.count("M") for path in dots] == [6, *[3] * 7]
    assert page.text.count("this checkpoint") == 2
    results = rendering.read_evaluations([str(files[3])]).results
    assert rendering.find_results([str(TORCH_SAMPLE)], results) == ({0: 0}, frozenset())
    other, _ = written_page(tmp_path, "o.html", TF_SAMPLE, *files)
    assert "this checkpoint" not in other.text
    both, _ = written_page(tmp_path, "b.html", EARLY, TORCH_SAMPLE, *files[:2])
    assert both.text.count("A") > other.text.count("A")


def test_results_by_name_need_a_name_of_one_checkpoint(tmp_path: Path) -> None:
    file = write_results(tmp_path, {1: -1.0, 2: -2.0}, run=Path("/gone"))
    results = rendering.read_evaluations([str(file)]).results
    paths = [str(tmp_path / name) for name in ("a/ckpt-1.pt", "b/ckpt-2.pt")]
    assert rendering.find_results(paths, results) == ({0: 0, 1: 1}, frozenset({0, 1}))
    assert rendering.find_results([*paths, str(tmp_path / "c" / "ckpt-1.pt")], results)[0] == {1: 1}


def test_a_logged_curve_and_numbers_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    curve = {"tag": "<b>eval", "of": "evaluation", "steps": [0, 10, 20], "values": [1.0, "NaN", 3.0]}
    file.write_text(
        json.dumps(
            {"checkpoint": "x", "env": "<i>", "returns": [1, "Infinity", None], "mean": "NaN", "ci95": None,
             "training_curves": [curve], "notes": ["\x1b[31m"], "protocol": 3}
        )
    )  # fmt: skip
    section = rendering.read_evaluations([str(file)])
    assert section.curves[0].points == ((0.0, 1.0, 1.0, 1.0), (20.0, 3.0, 3.0, 3.0))
    page, _ = written_page(tmp_path, "p.html", TORCH_SAMPLE, "--eval", file)
    assert "<i>" in page.words
    assert "logged: <b>eval" in page.words
    assert ("i", {}) not in page.elements


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
@example(900719926.4726562, 1e-6)
def test_an_axis_has_round_numbers_within_it(low: float, span: float) -> None:
    ticks = rendering.round_ticks(low, low + span)
    assert len(ticks) <= 12
    assert all(low - span * 1e-6 <= value <= low + span * (1 + 1e-6) for value in ticks)


def test_small_numbers_keep_their_digits() -> None:
    assert rendering.format_number(0.00002) == "2e\u221205"
    chart = rendering.build_chart(
        [rendering.ReturnCurve("a", ((0.0, 0.0, 0.0, 0.0), (5.0, 1e-5, 0.0, 2e-5)))]
    )
    assert chart is not None
    assert [tick.text for tick in chart.up] == [
        "0",
        *(f"{n}e\u2212{d}" for n, d in (("5", "06"), ("1", "05"), ("1.5", "05"), ("2", "05"))),
    ]
    assert [tick.text for tick in chart.across] == ["0", "1", "2", "3", "4", "5"]
    steps = rendering.build_chart(
        [rendering.ReturnCurve("a", tuple((x, 0.25 * x, x, x) for x in (1500.0, 14000.0)))]
    )
    assert steps is not None
    assert [tick.text for tick in steps.across] == ["2,500", "5,000", "7,500", "10,000", "12,500"]


# --- The command ------------------------------------------------------------------------------------


def test_the_name_is_that_of_the_checkpoint_and_nothing_is_overwritten(
    tmp_path: Path, golden: Golden
) -> None:
    ran = in_process("report", TORCH_SAMPLE, "--glob", "actor/**", cwd=tmp_path)
    assert ran.status == 0
    assert ran.out.splitlines()[-1].startswith("wrote ckpt-15000.pt.report.html")
    golden(refused(in_process("report", TORCH_SAMPLE, cwd=tmp_path)))
    page = Page.of(tmp_path / "ckpt-15000.pt.report.html")
    assert {path.partition("/")[0] for path in page.rows} == {"actor"}
    assert in_process("report", TORCH_SAMPLE, "--force", "-q", cwd=tmp_path).status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-15000.pt.report.html"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["none.pt"], id="absent"),
        pytest.param([TORCH_SAMPLE, "none.pt"], id="absent-other"),
        pytest.param([TORCH_SAMPLE, "--eval", "text.json"], id="not-json"),
        pytest.param([TORCH_SAMPLE, "--eval", "other.json"], id="no-evaluation"),
        pytest.param([TORCH_SAMPLE, "--conversion", "other.json"], id="no-conversion"),
        pytest.param([TORCH_SAMPLE, "--eval", "none.json"], id="absent-evaluation"),
        pytest.param([TORCH_SAMPLE, "--out", "none/x.html"], id="absent-folder"),
        pytest.param([TORCH_SAMPLE, "--out", "."], id="folder"),
    ],
)
def test_what_is_refused(arguments: list[object], golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "other.json").write_text('{"evaluations": [{}]}')
    golden(refused(in_process("report", *arguments, cwd=tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == {"text.json", "other.json"}


@pytest.mark.parametrize(
    "target", ["agent.pt", "other.pt", "played.html", "plan.html", "agent.pt.ckpttool.json"]
)
def test_nothing_that_was_read_is_the_target(target: str, tmp_path: Path, golden: Golden) -> None:
    for name in ("agent.pt", "other.pt"):
        shutil.copy(TORCH_SAMPLE, tmp_path / name)
    shutil.copy(f"{TORCH_SAMPLE}.ckpttool.json", tmp_path / "agent.pt.ckpttool.json")
    (tmp_path / "played.html").write_text('{"returns": [1.0], "mean": 1.0}')
    (tmp_path / "plan.html").write_text('{"mapped": []}')
    before = (tmp_path / target).read_bytes()
    more = [] if target.startswith("agent") else ["--conversion", "plan.html"]
    words = ("report", "agent.pt", "other.pt", "--eval", "played.html", *more, "--out", target, "--force")
    golden(refused(in_process(*words, cwd=tmp_path)))
    assert (tmp_path / target).read_bytes() == before
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html"] * 2 + [".json"] + [".pt"] * 2


@pytest.mark.parametrize(
    ("option", "content"),
    [
        ("--eval", {"returns": [1, 10**400], "mean": -(10**400), "step": "Infinity", "ci95": [0, 10**400]}),
        (
            "--eval",
            {"returns": [], "mean": 1, "curve": [{"step": 10**400, "mean": 1}, {"step": 1, "mean": 2}]},
        ),
        ("--conversion", {"mapped": [3, {"source": 10**400}], "parity": 5, "residue": 5}),
        ("--conversion", {"mapped": [], "parity": {"a": 1}, "residue": {"a": 1}, "assumed": {}, "unused": 3}),
    ],
)
def test_documents_of_any_content_are_shown(option: str, content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(content))
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    page, _ = written_page(tmp_path, "p.html", tmp_path / "x.npz", option, tmp_path / "x.json")
    assert "None" not in page.words


def test_the_smallest_numbers_there_are_have_an_axis() -> None:
    assert rendering.round_ticks(0.0, 5e-324) == [0.0]
    assert rendering.round_ticks(0.0, 3e-322)


def test_the_checkpoint_is_never_the_target(tmp_path: Path, golden: Golden) -> None:
    copy = tmp_path / "agent.pt"
    shutil.copy(TORCH_SAMPLE, copy)
    golden(refused(in_process("report", copy, "--out", copy, "--force")))
    assert copy.read_bytes() == TORCH_SAMPLE.read_bytes()


def test_every_page_names_its_language_and_the_parts_of_it() -> None:
    """Without a browser, which finds the rest (test_accessibility.py)."""
    templates = sorted((Path(rendering.__file__).parent / "templates").glob("*.html"))
    tags = [
        tag for file in templates for tag in re.findall(r"<(?:html|nav|section)\b[^>]*>", file.read_text())
    ]
    assert len(tags) > 10
    assert not [tag for tag in tags if not re.search(r"\b(lang|aria-label|aria-labelledby)=", tag)]
