"""`report RUN/`: the checkpoints of a run, norms and updates beside numpy, findings, results, the page."""

from __future__ import annotations

import base64
import itertools
import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.commands import run_history
from ckpttool.commands.run_history import RunCheckpoint, _open_member, find_run, follow_run
from ckpttool.core import Leaf, WorkerError
from ckpttool.evaluation.logged_returns import find_logs
from ckpttool.listing.findings import Finding
from ckpttool.pages.rendering import read_evaluations
from ckpttool.pages.run_page import RunInputs, build_drift, gather_run, split_findings
from ckpttool.verification import run_histories
from ckpttool.verification.run_histories import FindingHistory, LayerHistory, fold_layers
from ckpttool.verification.run_members import RunReading
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, Ran, in_process, refused
from tests.golden_texts import Golden
from tests.report_pages import HOSTILE, Page, write_gif, write_results

STEPS = (2500, 5000, 7500, 10000, 12500, 15000)


def run_of(folder: Path, *arrays: dict[str, Any], name: str = "ckpt-{}.npz") -> Path:
    """Write a run: one file for each dict of arrays, at steps 1, 2, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, content in enumerate(arrays, 1):
        np.savez(folder / name.format(step), **content)
    return folder


def written(folder: Path, *arguments: object, out: Path | None = None) -> tuple[Page, dict[str, Any]]:
    target = out or folder.parent / "page.html"
    ran = in_process("report", folder, *arguments, "--out", target, "--force", "--json")
    assert ran.status == 0, ran.out
    return Page.of(target), ran.json()["run"]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("run")
    page, document = written(TORCH_SAMPLE.parent, out=folder / "page.html")
    return page, document, folder


# --- Norms and updates ------------------------------------------------------------------------------


def test_norms_and_updates_are_those_of_numpy(sample: tuple[Page, dict[str, Any], Path]) -> None:
    _, document, _ = sample
    assert [checkpoint["in_name"] for checkpoint in document["checkpoints"]] == list(STEPS)
    assert document["step_from"] == "total_it"
    opened = [ckpttool.open(str(TORCH_SAMPLE.with_name(f"ckpt-{step}.pt"))) for step in STEPS]
    layers = {layer["path"]: layer for layer in document["layers"]}
    assert {path.rpartition("/")[0] for path in layers} >= {"actor", "actor_target", "critic/q1"}
    for path in ("actor/l1", "critic/q2/l3"):
        weights = [
            np.concatenate(
                [saved[f"{path}/{name}"].numpy().astype(np.float64).ravel() for name in ("weight", "bias")]
            )
            for saved in opened
        ]
        norms = [float(np.linalg.norm(weight)) for weight in weights]
        updates = [
            float(np.linalg.norm(after - before) / np.linalg.norm(before))
            for before, after in itertools.pairwise(weights)
        ]
        assert layers[path]["norms"] == pytest.approx(norms, rel=1e-12)
        assert layers[path]["updates"][0] is None
        assert layers[path]["updates"][1:] == pytest.approx(updates, rel=1e-12)
        assert layers[path]["parameters"] == weights[0].size


def test_norms_of_numbers_whose_squares_are_none(tmp_path: Path) -> None:
    arrays = [{"l/w": np.array([3.0, -4.0]) * scale, "l/b": np.zeros(1)} for scale in (1e200, 1e199, 1e-200)]
    _, document = written(run_of(tmp_path / "run", *arrays))
    (layer,) = document["layers"]
    assert layer["norms"] == pytest.approx([5e200, 5e199, 5e-200], rel=1e-12, abs=0)
    assert layer["updates"][1:] == pytest.approx([0.9, 1.0])


def test_a_pattern_selects_layers(tmp_path: Path) -> None:
    _, document = written(TF_SAMPLE.parent, "--glob", "**/actor/**", out=tmp_path / "page.html")
    assert [layer["path"] for layer in document["layers"]] == [f"policy/actor/l{n}" for n in (1, 2, 3)]
    assert [checkpoint["in_name"] for checkpoint in document["checkpoints"]] == list(STEPS)
    assert all(checkpoint["sha256"] for checkpoint in document["checkpoints"])


def test_what_an_update_is_where_there_is_none(tmp_path: Path) -> None:
    one = np.ones(4)
    run = run_of(
        tmp_path / "run",
        {"same/w": one, "zero/w": 0 * one, "shape/w": one, "new/a": one, "nan/w": one, "gone/w": one},
        {"same/w": one, "zero/w": one, "shape/w": np.ones(5), "new/a": one, "new/b": one,
         "nan/w": one * np.nan, "gone/w": one},
        {"same/w": one, "zero/w": one * 3, "shape/w": np.ones(5), "new/a": one, "new/b": one, "nan/w": one},
    )  # fmt: skip
    _, document = written(run)
    updates = {layer["path"]: layer["updates"][1:] for layer in document["layers"]}
    assert updates == {
        "same": [0.0, 0.0],
        "zero": ["Infinity", 2.0],
        "shape": [None, 0.0],
        "new": [None, 0.0],
        "nan": ["NaN", "NaN"],
        "gone": [0.0, None],
    }
    norms = {layer["path"]: layer["norms"] for layer in document["layers"]}
    assert norms["gone"] == [2.0, 2.0, None]
    assert norms["nan"] == [2.0, "NaN", 2.0]


def test_a_module_has_the_norm_of_all_its_layers() -> None:
    rows = [
        LayerHistory("a/x", 1, 4, (3.0, 3.0, math.nan), (None, 3.0, math.nan)),
        LayerHistory("a/y", 1, 4, (4.0, 4.0, 1.0), (None, 2.0, None)),
        LayerHistory("b", 1, 4, (0.0, 1.0, 1.0), (None, 1.0, 0.0)),
    ]
    joined, depth = fold_layers(rows, 2)
    assert depth == 1
    assert [(layer.path, layer.tensors, layer.parameters) for layer in joined] == [("a", 2, 8), ("b", 1, 4)]
    assert joined[0].norms[:2] == (5.0, 5.0)
    assert joined[0].updates[1] == pytest.approx(math.hypot(3, 2) / 5)
    assert joined[0].updates[2] is None
    assert joined[1] == rows[2]
    assert rows[2].updates == (None, math.inf, 0.0)
    assert fold_layers(rows, 3) == (tuple(rows), 0)


def test_colors_follow_the_numbers() -> None:
    rows = [
        LayerHistory("a", 1, 4, (1.0, 4.0, 0.25), (None, 0.001, 4.0)),
        LayerHistory("b", 1, 4, (1.0, 1.0, math.nan), (None, 0.0, None)),
    ]
    drift = build_drift(rows, ("1", "2", "3"))
    assert [cell.shade for cell in drift.rows[0].norms] == ["n5", "n10", "n0"]
    assert [cell.shade for cell in drift.rows[0].updates] == ["u0", "u9"]
    assert [cell.shade for cell in drift.rows[1].norms] == ["n5", "n5", "broken"]
    assert [cell.shade for cell in drift.rows[1].updates] == ["same", "unknown"]


# --- Which checkpoints are the run ------------------------------------------------------------------


def names(result: Any) -> list[str]:
    return [] if result is None else [Path(member.path).name for member in result.members]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_only_broken_norms_have_the_color_of_nan(broken: float) -> None:
    """A broken first norm leaves the others to be compared with the next."""
    layer = LayerHistory("l", 1, 4, (broken, 1.0, 2.1, broken, 4.0), (None, broken, 1.0, broken, broken))
    (row,) = build_drift([layer], ("1", "2", "3", "4", "5")).rows
    assert [cell.shade for cell in row.norms] == ["broken", "n5", "n8", "broken", "n10"]


def test_the_run_is_in_training_order_and_of_one_kind(tmp_path: Path) -> None:
    for step in (10000, 2500, 7500):
        shutil.copy(TORCH_SAMPLE.with_name(f"ckpt-{step}.pt"), tmp_path)
    np.savez(tmp_path / "evaluations.npz", timesteps=np.arange(3), results=np.ones((3, 2)))
    np.savez(tmp_path / "evaluations-2.npz", timesteps=np.arange(3))
    run = find_run(str(tmp_path))
    assert names(run) == ["ckpt-2500.pt", "ckpt-7500.pt", "ckpt-10000.pt"]
    assert run is not None
    assert len(run.notes) == 1  # evaluations.npz is no checkpoint
    # The best one has no number in its name; its own counter puts it where it was saved.
    shutil.copy(TORCH_SAMPLE.with_name("ckpt-5000.pt"), tmp_path / "best.pt")
    assert names(find_run(str(tmp_path)))[:3] == ["ckpt-2500.pt", "best.pt", "ckpt-7500.pt"]
    # A damaged one has no counter; its name puts it between the others.
    (tmp_path / "ckpt-9000.pt").write_bytes((tmp_path / "ckpt-7500.pt").read_bytes()[:5000])
    assert names(find_run(str(tmp_path)))[2:] == ["ckpt-7500.pt", "ckpt-9000.pt", "ckpt-10000.pt"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["ckpt-1.npz"], 0),
        (["actor.npz", "critic.npz"], 0),
        (["checkpoint-1/model.npz", "checkpoint-20/model.npz"], 2),
        (["checkpoint-1/a.npz", "checkpoint-1/b.npz", "checkpoint-2/a.npz"], 0),
        (["seed-1/model.npz", "seed-2/model.npz"], 0),
        (["run/ckpt-1.npz", "run/ckpt-2.npz"], 2),
        (["a/ckpt-1.npz", "a/ckpt-2.npz", "b/ckpt-1.npz", "b/ckpt-2.npz"], 0),
    ],
)
def test_folders_that_are_runs(files: list[str], expected: int, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        np.savez(tmp_path / name, w=np.ones(3))
    assert len(names(find_run(str(tmp_path)))) == expected


def test_one_checkpoint_and_several_runs(tmp_path: Path, golden: Golden) -> None:
    run_of(tmp_path / "one", {"w": np.ones(2)})
    ran = in_process("report", "one", "--json", cwd=tmp_path)
    assert ran.status == 0
    assert ran.json()["run"] is None
    for name in "ab":
        run_of(tmp_path / "two" / name, {"w": np.ones(2)}, {"w": np.ones(2)})
    golden(refused(in_process("report", "two", cwd=tmp_path)))


def test_a_damaged_checkpoint_is_a_column_without_numbers(tmp_path: Path) -> None:
    weights = [{"l/w": np.full(300, float(step))} for step in (1, 2, 3, 4)]
    run = run_of(tmp_path / "run", *weights)
    data = bytearray((run / "ckpt-2.npz").read_bytes())
    data[600] ^= 1
    (run / "ckpt-2.npz").write_bytes(data)
    page, document = written(run)
    assert [saved["error"] is None for saved in document["checkpoints"]] == [True, False, True, True]
    (layer,) = document["layers"]
    assert layer["norms"][1] is None
    assert layer["updates"] == [None, None, None, pytest.approx(1 / 3)]
    assert "unreadable" in page.words
    for file in run.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert in_process("report", run, "--out", tmp_path / "x.html").status == 2


# --- Findings ---------------------------------------------------------------------------------------


def test_findings_that_change_are_in_the_table(tmp_path: Path) -> None:
    weights = [np.ones((4, 4), np.float32) for _ in range(5)]
    weights[2][0, :1] = weights[4][0, :3] = np.nan
    always = np.zeros((3, 3), np.float32)
    run = run_of(tmp_path / "run", *({"a/weight": weight, "z/weight": always} for weight in weights))
    (run / "ckpt-4.npz").write_bytes((run / "ckpt-4.npz").read_bytes()[:200])
    page, document = written(run)
    assert [checkpoint["findings"] for checkpoint in document["checkpoints"]] == [1, 1, 2, 0, 2]
    constant, changing = sorted(document["findings"], key=lambda finding: finding["sentences"][0] is None)
    assert [sentence is None for sentence in constant["sentences"]] == [False, False, False, True, False]
    # Sentences that differ only in their numbers are one finding.
    assert [sentence is None for sentence in changing["sentences"]] == [True, True, False, True, False]
    assert changing["sentences"][2] != changing["sentences"][4]
    # One path for each of the strip's shades, of all its cells.
    marks = {attributes["class"]: attributes["d"] for tag, attributes in page.elements if tag == "path"}
    assert (marks["none"], marks["found"]) == ("M0 0h2v1h-2z", "M2 0h1v1h-1zM4 0h1v1h-1z")


def test_findings_that_differ_in_the_notation_of_numbers_are_one() -> None:
    texts = ("a/0: mean -3.69e-05 of 1,000", "a/11: mean 0.0274 of 2", "a/1: mean -19.7 of 3e+07")
    histories = run_histories.trace_findings([[Finding("numbers", text)] for text in texts])
    assert [history.sentences for history in histories] == [texts]


def test_findings_of_many_tensors_are_one_sentence() -> None:
    alike = tuple(f"optimizer/{number}: negative mean of squared gradients" for number in range(30))
    histories = [
        FindingHistory("numbers", (alike[:1], alike, ()), None),
        FindingHistory("a", (("x",),) * 3, "y"),
    ]
    assert histories[0].sentences == (alike[0], "; ".join(alike), None)
    checkpoints = [RunCheckpoint(f"{step}.pt", step, {}, 1, None, 1) for step in (10, 20, 30)]
    (row,), (constant,) = split_findings(histories, checkpoints)
    assert (row.when, constant.when, constant.sentence) == ("until 20", "every checkpoint", "x")
    assert [step for step, _ in row.texts] == ["10", "20"]
    assert row.texts[0][1] == alike[0]
    # The first one, and how many more.
    assert row.texts[1][1].startswith(alike[0])
    assert "29" in row.texts[1][1]
    assert len(row.sentence) < 2 * len(alike[0])


# --- Returns ----------------------------------------------------------------------------------------


def test_the_best_by_the_given_results_with_its_film(tmp_path: Path) -> None:
    best = str(TORCH_SAMPLE.with_name("ckpt-12500.pt"))
    file = write_results(
        tmp_path, {2500: -900.0, 12500: -150.0, 15000: -160.0},
        run=TORCH_SAMPLE.parent, best={"checkpoint": best, "certain": False},
        video={"file": "film.gif", "checkpoint": best, "episodes": [{"episode": 0, "return": -3.5}]},
    )  # fmt: skip
    write_gif(tmp_path / "film.gif")
    page, document = written(TORCH_SAMPLE.parent, "--eval", file, out=tmp_path / "page.html")
    assert document["best"] == {
        "checkpoint": best, "mean": -150.0, "certain": False,
        "verdict": "between random and solved: 12500 %",
    }  # fmt: skip
    assert document["film"] == {"file": "film.gif", "checkpoint": "ckpt-12500.pt"}
    # The table of returns has the best ones already: that of all checkpoints is folded.
    tags = [tag if tag != "section" else attributes.get("id") for tag, attributes in page.elements]
    assert "details" in tags[tags.index("checkpoints") :][:4]
    (image,) = (attributes["src"] or "" for tag, attributes in page.elements if tag == "img")
    assert base64.b64decode(image.partition(",")[2]) == (tmp_path / "film.gif").read_bytes()
    policy = next(
        attributes["content"] or "" for _, attributes in page.elements if "http-equiv" in attributes
    )
    assert policy.startswith("default-src 'none'; ")
    assert "img-src data:; " in policy
    assert "between random and solved: 2500 %" in page.words
    assert "episode 0: return \u22123.50" in page.words
    # The points of the curve are at the steps of the run: the first dots are those of the curve.
    dots = [attributes["d"] or "" for _, attributes in page.elements if attributes.get("class") == "dots"]
    assert [path.count("M") for path in dots] == [3, 2, 2, 2]
    # The table has the best first.
    start = page.text.index("3 checkpoints played in Pendulum-v1")
    names = [line for line in page.text[start:] if line.startswith("ckpt-") and line.endswith(".pt")]
    assert names[:3] == ["ckpt-12500.pt", "ckpt-15000.pt", "ckpt-2500.pt"]


def test_results_of_several_files_are_not_said_to_be_compared(tmp_path: Path) -> None:
    """Each file compares its own checkpoints: the best of one may be worse than those of the other."""
    files = []
    for number, means in enumerate(({2500: -900.0, 12500: -150.0}, {15000: -160.0})):
        (folder := tmp_path / str(number)).mkdir()
        best = {"checkpoint": str(TORCH_SAMPLE.with_name("ckpt-12500.pt")), "certain": True}
        files += ["--eval", write_results(folder, means, run=TORCH_SAMPLE.parent, best=best)]
    one, document = written(TORCH_SAMPLE.parent, *files[:2], out=tmp_path / "one.html")
    assert document["best"]["certain"] is True
    both, document = written(TORCH_SAMPLE.parent, *files, out=tmp_path / "both.html")
    assert document["best"]["certain"] is None
    assert len(one.words) > 0 < len(both.words)


def test_returns_in_several_environments_are_several_curves(tmp_path: Path) -> None:
    file = write_results(tmp_path, dict.fromkeys((2500, 5000, 7500, 10000), -1.0), run=TORCH_SAMPLE.parent)
    result = json.loads(file.read_text())
    for evaluation in result["evaluations"][:2]:
        evaluation["env"] = "Other-v1"
    file.write_text(json.dumps(result))
    page, document = written(TORCH_SAMPLE.parent, "--eval", file, out=tmp_path / "page.html")
    assert document["best"] is None
    lines = [attributes["d"] or "" for tag, attributes in page.elements if attributes.get("class") == "line"]
    assert [line.count("L") for line in lines] == [1, 1]
    assert {"evaluated in Other-v1", "evaluated in Pendulum-v1"} <= set(page.text)


def test_results_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (2500, 15000):
        shutil.copy(TORCH_SAMPLE.with_name(f"ckpt-{step}.pt"), run)
    file = write_results(tmp_path, {2500: -1.0, 15000: -2.0}, run=TORCH_SAMPLE.parent)
    page, document = written(run, "--eval", file)
    assert document["best"] is None  # these files exist, elsewhere
    assert page.text.count("not of this run") == 2
    gone = json.loads(file.read_text().replace(str(TORCH_SAMPLE.parent), "/gone"))
    for evaluation in gone["evaluations"]:
        del evaluation["updates"]
    file.write_text(json.dumps(gone))
    ran = in_process(
        "report", run, "--eval", file, "--out", tmp_path / "page.html", "--force", "--json"
    ).json()
    assert ran["run"]["best"]["checkpoint"].endswith("ckpt-2500.pt")
    assert any(note.startswith("assumed: 2 results") for note in ran["notes"])
    assert "not of this run" not in Page.of(tmp_path / "page.html").text
    shown = Page.of(tmp_path / "page.html").text
    assert sum("Assumed to be of this run" in text for text in shown) == 1
    assert sum(text.startswith("assumed: 2 results are of this run") for text in shown) == 2
    # Counters that the checkpoint contradicts: a name is not enough.
    for evaluation in gone["evaluations"]:
        evaluation["updates"] = 77
    file.write_text(json.dumps(gone))
    ran = in_process(
        "report", run, "--eval", file, "--out", tmp_path / "page.html", "--force", "--json"
    ).json()
    assert ran["run"]["best"] is None
    assert Page.of(tmp_path / "page.html").text.count("not of this run") == 2


def test_a_page_of_many_checkpoints_and_layers_stays_small() -> None:
    """Cells are shared by neighbors; a broken one is never hidden by the others."""
    steps = [str(step) for step in range(200)]
    norms = [1.0] * 200
    norms[77] = math.nan
    layers = [LayerHistory(f"a/{n}", 1, 1, tuple(norms), (None, *[0.1] * 199)) for n in range(300)]
    drift = build_drift(layers, steps)
    assert drift.grouped == 4
    for row in drift.rows:
        assert len(row.norms) == len(row.updates) == 50
        broken = [at for at, cell in enumerate(row.norms) if cell.shade == "broken"]
        assert broken == [77 // 4]
        assert row.norms[broken[0]].title.startswith("77: ")
        assert row.norms[0].title.startswith("3: ")
    assert build_drift(layers[:1], steps).grouped == 1


def test_other_architectures_in_the_middle_are_named(tmp_path: Path) -> None:
    sizes = (2, 2, 3, 2)
    run = run_of(tmp_path / "run", *({"a/weight": np.ones((size, 2), np.float32)} for size in sizes))
    page, _ = written(run)
    (note,) = {text for text in page.text if "differ in names or shapes" in text}
    assert "ckpt-3.npz, ckpt-4.npz" in note
    assert "ckpt-2.npz" not in note


def test_commands_on_the_page_quote_names(tmp_path: Path) -> None:
    run = run_of(tmp_path / "$(touch owned) run", *[{"a": np.ones(3, np.float32)}] * 2)
    page, _ = written(run)
    commands = [text for text in page.text if text.startswith("ckpttool ") and "owned" in text]
    assert len(commands) == 3
    assert [shlex.split(command)[2] for command in commands[:2]] == [str(run)] * 2
    assert shlex.split(commands[2])[2].startswith(str(run))


def test_the_film_that_is_given(tmp_path: Path, golden: Golden) -> None:
    film = write_gif(tmp_path / "ckpt-7500.gif")
    _, document = written(TORCH_SAMPLE.parent, "--video", film, out=tmp_path / "page.html")
    assert document["film"] == {"file": "ckpt-7500.gif", "checkpoint": "ckpt-7500.pt"}
    other = write_gif(tmp_path / "other.gif")
    _, document = written(TORCH_SAMPLE.parent, "--video", other, out=tmp_path / "page.html")
    assert document["film"]["checkpoint"] is None
    moving = tmp_path / "ckpt-7500.mp4"
    moving.write_bytes(b"\0\0\0\x18ftypisom" + bytes(12))
    page, document = written(TORCH_SAMPLE.parent, "--video", moving, out=tmp_path / "page.html")
    assert document["film"] == {"file": "ckpt-7500.mp4", "checkpoint": "ckpt-7500.pt"}
    (video,) = (attributes for tag, attributes in page.elements if tag == "video")
    kind, _, data = (video["src"] or "").partition(",")
    assert (kind, base64.b64decode(data)) == ("data:video/mp4;base64", moving.read_bytes())
    assert {"controls", "muted", "aria-label"} <= video.keys()
    policy = next(
        attributes["content"] or "" for _, attributes in page.elements if "http-equiv" in attributes
    )
    assert "media-src data:; " in policy
    assert "img-src" not in policy
    write_gif(tmp_path / "large.gif", 4 << 20)
    (tmp_path / "film.mp4").write_bytes(bytes(100))
    for name in ("large.gif", "film.mp4", "none.gif"):
        golden(refused(in_process("report", TORCH_SAMPLE.parent, "--video", name, "-q", cwd=tmp_path)))
    golden(refused(in_process("report", TORCH_SAMPLE, "--video", "other.gif", cwd=tmp_path)))
    golden(refused(in_process("report", TORCH_SAMPLE.parent, "--conversion", "x.json", "-q", cwd=tmp_path)))
    golden(
        refused(in_process("report", TORCH_SAMPLE.parent, "--video", film, "--out", film, "--force", "-q"))
    )
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["page.html"]


MONITOR = '#{{"t_start": {start}, "env_id": "X"}}\nr,l,t\n{rows}\n'
LOGS: dict[str, tuple[dict[str, str], list[int], list[float], str]] = {
    "progress.csv": (
        {"progress.csv": "time/total_timesteps,rollout/ep_rew_mean\n10,1.5\n20,\n30,2.5\n"},
        [10, 30], [1.5, 2.5], "training",
    ),
    "evaluation first": (
        {"progress.csv": "time/total_timesteps,rollout/ep_rew_mean,eval/mean_reward\n10,1.5,7\n"},
        [10], [7.0], "evaluation",
    ),
    "progress.txt": (
        {"progress.txt": "Epoch\tAverageTestEpRet\tTotalEnvInteracts\n1\t-3\t400\n2\t-2\t800\n"},
        [400, 800], [-3.0, -2.0], "evaluation",
    ),
    "monitors of two environments": (
        {"0.monitor.csv": MONITOR.format(start=100.0, rows="1,5,1.0\n2,5,3.0"),
         "1.monitor.csv": MONITOR.format(start=101.0, rows="9,7,1.0")},
        [5, 12, 17], [1.0, 9.0, 2.0], "training",
    ),
    "other tables": ({"progress.csv": "a,b\n1,2\n", "monitor.csv": "nothing\n"}, [], [], ""),
    "no numbers": ({"progress.csv": "time/total_timesteps,eval/mean_reward\nx,nan\n1e400,1\n"}, [], [], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGS)
def test_returns_that_libraries_log(case: str, tmp_path: Path) -> None:
    files, steps, values, of = LOGS[case]
    (tmp_path / "run" / "models").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / "run" / name).write_text(content)
    for location in ("run/ckpt-1.npz", "run/models/ckpt-1.npz"):
        curves = find_logs(str(tmp_path / location)).curves
        assert [curve.steps.tolist() for curve in curves] == ([steps] if steps else [])
        assert [curve.values.tolist() for curve in curves] == ([values] if steps else [])
        assert [curve.of for curve in curves] == ([of] if steps else [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("monitor.csv", b"#[1]\nr,l,t\n1,2,3\n"),
        ("monitor.csv", b"#" + b"[" * 200_000),
        ("monitor.csv", b"#{}\nr,t\n1,2\n"),
        ("monitor.csv", b'#{"t_start": 0}\nr,l,t\n1,1e300,3\n'),
        ("progress.csv", b"total_timesteps,ep_reward_mean\n1," + b"9" * 200_000 + b"\n"),
        ("progress.csv", b'total_timesteps,ep_reward_mean\n1,"' + b"9" * 200_000 + b"\n"),
        ("evaluations.npz", {"timesteps": np.array([np.inf]), "results": np.ones((1, 2))}),
        ("evaluations.npz", b"PK"),
    ],
)
def test_logs_of_any_content_are_named(name: str, content: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *[{"a": np.ones(3, np.float32)}] * 2)
    if isinstance(content, bytes):
        (run / name).write_bytes(content)
    else:
        np.savez(run / name, **content)
    logs = find_logs(str(run / "ckpt-2.npz"))
    assert not logs.curves
    assert all(len(note) < 400 for note in logs.notes)
    assert len(logs.notes) == 1


def test_evaluations_of_a_callback_are_a_curve(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {"w": np.ones(2)}, {"w": np.ones(2)})
    np.savez(
        run / "evaluations.npz", timesteps=np.array([100, 200]), results=np.array([[1.0, 3.0], [5.0, 7.0]])
    )
    page, document = written(run)
    (curve,) = document["training_curves"]
    assert (curve["steps"], curve["values"], curve["of"]) == ([100, 200], [2.0, 6.0], "evaluation")
    assert "logged (evaluation): results" in page.words


def test_curves_of_different_units_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (2500, 15000):
        shutil.copy(TORCH_SAMPLE.with_name(f"ckpt-{step}.pt"), run)
    (run / "progress.csv").write_text("time/total_timesteps,eval/mean_reward\n2500,-9\n15000,-1\n")
    run_files = find_run(str(run))
    assert run_files is not None
    inputs = RunInputs([str(write_results(tmp_path, {2500: -9.0, 15000: -1.0}, run=run))])
    evaluated, logged = gather_run(run_files, inputs=inputs).results.curves
    # The samples count updates, which begin after 1,000 steps without any.
    assert [point[0] for point in evaluated.points] == [1500, 14000]
    assert [point[0] for point in logged.points] == [2500, 15000]
    assert "updates" in evaluated.label
    assert "log" in logged.label.rpartition(",")[2]


# --- The page ---------------------------------------------------------------------------------------


def test_the_page_is_one_file(sample: tuple[Page, dict[str, Any], Path]) -> None:
    page, document, _ = sample
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "audio", "video")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "style", "action", "data", "ping")
            if name == "href":
                assert (value or "").startswith("#")
    policy = next(
        attributes["content"] or "" for _, attributes in page.elements if "http-equiv" in attributes
    )
    assert "img-src" not in policy
    for checkpoint in document["checkpoints"]:
        assert checkpoint["sha256"][:12] in page.words
    assert document["best"] is document["film"] is None


def test_the_same_run_gives_the_same_bytes(sample: tuple[Page, dict[str, Any], Path]) -> None:
    _, _, folder = sample
    written(TORCH_SAMPLE.parent, out=folder / "again.html")
    assert (folder / "again.html").read_bytes() == (folder / "page.html").read_bytes()


def test_hostile_names_stay_text(tmp_path: Path, sample: tuple[Page, dict[str, Any], Path]) -> None:
    run = run_of(
        tmp_path / "<b>run", *({f"{name[:200]}/w": np.ones(3) * k for name in HOSTILE} for k in (1, 2))
    )
    page, _ = written(run)
    known = {tag for tag, _ in sample[0].elements}
    assert {tag for tag, _ in page.elements} <= known | {"h3", "ul", "li"}
    whole = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not any(character in whole for character in "\x1b\u202e\u2028")


def test_small_parameters_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run", *({"l/w": np.full(4, float(k)), "l/b": np.ones(2)} for k in range(4)))
    result = find_run(str(run))
    read: list[str] = []
    real = Leaf.values
    monkeypatch.setattr(Leaf, "values", lambda leaf: read.append(leaf.key) or real(leaf))
    assert result is not None
    (layer,) = follow_run(result).layers
    assert layer.changes == (None, 2.0, 2.0, 2.0)
    assert sorted(read) == ["l/b"] * 4 + ["l/w"] * 4


def test_few_tensors_are_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    size = 1 << 18
    run = run_of(
        tmp_path / "run", *({f"l{n}/w": np.full(size, float(n + k)) for n in range(6)} for k in range(5))
    )
    run_files = find_run(str(run))
    assert run_files is not None
    tracemalloc.start()
    history = follow_run(run_files)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(history.layers) == 6
    # 30 tensors in all. At once: a tensor, those before it whose digest lags behind, the same tensor of the
    # checkpoint before, their difference, and temporary arrays.
    assert peak < 8 * size * 8


def test_one_pass_and_several_processes_give_the_same_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a run begin after a damaged checkpoint, and names disagree with counters."""
    monkeypatch.setattr(run_history, "_TOGETHER", 2)
    run = run_of(tmp_path / "run", *({"l/w": np.full(300, 2.0**k), "step": np.int64(k)} for k in range(6)))
    data = bytearray((run / "ckpt-2.npz").read_bytes())
    data[600] ^= 1
    (run / "ckpt-2.npz").write_bytes(data)
    (run / "ckpt-4.npz").rename(run / "ckpt-9.npz")
    opened: list[str] = []
    monkeypatch.setattr(
        run_history,
        "_open_member",
        lambda checkpoint, _, real=_open_member: opened.append(checkpoint.path) or real(checkpoint, _),
    )
    documents = []
    for jobs in (None, 1, 2):
        reading = None if jobs is None else RunReading(jobs=jobs)
        run_files = find_run(str(run), reading=reading)
        assert run_files is not None
        documents.append(follow_run(run_files).document())
    assert documents[0] == documents[1] == documents[2]
    assert documents[0]["layers"][0]["updates"].count(None) == 3
    # Twice without a reading; once with one, but for two that names put after another checkpoint.
    assert len(opened) == 12 + 6 + 2


