"""check: what must not be committed is found in each of many files, by one status; the hooks call it so."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from ckpttool.commands.check import CheckOptions, _CheckTask, check
from ckpttool.commands.stats import stats
from ckpttool.conversion.write import save
from ckpttool.core import Tree, WorkerError, display
from ckpttool.encodings import archives
from ckpttool.evaluation import scheduling
from ckpttool.formats import open_checkpoint
from ckpttool.listing import candidates, processes
from ckpttool.version import __version__
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, Ran, in_process, refused
from tests.golden_texts import Golden
from tests.pickles import ACTING
from tests.trees import leaf

EXAMPLE = (ROOT / "examples" / "ci" / "checkpoints.yml").read_text()
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good agent, its recorded shapes, and one file for each thing that must not be."""
    folder = tmp_path_factory.mktemp("files")
    tree = open_checkpoint(str(TORCH_SAMPLE)).tree
    at, weight = next((path, item) for path, item in tree.tensors() if display(path) == "actor/l1/weight")
    array = weight.array().copy()

    def changed(name: str, new: np.ndarray) -> None:
        save(Tree({**tree.leaves, at: leaf(new, weight.key)}), str(folder / name))

    shutil.copy(TORCH_SAMPLE, folder / "good.pt")
    changed("shape.pt", array[:, :2])
    changed("half.pt", array.astype(np.float16))
    array[1, 1], array[2, 2] = np.nan, np.inf
    changed("nan.pt", array)
    less = {path: item for path, item in tree.leaves.items() if path != at}
    save(Tree(less), str(folder / "less.pt"))
    (folder / "hostile.pkl").write_bytes(ACTING["GLOBAL + REDUCE"][0])
    damaged = bytearray(TORCH_SAMPLE.read_bytes())
    damaged[damaged.index(bytes(weight.read()))] ^= 1
    (folder / "damaged.pt").write_bytes(damaged)
    (folder / "pointer.pt").write_text(POINTER)
    (folder / "ckpttool-shapes.json").write_text(in_process("inspect", folder / "good.pt", "--json").out)
    return folder


def run(folder: Path, *arguments: object) -> Ran:
    return in_process("check", *arguments, cwd=folder)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("good.pt", "--strict --shapes ckpttool-shapes.json --layout td3_torch"),
        ("hostile.pkl", "--no-numbers"),
        ("nan.pt", ""),
        ("nan.pt", "--no-numbers"),
        ("shape.pt", ""),
        ("shape.pt", "--shapes ckpttool-shapes.json"),
        ("half.pt", "--shapes ckpttool-shapes.json"),
        ("less.pt", "--shapes ckpttool-shapes.json"),
        (TF_SAMPLE, "--shapes ckpttool-shapes.json"),
        ("good.pt", "--layout td3_tf"),
    ],
)
def test_one_file(files: Path, name: str, options: str, golden: Golden) -> None:
    golden(run(files, name, *options.split()))


def test_a_file_with_brackets_in_its_name_is_no_pattern(files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "nan.pt", tmp_path / "run[1].pt")
    shutil.copy(files / "good.pt", tmp_path / "run1.pt")
    assert run(tmp_path, "run[1].pt").status == 1
    (tmp_path / "run[1].pt").unlink()
    assert run(tmp_path, "run[1].pt").status == 0


def test_one_path_is_not_taken_for_its_letters() -> None:
    assert check(str(TORCH_SAMPLE)).checkpoints == check([str(TORCH_SAMPLE)]).checkpoints


def test_classes_are_found_by_those_who_want_plain_data_only(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "x.pkl").write_bytes(b"cpackage.module\nThing\n.")
    assert run(tmp_path, "x.pkl").status == 0
    ran = run(tmp_path, "x.pkl", "--strict")
    golden(ran)


