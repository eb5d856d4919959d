"""One behaviour for folders in every command: kinds of folders x commands."""

from __future__ import annotations

import ast
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpttool
from ckpttool.listing.folder import list_checkpoints
from ckpttool.listing.paths import choose_checkpoint, expand_paths
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process


def torch_file(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(TORCH_SAMPLE, file)


def bundle(folder: Path, *, state: bool = True, steps: tuple[int, ...] = (12500, 15000)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        for file in TF_SAMPLE.parent.glob(f"ckpt-{step}.[di]*"):
            shutil.copy(file, folder)
    if state:
        (folder / "checkpoint").write_text(f'model_checkpoint_path: "ckpt-{steps[-1]}"\n')


def torch_files(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            torch_file(folder / name)

    return make


def two_runs(folder: Path) -> None:
    bundle(folder / "a")
    bundle(folder / "b")


def unlike_runs(folder: Path) -> None:
    bundle(folder / "a")
    torch_files("b/ckpt-1.pt", "b/ckpt-2.pt")(folder)


def other_files(folder: Path) -> None:
    (folder / "README.md").write_text("# Nothing\n")
    (folder / "logs").mkdir()


def orbax(folder: Path) -> None:
    (folder / "_CHECKPOINT_METADATA").write_text("{}")


def sharded(folder: Path) -> None:
    """Write a Hugging Face model of one shard and its index."""
    ran = in_process("convert", TORCH_SAMPLE, folder / "model-00001-of-00001.safetensors", "--no-verify")
    assert ran.status == 0, ran.err
    names = in_process("inspect", folder / "model-00001-of-00001.safetensors", "--json").json()["tensors"]
    weights = {row["key"]: "model-00001-of-00001.safetensors" for row in names}
    index = {"metadata": {}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


CHOOSE, NOTHING, ITSELF = "choose", "nothing", ""
# What a folder contains, and the checkpoint that it stands for.
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "one file": (torch_files("agent.pt"), "agent.pt"),
    "one bundle": (lambda folder: bundle(folder, state=False, steps=(15000,)), "ckpt-15000"),
    "a run with its latest": (bundle, "ckpt-15000"),
    "a run without its latest": (torch_files("ckpt-1.pt", "ckpt-2.pt", "ckpt-10.pt"), CHOOSE),
    "different files": (torch_files("actor.pt", "best.pt"), CHOOSE),
    "one file and others": (lambda folder: (other_files(folder), torch_file(folder / "a.pt"))[0], "a.pt"),
    "a file in a subfolder": (torch_files("models/final/agent.pt"), "models/final/agent.pt"),
    "a run in a subfolder": (lambda folder: bundle(folder / "checkpoints"), "checkpoints/ckpt-15000"),
    "numbered files in a subfolder": (torch_files("models/ckpt-1.pt", "models/ckpt-2.pt"), CHOOSE),
    "two runs": (two_runs, CHOOSE),
    "a run with its latest beside one without": (unlike_runs, CHOOSE),
    "a sharded model": (sharded, ITSELF),
    "empty": (lambda _: None, NOTHING),
    "other files": (other_files, NOTHING),
    "an unsupported format": (orbax, NOTHING),
}
# `report` has a page for the checkpoints of one run: how many there are.
RUNS = {
    "a run with its latest": 2,
    "a run without its latest": 3,
    "a run in a subfolder": 2,
    "numbered files in a subfolder": 2,
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "digest": ("digest", "FOLDER"),
    "stats": ("stats", "FOLDER"),
    "doctor": ("doctor", "FOLDER"),
    "diff": ("diff", "FOLDER", str(TORCH_SAMPLE)),
    "diff, second": ("diff", str(TORCH_SAMPLE), "FOLDER"),
    "convert": ("convert", "FOLDER", "TMP/out.npz", "--dry-run", "--allow-missing"),
    "report": ("report", "FOLDER", "--out", "TMP/page.html", "--force"),
    "inspect, drawn": ("inspect", "FOLDER", "--graph", "TMP/modules.svg", "--force"),
}
# Commands that need frameworks or a terminal: they are refused after they have named the checkpoint.
LATER: dict[str, tuple[str, ...]] = {
    "verify": ("verify", "FOLDER", "absent.pt"),
    "verify, second": ("verify", str(TORCH_SAMPLE), "FOLDER", "--like-b", "absent:Model"),
    "browse": ("browse", "FOLDER"),
    "report": ("report", "FOLDER", "--eval", "absent.json"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("folders")
    for name, (make, _) in KINDS.items():
        (top / name).mkdir()
        make(top / name)
    return top


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_takes_a_folder(kind: str, command: str, folders: Path, tmp_path: Path) -> None:
    folder, expected = folders / kind, KINDS[kind][1]
    words = [w.replace("FOLDER", str(folder)).replace("TMP", str(tmp_path)) for w in COMMANDS[command]]
    ran = in_process(*words)
    if command == "report" and kind in RUNS:
        assert ran.status == 0, ran.err
        assert ran.err == f"using {RUNS[kind]} checkpoints of {folder}\n"
        assert len(in_process(*words, "--json").json()["run"]["checkpoints"]) == RUNS[kind]
    elif expected == CHOOSE:
        assert ran.status == 2
        assert not ran.out
        hint = next(line for line in ran.err.splitlines() if line.startswith("hint: ckpttool "))
        follow = shlex.split(hint.removeprefix("hint: ckpttool "))
        assert follow[0] == command.partition(",")[0]
        assert in_process(*follow).status in (0, 1)
    elif expected == NOTHING:
        assert ran.status == 2
        assert in_process(*words, "--json").json()["error"]["kind"] == "not_a_checkpoint"
    else:
        assert ran.status in (0, 1), ran.err
        assert ran.err == ("" if expected == ITSELF else f"using {folder / expected}\n")
        assert in_process(*words, "--quiet").err == ""


@pytest.mark.parametrize("command", LATER)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_names_the_checkpoint_first(kind: str, command: str, folders: Path) -> None:
    folder, expected = folders / kind, KINDS[kind][1]
    ran = in_process(*(word.replace("FOLDER", str(folder)) for word in LATER[command]))
    assert ran.status == 2
    first, *rest = ran.err.splitlines()
    if command == "report" and kind in RUNS:
        assert first == f"using {RUNS[kind]} checkpoints of {folder}"
    elif expected in (CHOOSE, NOTHING):
        assert str(folder) in first or command in ("browse", "report"), ran.err
        assert any(line.startswith("hint: ") for line in rest), ran.err
    elif expected:
        assert first == f"using {folder / expected}"
        assert rest[0].startswith("ckpttool: ")


@pytest.mark.parametrize("kind", KINDS)
def test_open_takes_a_folder(kind: str, folders: Path) -> None:
    folder, expected = folders / kind, KINDS[kind][1]
    if expected not in (CHOOSE, NOTHING):
        assert ckpttool.open(folder).path == str(folder / expected)
        return
    with pytest.raises(ckpttool.errors.NotACheckpointError) as error:
        ckpttool.open(folder)
    if expected == CHOOSE:
        assert error.value.hint is not None
        followed = ast.parse(error.value.hint, mode="eval").body
        assert isinstance(followed, ast.Call)
        assert ast.unparse(followed.func) == "ckpttool.open"
        assert ckpttool.open(ast.literal_eval(followed.args[0])).tree


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_alone_is_inspected(kind: str, folders: Path) -> None:
    alone, inspected = (in_process(*words, folders / kind) for words in ((), ("inspect",)))
    assert (alone.status == 2) == (inspected.status == 2)
    assert alone.err == inspected.err
    assert alone.out.startswith(inspected.out.rstrip("\n"))


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_lists_or_shows(kind: str, folders: Path) -> None:
    folder, expected = folders / kind, KINDS[kind][1]
    ran = in_process("inspect", folder, "--json")
    if expected == NOTHING:
        assert ran.json()["error"]["kind"] == "not_a_checkpoint"
        return
    assert ran.status == 0
    document = ran.json()
    assert (document["format"] is None) == (expected == CHOOSE)
    listed = {"a run with its latest": 2, "a run in a subfolder": 2, "one bundle": 1}
    assert kind not in listed or len(document["checkpoints"]) == listed[kind]
    if expected == CHOOSE:
        assert len(document["checkpoints"]) > 1
    else:
        assert document["path"] == str(folder / expected)


@pytest.mark.parametrize("kind", KINDS)
def test_eval_plays_every_checkpoint(kind: str, folders: Path) -> None:
    """`eval` plays all checkpoints of a run, `check` searches all folders below (tests/test_check.py)."""
    folder, expected = folders / kind, KINDS[kind][1]
    paths = [path.path for path in expand_paths([str(folder)])]
    if expected == NOTHING:
        assert paths == [str(folder)]
    elif expected != CHOOSE:
        assert str(folder / expected) in paths
    else:
        assert len(paths) > 1 or kind in ("two runs", "a run with its latest beside one without")
    if kind == "a run in a subfolder":
        assert paths == [path.path for path in expand_paths([str(folder / "checkpoints")])]
        assert len(paths) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_check_searches_every_folder(kind: str, folders: Path) -> None:
    folder, expected = folders / kind, KINDS[kind][1]
    ran = in_process("check", folder, "--no-numbers", "--json")
    if expected == NOTHING:
        assert (ran.status, ran.json()["error"]["kind"]) == (2, "not_a_checkpoint")
        return
    assert ran.status == 0
    checked = [row["path"] for row in ran.json()["checkpoints"]]
    assert expected not in checked
    counts = {"two runs": 4, "a run without its latest": 3, "a run in a subfolder": 2}
    assert kind not in counts or len(checked) == counts[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_textconv_prints_a_folder_and_never_fails(kind: str, folders: Path) -> None:
    expected = KINDS[kind][1]
    ran = in_process("textconv", folders / kind)
    assert (ran.status, ran.err) == (0, "")
    assert (len(ran.out.splitlines()) == 1) == (expected in (CHOOSE, NOTHING))


@pytest.mark.parametrize("command", ["verify"])
def test_both_sides_may_be_folders(
    command: str, folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckpttool.cli import parameters

    one = str(folders / "one file")
    assert parameters.use_checkpoint(one, quiet=False) == f"{one}/agent.pt"
    assert capsys.readouterr().err == f"using {one}/agent.pt\n"
    run = str(folders / "a run with its latest")
    assert choose_checkpoint(run).path == run
    assert choose_checkpoint(run).location == f"{run}/ckpt-15000"
    assert in_process(command, folders / "two runs", folders / "one file").status == 2


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "again").symlink_to(tmp_path)
    assert choose_checkpoint(str(tmp_path)).candidates == ()
    torch_file(tmp_path / "below" / "agent.pt")
    assert choose_checkpoint(str(tmp_path)).path == str(tmp_path / "below" / "agent.pt")


@pytest.mark.parametrize("names", [("index",), ("data-00000-of-00001",), ("index", "data-00000-of-00001")])
def test_a_checkpoint_without_one_of_its_files_is_incomplete(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        shutil.copy(f"{TF_SAMPLE}.{name}", tmp_path)
    (row,) = list_checkpoints(str(tmp_path))
    assert row.complete == (len(names) == 2)