def test_a_checkpoint_that_ends_its_process_is_a_column_without_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "run", *({"l/w": np.full(3, float(k))} for k in range(3)))
    result = find_run(str(run))
    assert result is not None
    task = run_history._ReadTask(tuple(row.entry for row in result.members), None, RunReading(), values=True)
    assert [part.before and part.before.path for part in task.single()] == [
        None,
        *(member.path for member in result.members[:2]),
    ]
    (member,) = task.single()[1].failed(WorkerError("ended"))
    assert isinstance(member.error, WorkerError)
    assert (member.path, member.error.file) == (result.members[1].path, result.members[1].path)


@pytest.mark.parametrize("certain", [True, False, None])
def test_the_best_and_its_verdict_are_printed(certain: bool | None, tmp_path: Path, golden: Golden) -> None:
    run = run_of(tmp_path / "run", {"l/w": np.ones(3)}, {"l/w": np.zeros(3)})
    best = {"best": {"checkpoint": str(run / "ckpt-2.npz"), "certain": certain}}
    file = write_results(tmp_path, {1: -900.0, 2: -150.0}, run=run, **({} if certain is None else best))
    file.write_text(file.read_text().replace(".pt", ".npz"))
    golden(in_process("report", "run", "--eval", file, cwd=tmp_path))


