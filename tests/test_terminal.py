"""What a person sees: it fits, it is coloured only where that is read, and it says what comes next."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpttool.cli import columns, console, next_steps
from ckpttool.commands.doctor import Diagnosis
from ckpttool.conversion.write import save
from ckpttool.core import LedgerEntry, MissingExtraError, UsageError
from ckpttool.evaluation import video as video_module
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, Ran, Terminal, in_process, refused
from tests.golden_texts import Golden
from tests.trees import torch_tree

STYLE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints that the examples of --help name."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("agent.pt", "new.pt", "downloaded.pt"):
        shutil.copy(TORCH_SAMPLE, folder / name)
    shutil.copy(f"{TORCH_SAMPLE}.ckpttool.json", folder / "agent.pt.ckpttool.json")
    shutil.copy(TORCH_SAMPLE.with_name("ckpt-2500.pt"), folder / "old.pt")
    for name in ("runs", "run"):
        (folder / name).mkdir()
        for file in TF_SAMPLE.parent.glob("c*"):
            if "-2500" in file.name or "-15000" in file.name or file.name == "checkpoint":
                shutil.copy(file, folder / name)
    assert in_process("convert", "agent.pt", "old.npz", "--no-verify", cwd=folder).status == 0
    os.remove(folder / "old.npz.ckpttool.json")
    shapes = in_process("inspect", "agent.pt", "--json", cwd=folder).out
    (folder / "shapes.json").write_text(shapes)
    return folder


def shown(example_folder: Path, *words: object, **env: str) -> Ran:
    return in_process(*words, cwd=example_folder, env={"TERM": "xterm-256color", **env}, kind=Terminal)


# Of everything that is listed, one of each kind.
SEEN = [
    ["inspect", "runs/ckpt-15000"],
    ["inspect", "runs"],
    ["inspect", "agent.pt", "--sort", "size", "--aliases"],
    ["stats", "agent.pt"],
    ["stats", "runs/ckpt-15000", "--depth", "2", "--sort", "size"],
    ["doctor", "agent.pt"],
    ["diff", "old.pt", "new.pt"],
    ["diff", "agent.pt", "new.pt"],
    ["convert", "runs/ckpt-15000", "x.pt", "--dry-run"],
    ["check", "runs", "agent.pt"],
    ["formats"],
    ["layouts"],
    ["backends"],
    ["limits"],
    ["schema"],
]


@pytest.mark.parametrize("words", SEEN, ids=" ".join)
def test_it_fits_eighty_columns(example_folder: Path, words: list[str]) -> None:
    process = shown(example_folder, *words, COLUMNS="80")
    assert process.status in (0, 1), process.err
    lines = [line for line in STYLE.sub("", process.out).splitlines() if not line.startswith("next: ")]
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("words", [["inspect", "agent.pt"], ["limits"]], ids=" ".join)
def test_colours_and_next_steps_are_for_terminals_and_for_those_who_want_them(
    example_folder: Path, words: list[str]
) -> None:
    assert "\x1b" in shown(example_folder, *words).out
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in shown(example_folder, *words, **env).out
    piped = in_process(*words, cwd=example_folder).out
    assert not re.search("\x1b|next: ", piped)
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        assert "\x1b" in in_process(*words, cwd=example_folder, env={name: "1"}).out
        assert "\x1b" not in in_process(*words, cwd=example_folder, env={name: "0"}).out
    assert "next: " not in shown(example_folder, *words, "--quiet").out


@pytest.mark.parametrize(
    ("hint", "command"),
    [
        ("ckpttool eval {}", "ckpttool eval {}"),
        ("to see why, run it on one checkpoint: ckpttool eval {}", "ckpttool eval {}"),
        ("pip install 'ckpttool[eval] @ {}'", "pip install 'ckpttool[eval] @ {}'"),
        ("/opt/python3 -m pip install {}", "/opt/python3 -m pip install {}"),
        ("--to torch and the target {}", "--to torch and the target {}"),
    ],
)
def test_a_command_in_a_hint_is_one_line(
    hint: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    path = "a folder/" * 12
    console.print_error(UsageError("x", hint=hint.format(path)), as_json=False)
    printed = capsys.readouterr().err.splitlines()
    assert any(line.removeprefix("hint: ").strip() == command.format(path) for line in printed)


def test_a_wide_terminal_is_used(example_folder: Path) -> None:
    narrow, wide = (
        shown(example_folder, "inspect", "runs/ckpt-15000", COLUMNS=width, LINES="200").out
        for width in ("80", "200")
    )
    assert "…" in narrow
    assert "policy/critic/q2/l2/kernel" in wide
    assert "…" not in wide
    narrow, wide = (shown(example_folder, "limits", COLUMNS=width).out for width in ("80", "200"))
    assert len(wide.splitlines()) < len(narrow.splitlines())


def test_long_names_lose_their_middle_on_a_terminal_and_are_whole_in_a_pipe(tmp_path: Path) -> None:
    deep = ".".join(f"a_rather_long_name_of_a_module_{n}" for n in range(6))
    for name, number in (("a.pt", 1), ("b.pt", 2)):
        tensors = {f"{deep}.weight": np.full((9, 9), number, np.float32), f"{deep}.{name[0]}": np.ones(2)}
        save(torch_tree({**tensors, "dead": np.full(3, np.nan, np.float32)}), str(tmp_path / name))
    for words in (
        ["inspect", "a.pt"],
        ["stats", "a.pt"],
        ["diff", "a.pt", "b.pt"],
        ["convert", "a.pt", "x.npz", "--dry-run"],
    ):
        lines = shown(tmp_path, *words, NO_COLOR="1").out.splitlines()
        assert max(map(len, lines)) <= 80
        assert any("…" in line and line.startswith(("a_rather", "    -> a_rather")) for line in lines)
        if words[0] in ("diff", "convert"):
            assert deep.replace(".", "/") in in_process(*words, cwd=tmp_path).out


@pytest.mark.environment
def test_a_ranking_and_a_folder_fit_whatever_their_paths_are(example_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    folder = shutil.copytree(example_folder / "run", tmp_path / ("deep" * 15))
    for words in (["eval", folder, "--episodes", "2", "--no-chart"], ["inspect", folder, "--depth", "1"]):
        lines = STYLE.sub("", shown(tmp_path, *words).out).splitlines()
        rows = [line for line in lines if re.search(r"…\S*ckpt-\d+", line)]
        assert len(rows) >= 2
        assert max(map(len, rows)) <= 80
        # In a pipe they are whole.
        assert f"  {folder}/ckpt-2500" in in_process(*words, cwd=tmp_path).out


def next_of(ran: Ran) -> list[list[str]]:
    whole = STYLE.sub("", ran.out)
    assert max((len(line) for line in whole.partition("next: ")[2].splitlines()), default=0) <= 80
    assert len(ran.suggested()) <= 2
    return ran.suggested()


def test_a_video_is_suggested_only_where_one_can_be_written(
    example_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    words = ("eval", "agent.pt", "--env", "Pendulum-v1", "--episodes", "1")
    (video,) = next_of(shown(example_folder, *words))
    assert "--video" in video

    def refuse() -> None:
        raise MissingExtraError("no encoder")

    monkeypatch.setattr(video_module, "require_encoder", refuse)
    assert next_of(shown(example_folder, *words)) == []


def test_what_comes_next_is_said_with_the_paths_as_they_are(example_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    path = tmp_path / "my agent's.pt"
    shutil.copy(example_folder / "agent.pt", path)
    shutil.copy(example_folder / "agent.pt.ckpttool.json", f"{path}.ckpttool.json")
    convert, play = next_of(shown(tmp_path, "inspect", path))
    assert convert == ["convert", str(path), "ckpt-1", "--to", "tf"]
    # They are commands that can be typed as they stand.
    written = shown(tmp_path, *convert)
    assert written.status == 0, written.err
    assert next_of(written) == [["verify", str(path), "ckpt-1"], ["eval", "ckpt-1"]]
    played = shown(tmp_path, *play, "--episodes", "2")
    assert played.status == 0, played.err
    assert next_of(played) == [["eval", str(path), "--video", "agent.mp4"]]
    (tried,) = next_of(shown(tmp_path, "convert", path, "x.npz", "--dry-run", "--glob", "actor/**"))
    assert tried == ["convert", str(path), "x.npz"]
    assert next_of(shown(example_folder, "diff", "old.pt", "new.pt")) == [["verify", "old.pt", "new.pt"]]
    assert next_of(shown(example_folder, "diff", "agent.pt", "new.pt")) == []
    assert next_of(shown(example_folder, "doctor", "agent.pt")) == [["eval", "agent.pt"]]
    for where, ids in (("args.yml", []), ("", ["--env", "ID"])):
        ledger = (LedgerEntry("used", "environment", "Pendulum-v1", where, origin="" if where else "given"),)
        healthy = Diagnosis("zoo.zip", "stable_baselines3", "stable_baselines3", (), (), ledger)
        assert next_steps.after_doctor("zoo.zip", healthy) == [("eval", "zoo.zip", *ids)]
    assert next_of(shown(example_folder, "inspect", "new.pt"))[1] == [
        "eval",
        "new.pt",
        "--env",
        "Pendulum-v1",
    ]


def test_a_command_with_a_long_path_is_broken_between_its_steps(example_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a_folder_with_a_name_of_thirty/another folder with a name of so many letters/runs"
    folder.mkdir(parents=True)
    shutil.copy(example_folder / "agent.pt", folder)
    shutil.copy(example_folder / "agent.pt.ckpttool.json", folder)
    ran = shown(tmp_path, "inspect", folder / "agent.pt")
    assert [words[1] for words in next_of(ran)] == [str(folder / "agent.pt")] * 2


@pytest.mark.parametrize("words", [["inspect", "agent.pt"], ["inspect", "runs/ckpt-15000"], ["agent.pt"]])
def test_a_small_terminal_shows_what_the_networks_compute(example_folder: Path, words: list[str]) -> None:
    lines = STYLE.sub("", shown(example_folder, *words, COLUMNS="80", LINES="24").out).splitlines()
    flow = next(number for number, line in enumerate(lines) if line.startswith("actor") and "obs [3]" in line)
    tree = next(number for number, line in enumerate(lines) if line.split() == ["parameters", "size"])
    assert flow < tree
    assert "action [1] in -2 to 2 (4,481 parameters)" in "\n".join(lines)
    assert len(lines) <= 23


@pytest.mark.parametrize("name", ["-V", "--version"])
@pytest.mark.parametrize("words", [[], ["inspect"], ["convert"], ["eval", "no.pt"], ["report", "no.pt"]])
def test_every_command_prints_the_version(words: list[str], name: str) -> None:
    ran = in_process(*words, name)
    assert (ran.status, ran.out) == (0, in_process("--version").out)


def test_a_variable_forces_the_colors_of_help() -> None:
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        command = [sys.executable, "-m", "ckpttool", "inspect", "--help"]
        plain = {key: value for key, value in os.environ.items() if "COLOR" not in key}
        for variables, colored in (({name: "1"}, True), ({name: "1", "NO_COLOR": "1"}, False), ({}, False)):
            out = subprocess.run(command, env=plain | variables, capture_output=True, check=True).stdout
            assert (b"\x1b[1" in out) == colored, variables


def test_a_pattern_filters_wherever_tensors_are_listed(example_folder: Path) -> None:
    for words in (["digest", "agent.pt"], ["convert", "agent.pt", "x.npz", "--dry-run"]):
        document = in_process(*words, "--glob", "actor/l1/*", "--json", cwd=example_folder).json()
        paths = [leaf.get("path") or leaf["source"] for leaf in document.get("tensors") or document["mapped"]]
        assert paths == ["actor/l1/weight", "actor/l1/bias"]
    whole = in_process("digest", "agent.pt", "--json", cwd=example_folder).json()
    part = in_process("digest", "agent.pt", "--glob", "actor/**", "--json", cwd=example_folder).json()
    assert part["sha256"] == whole["sha256"]
    assert "dry-run" in refused(
        in_process("convert", "agent.pt", "x.npz", "--glob", "actor/**", cwd=example_folder)
    )


@pytest.mark.parametrize(
    "pattern",
    ["actr/**", "actor", "actor/l1/wieght", "xyz"],
)
def test_a_pattern_without_a_match_is_refused_with_the_closest(
    example_folder: Path, pattern: str, golden: Golden
) -> None:
    texts = set()
    for words in (
        ["stats", "agent.pt"],
        ["digest", "agent.pt"],
        ["diff", "old.pt", "new.pt"],
        ["convert", "agent.pt", "x.npz", "--dry-run"],
    ):
        ran = in_process(*words, "--glob", pattern, cwd=example_folder)
        refused(ran)
        texts.add(ran.err)
    golden("\n".join(sorted(texts)))
    listed = in_process("inspect", "agent.pt", "--glob", pattern, "--json", cwd=example_folder).json()
    golden("\n".join(note for note in listed["notes"] if pattern in note))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["insect", "agent.pt"], "inspect"),
        (["inspect", "agent.pt", "--dept", "2"], "--depth"),
        (["inspect", "agnt.pt"], "agent.pt"),
        (["inspect", "agent.pt", "--layout", "td3-torch"], "td3_torch"),
        (["inspect", "agent.pt", "--sort", "sise"], "size"),
        (["stats", "agent.pt", "--sort", "nrom"], "norm"),
        (["diff", "old.pt", "new.pt", "--by", "agnt"], "agent"),
        (["convert", "agent.pt", "x", "--to", "tensorfow"], "tf"),
        (["convert", "agent.pt", "x", "--to", "safetensor"], "safetensors"),
        (["eval", "agent.pt", "--env", "Pendulm-v1"], "Pendulum-v1"),
        (["eval", "agent.pt", "--backend", "trch"], "torch"),
        (["eval", "agent.pt", "--engine", "mujco"], "mujoco"),
        (["eval", "agent.pt", "--network", "actr"], "actor"),
        (["--limit", "member=5", "inspect", "agent.pt"], "members"),
        (["schema", "inspct"], "inspect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_was_meant_is_said(example_folder: Path, words: list[str], meant: str) -> None:
    if words[0] == "eval":
        pytest.importorskip("gymnasium")
    ran = in_process(*words, cwd=example_folder)
    refused(ran)
    assert meant in ran.err


# --- The examples of --help ----------------------------------------------------------------------------

# What others run: films and their writers, proofs by two frameworks' processes, a terminal's whole screen.
ELSEWHERE = re.compile(r"--video|--plot|^verify|^browse|^report")
FINDS = re.compile(r"^(diff|doctor)")


def examples() -> Iterator[str]:
    from ckpttool.cli.app import COMMANDS

    for command in COMMANDS:
        yield from re.split("; ", re.sub("^Examples?: ", "", command.examples))


@pytest.fixture(scope="module")
def fresh(example_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder, for what writes."""
    return Path(shutil.copytree(example_folder, tmp_path_factory.mktemp("fresh") / "place"))