def test_many_files_are_all_looked_at_and_the_worst_counts(files: Path, golden: Golden) -> None:
    ran = run(files, "nan.pt", "good.pt", "pointer.pt", "hostile.pkl", "damaged.pt")
    assert ran.status == 2
    assert [line.split(":")[0] for line in ran.out.splitlines() if not line.startswith(" ")] == [
        "nan.pt", "good.pt", "hostile.pkl", "5 checkpoints",
    ]  # fmt: skip
    golden(ran.out.splitlines()[-1])
    errors = [line for line in ran.err.splitlines() if line.startswith("ckpttool: ")]
    assert [line.split(": ")[1] for line in errors] == ["pointer.pt", "damaged.pt"]
    assert "actor/l1/weight" in errors[1]
    assert run(files, "nan.pt", "good.pt").status == 1
    quiet = run(files, "good.pt", "nan.pt", "--quiet").out
    assert "good.pt" not in quiet
    assert "nan.pt" in quiet


def test_the_parts_of_a_bundle_are_one_checkpoint_and_a_folder_all_in_it() -> None:
    parts = [f"{TF_SAMPLE}{end}" for end in (".index", ".data-00000-of-00001", ".ckpttool.json")]
    assert [checkpoint.path for checkpoint in check(parts).checkpoints] == [str(TF_SAMPLE)]
    assert len(check([str(TF_SAMPLE.parent)]).checkpoints) == 6


def test_the_document(files: Path) -> None:
    ran = run(files, "nan.pt", "pointer.pt", "--json")
    assert (ran.status, ran.err) == (2, "")
    document = ran.json()
    assert document["clean"] is False
    bad, unread = document["checkpoints"]
    assert (bad["format"], bad["layout"], bad["tensors"], bad["error"]) == ("pytorch", "td3_torch", 90, None)
    assert [finding["topic"] for finding in bad["findings"]] == ["numbers"]
    assert unread["error"]["kind"] == "not_a_checkpoint"
    assert (unread["findings"], unread["format"]) == ([], None)
    assert run(files, "good.pt", "--json").json()["clean"] is True


def test_bad_input_of_one_file_is_one_sentence(files: Path, tmp_path: Path, golden: Golden) -> None:
    golden(refused(run(files, "pointer.pt")))
    assert "checksum" in refused(run(files, "damaged.pt"))
    golden(refused(run(files, "good.pt", "--layout", "td4")))
    ran = run(files, "good.pt", "--shapes", "none.json")
    refused(ran)
    golden(ran)
    (tmp_path / "other.json").write_text(in_process("digest", TORCH_SAMPLE, "--json").out)
    odd = '{"layout": null, "tensors": [{"path": 7, "dtype": 7, "shape": ["x"]}]}'
    for text in ("[1]", "{}", '{"layout": null, "tensors": [7]}', odd):
        (tmp_path / "saved.json").write_text(text)
        refused(run(files, "good.pt", "--shapes", tmp_path / "saved.json"))
    golden(refused(run(files, "good.pt", "--shapes", tmp_path / "other.json")))


# --- The hooks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "bad"),
    [
        ("ckpttool-pickles", ["hostile.pkl", "pointer.pt"]),
        ("ckpttool-check", ["hostile.pkl", "nan.pt", "damaged.pt"]),
        ("ckpttool-layout", ["shape.pt", "half.pt", "less.pt"]),
    ],
)
def test_what_a_hook_runs_passes_the_good_and_fails_the_bad(files: Path, hook: str, bad: list[str]) -> None:
    command, *options = [*shlex.split(HOOKS[hook]["entry"]), *HOOKS[hook].get("args", [])]
    assert command == "ckpttool"
    ran = in_process(*options, "good.pt", cwd=files)
    assert ran.status == 0, ran.err
    for name in bad:
        ran = in_process(*options, "good.pt", name, cwd=files)
        assert ran.status in (1, 2), name
        assert f"{name}: " in ran.out + ran.err


def test_the_hooks_take_checkpoints_and_nothing_else() -> None:
    pattern = re.compile(HOOKS["ckpttool-check"]["files"])
    names = [path.name for path in (ROOT / "sample_ckpts").rglob("*") if path.is_file()]
    assert {Path(name).suffix for name in names if not pattern.search(name)} == {"", ".json", ".md"}
    assert {Path(name).suffix for name in names if pattern.search(name)} == {
        ".pt",
        ".index",
        ".data-00000-of-00001",
    }
    assert not [name for name in ("README.md", "data.zip", "train.py", "x.pt.txt") if pattern.search(name)]
    own = [suffix for suffix, kind in candidates.SUFFIXES.items() if kind == candidates.OWN]
    assert [suffix for suffix in own if not pattern.search(f"runs/x{suffix}")] == []
    assert pattern.search("model/saved_model.pb")
    assert len({hook["files"] for hook in HOOKS.values()}) == 1