def test_what_is_printed(tmp_path: Path, golden: Golden) -> None:
    run_of(tmp_path / "run", {"l/w": np.ones(3)}, {"l/w": np.zeros(3)})
    golden(in_process("report", "run", cwd=tmp_path))
    ran: Ran = in_process("report", "run", "--force", "-q", cwd=tmp_path)
    assert (ran.out, ran.err) == ("wrote run.report.html\n", "")
    golden(refused(in_process("report", "run", "-q", cwd=tmp_path)))


# --- Played for the page -----------------------------------------------------------------------------


def test_a_run_is_played_scored_and_filmed_for_its_page(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("pygame")
    words = ("--env", "Pendulum-v1", "--episodes", "2", "--out", tmp_path / "page.html", "--json")
    ran = in_process("report", TORCH_SAMPLE.parent, *words)
    assert ran.status == 0, ran.err
    document = ran.json()
    known = in_process(
        "eval", TORCH_SAMPLE.parent, "--env", "Pendulum-v1", "--episodes", "2", "--json"
    ).json()
    assert document["evaluations"] == 6
    assert document["run"]["best"]["mean"] == max(evaluation["mean"] for evaluation in known["evaluations"])
    assert document["run"]["film"]["checkpoint"] == document["run"]["best"]["checkpoint"].rpartition("/")[2]
    page = Page.of(tmp_path / "page.html")
    assert sum(attributes.get("id") == "film" for _, attributes in page.elements) == 1
    # Nothing but the page is left.
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_playing_needs_an_environment_and_a_free_name(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    options = ("--env", "Pendulum-v1", "--out", tmp_path / "page.html")
    for words in (("--episodes", "3"), options, ("--env", "NoSuch-v0", "--out", tmp_path / "other.html")):
        ran = in_process("report", TORCH_SAMPLE.parent, *words, cwd=tmp_path)
        assert (ran.status, ran.out) == (2, "")
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "mine"


def test_one_checkpoint_is_played_for_its_page(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    words = ("--env", "Pendulum-v1", "--episodes", "1", "--out", tmp_path / "page.html", "--json")
    assert in_process("report", TORCH_SAMPLE, *words).json()["evaluations"] == 1


def test_a_counter_has_one_column(tmp_path: Path) -> None:
    """`step` is the curve's step and the number in the name: results of `eval` have both."""
    file = write_results(tmp_path, {2500: -1.0}, run=TORCH_SAMPLE.parent)
    document = json.loads(file.read_text())
    document["evaluations"][0] |= {"step": 1500, "in_name": 2500, "updates": 1500}
    file.write_text(json.dumps(document))
    assert read_evaluations([str(file)]).counted == ("step", "updates")


def test_an_existing_page_is_refused_before_the_run_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpttool.commands.run_history.find_run", lambda *_: pytest.fail("the run was read"))
    (tmp_path / "page.html").write_text("mine")
    refused(in_process("report", TORCH_SAMPLE.parent, "-o", tmp_path / "page.html"))