@pytest.mark.environment
@pytest.mark.parametrize("example", list(examples()))
def test_the_examples_of_help_run(fresh: Path, example: str) -> None:
    pytest.importorskip("gymnasium")
    program, *words = shlex.split(example)
    assert program == "ckpttool"
    if ELSEWHERE.search(" ".join(words)):
        pytest.skip("it is run by the tests of its own command")
    target = None
    if ">" in words:
        *words, _, target = words
    if words[0] == "convert":
        words += ["--force", "--no-verify"]
    words = [name for word in words for name in (["agent.pt", "new.pt"] if word == "*.pt" else [word])]
    ran = in_process(*words, cwd=fresh)
    assert ran.status in ((0, 1) if FINDS.search(words[0]) else (0,)), ran.err
    if target is not None:
        (fresh / target).write_text(ran.out)


@pytest.mark.parametrize("at", [*range(1, 7), 8])
def test_each_text_of_a_line_is_escaped_alone(at: int) -> None:
    line = columns.ColumnLine(0, "name", "what", "1", "2", "note", "of ", below=("below",))
    raw = line._replace(**{line._fields[at]: ("\x1b[8m",) if at == 8 else "\x1b[8m"})
    assert "\x1b" in "".join(raw[1:7]) + "".join(raw.below)
    assert "\x1b" not in "".join(columns.align_columns([raw], 80))