def test_what_the_example_job_runs_tells_shapes_apart(files: Path) -> None:
    steps = yaml.safe_load(EXAMPLE)["jobs"]["check"]["steps"]
    (layout,) = (
        match[1].split()
        for step in steps
        if (match := re.search(r"xargs -0 -r ckpttool (.*)", step.get("run", "")))
    )
    assert in_process(*layout, "good.pt", cwd=files).status == 0
    assert in_process(*layout, "shape.pt", cwd=files).status == 1
    (own_step,) = (step for step in steps if step.get("uses", "").startswith("ckpttool/ckpttool@"))
    assert own_step["uses"].endswith(f"@v{__version__}")
    assert set(own_step["with"]) <= set(ACTION["inputs"])


@pytest.mark.parametrize(
    ("name", "options", "status"),
    [
        ("good.pt", {}, 0),
        ("hostile.pkl", {}, 1),
        ("nan.pt", {"sarif": "found here.sarif"}, 1),
        ("nan.pt", {"options": "--no-numbers --quiet", "paths": "nan.pt nan.pt"}, 0),
        ("damaged.pt", {}, 2),
        ("pointer.pt", {"sarif": "out.sarif"}, 2),
    ],
)
def test_the_action_checks_what_it_is_given(
    files: Path, tmp_path: Path, name: str, options: dict[str, str], status: int
) -> None:
    """The step's own script, with a program at the place where the step before installs it."""
    program = tmp_path / "runner" / "ckpttool" / "bin" / "ckpttool"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpttool "$@"\n')
    program.chmod(0o755)
    install, check = ACTION["runs"]["steps"]
    assert '"$RUNNER_TEMP/ckpttool/bin/pip" install' in install["run"]
    inputs = {name: options.get(name, row["default"]) for name, row in ACTION["inputs"].items()}
    env = {key: inputs[value[3:-2].strip().removeprefix("inputs.")] for key, value in check["env"].items()}
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(files / name, folder)
    ran = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", check["run"]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RUNNER_TEMP": str(tmp_path / "runner"), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == status, ran.stderr
    assert {path.name for path in folder.iterdir()} == {name, *filter(None, [inputs["sarif"]])}


def test_the_open_sides_of_a_space_are_no_finding_and_other_infinities_are(tmp_path: Path) -> None:
    from tests import sb3_files as sb3

    agent, open_box = sb3.td3(), sb3.box([-np.inf] * sb3.OBS, [np.inf] * sb3.OBS)
    for name, more, clean in (
        ("space", {"observation_space": open_box}, True),
        ("other", {"last_original_obs": np.full(3, np.inf, np.float32)}, False),
    ):
        contents = sb3.members(sb3.states(agent), sb3.settings(sb3.TD3_POLICY, **more))
        result = check([sb3.put(tmp_path / f"{name}.zip", contents)])
        assert result.clean == clean
        assert stats(result.checkpoints[0].path).finite == clean


def test_a_member_of_an_archive_is_named_as_people_write_it(files: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "old.zip", "w") as archive:
        for name in ("good.pt", "hostile.pkl", "pointer.pt"):
            archive.write(files / name, name)
    inside = [f"zip://{name}::{tmp_path}/old.zip" for name in ("good.pt", "hostile.pkl", "pointer.pt")]
    paths = run(tmp_path, *inside, "--no-numbers", "--json").json()["checkpoints"]
    assert [checkpoint["path"] for checkpoint in paths] == inside
    assert shlex.split(paths[1]["findings"][0]["fix"])[2] == inside[1]


def test_models_that_are_not_checked_are_listed(tmp_path: Path, golden: Golden) -> None:
    shutil.copy(TORCH_SAMPLE, tmp_path / "good.pt")
    (tmp_path / "net.gguf").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "net.engine").write_bytes(b"\1\2\3\4")
    golden(run(tmp_path, "good.pt", "net.gguf", "net.engine", "--no-numbers"))
    golden(run(tmp_path, "net.gguf"))


# Many checkpoints, by several processes.


@pytest.mark.long
def test_processes_find_what_one_finds(files: Path, tmp_path: Path) -> None:
    """Verdicts, their order, errors and the files that belong to another checkpoint do not depend on jobs."""
    shutil.copytree(files, tmp_path / "files")
    shutil.copytree(TF_SAMPLE.parent, tmp_path / "tf")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.write(files / "nan.pt", "inside.pt")
    alone, several = (check([str(tmp_path)], jobs=jobs) for jobs in (1, 2))
    assert several.document() == alone.document()
    errors = [[vars(item.error) for item in result.failed if item.error] for result in (alone, several)]
    assert errors[0]
    assert errors[0] == errors[1]


def test_an_archive_is_listed_once_however_many_there_are(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.pt", "b.pt", "c.pt"):
        shutil.copy(files / "good.pt", tmp_path / name)
    listed: list[str] = []
    real = archives._read_archive
    monkeypatch.setattr(archives, "_KEPT", archives._ArchiveCache())
    monkeypatch.setattr(archives, "_ARCHIVES", 1)
    monkeypatch.setattr(
        archives, "_read_archive", lambda *range_: listed.append(range_[0].path) or real(*range_)
    )
    opened: list[str] = []
    real_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *how: opened.append(os.fspath(path)) or real_open(path, *how)
    )
    assert check([str(tmp_path)]).clean
    assert sorted(map(os.path.basename, listed)) == ["a.pt", "b.pt", "c.pt"]
    assert sorted(os.path.basename(item) for item in opened if item.endswith(".pt")) == [
        "a.pt",
        "b.pt",
        "c.pt",
    ]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_archive_with_a_checkpoints_suffix_that_is_none_is_an_error(
    jobs: int, files: Path, tmp_path: Path
) -> None:
    shutil.copy(files / "good.pt", tmp_path)
    with zipfile.ZipFile(tmp_path / "notes.pt", "w") as archive:
        archive.writestr("notes.txt", "nothing to load")
    with zipfile.ZipFile(tmp_path / "hostile.pth", "w") as archive:
        archive.write(files / "hostile.pkl", "inner.pkl")
    with zipfile.ZipFile(tmp_path / "two.pt", "w") as archive:  # what PyTorch opens, and what Keras opens
        archive.writestr("two/data.pkl", b"N.")
        archive.writestr("config.json", "{}")
        archive.writestr("metadata.json", "{}")
    result = check([str(tmp_path)], jobs=jobs)
    names = [os.path.basename(checkpoint.path) for checkpoint in result.checkpoints]
    assert names == ["good.pt", "hostile.pth", "notes.pt", "two.pt"]
    alone = [saved.document() for name in names for saved in check([str(tmp_path / name)]).checkpoints]
    assert [checkpoint.document() for checkpoint in result.checkpoints] == alone
    assert [bool(checkpoint.findings) for checkpoint in result.checkpoints] == [False, True, False, False]
    assert [checkpoint.error is None for checkpoint in result.checkpoints] == [True, False, False, True]


def _die(*_: object) -> None:
    os._exit(3)


@pytest.mark.long
def test_file_that_ends_its_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_prepare_player", _die)
    ordered = candidates.collect_candidates([str(TORCH_SAMPLE)]).ordered()
    task = _CheckTask(ordered, CheckOptions())
    ((verdict, files),) = next(processes.run_tasks([task], (), 1))
    assert isinstance(verdict.error, WorkerError)
    assert (verdict.error.file, files) == (str(TORCH_SAMPLE), ())


@pytest.mark.parametrize(("many", "jobs", "expected"), [(1, 4, 1), (9, 4, 4), (9, None, 1)])
def test_few_checkpoints_start_no_process(many: int, jobs: int | None, expected: int) -> None:
    assert processes.count_jobs(many, jobs) == expected
    assert processes.count_jobs(processes.MANY, None) == len(os.sched_getaffinity(0))
