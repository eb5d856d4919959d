"""The command line: documents, exit codes, and one sentence for whatever is wrong."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ckpttool.cli import app, console
from ckpttool.commands.inspect import summary
from ckpttool.conversion.write import save
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, Ran, Terminal, ckpttool, in_process, refused, zipped
from tests.golden_texts import Golden
from tests.trees import torch_tree


def copy_bundle(folder: Path) -> Path:
    for file in TF_SAMPLE.parent.glob(f"{TF_SAMPLE.name}.*"):
        if "ckpttool" not in file.name:
            shutil.copy(file, folder)
    return folder / TF_SAMPLE.name


# --- A process: every command once, and once with what it refuses ------------------------------------

# What is enough for each command, and what some refuse.
ANSWERED: dict[str, list[object]] = {
    "inspect": [TF_SAMPLE],
    "digest": [TF_SAMPLE],
    "convert": [TF_SAMPLE, "out.pt", "--no-verify"],
    "verify": ["--help"],  # a proof as a process is in test_verify.py
    "eval": [TORCH_SAMPLE, "--env", "Pendulum-v1", "--episodes", "2"],
    "stats": [TORCH_SAMPLE],
    "doctor": [TORCH_SAMPLE],
    "check": [TF_SAMPLE, TORCH_SAMPLE],
    "textconv": [f"{TF_SAMPLE}.index"],
    "diff": [TORCH_SAMPLE, TORCH_SAMPLE],
    "report": [TORCH_SAMPLE],
    "browse": ["--help"],  # it draws on a terminal: test_browse.py
    **{name: [] for name in ("formats", "layouts", "backends", "limits", "schema")},
}
REFUSED: dict[str, list[object]] = {
    "inspect": ["none.pt"],
    "convert": [TORCH_SAMPLE, "out.nothing"],
    "verify": [TORCH_SAMPLE, "none.pt"],
    "formats": ["--nonsense"],
}


def test_every_command_is_run_as_a_process() -> None:
    from ckpttool.cli.app import COMMANDS

    assert {command.name for command in COMMANDS} == set(ANSWERED)


def both_ways(folder: Path, *arguments: object) -> tuple[Ran, Ran]:
    """Run a command as a process and in this one; assert that both print the same, and return what."""
    ran = []
    for run in (ckpttool, in_process):
        working_folder = folder / run.__name__
        working_folder.mkdir()
        ran.append(run(*arguments, cwd=working_folder))
    # Times and speeds differ from run to run, and so do widths; a process is told its program's name.
    one, other = (re.sub(r"[\d.,]+|python -m (?=ckpttool)|\s+", " ", process.out).split() for process in ran)
    assert one == other
    assert (ran[0].status, ran[0].err) == (ran[1].status, ran[1].err)
    return ran[0], ran[1]


@pytest.mark.long
@pytest.mark.parametrize("command", ANSWERED)
def test_a_process_answers_as_the_command_line_in_this_one(command: str, tmp_path: Path) -> None:
    if command == "eval":
        pytest.importorskip("gymnasium")
    ran, _ = both_ways(tmp_path, command, *ANSWERED[command])
    assert ran.status == 0, ran.err
    assert ran.out


@pytest.mark.long
@pytest.mark.parametrize("command", REFUSED)
def test_a_process_refuses_as_the_command_line_in_this_one(command: str, tmp_path: Path) -> None:
    refused(both_ways(tmp_path, command, *REFUSED[command])[0])


# --- inspect ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        TF_SAMPLE,
        f"{TF_SAMPLE}.index",
        f"{TF_SAMPLE}.data-00000-of-00001",
        TF_SAMPLE.parent / "checkpoint",
        TF_SAMPLE.parent,
    ],
    ids=["prefix", "index", "shard", "state file", "folder"],
)
def test_every_way_to_name_a_bundle(path: Path) -> None:
    ran = in_process("inspect", path, "--json")
    assert ran.status == 0, ran.err
    document = ran.json()
    assert Path(document["path"]) == TF_SAMPLE
    assert document["format"] == "tensor_bundle"
    assert document["layout"] == "td3_tf"


def test_the_document_of_inspect() -> None:
    document = in_process("inspect", TF_SAMPLE, "--json").json()
    assert document["schema"] == 1
    totals = document["totals"]
    roles = totals.pop("roles")
    assert {role: sums["tensors"] for role, sums in roles.items()} == {
        "parameter": 36, "slot": 36, "counter": 4, "other": 2
    }  # fmt: skip
    assert sum(sums["nbytes"] for sums in roles.values()) == totals["nbytes"]
    assert roles["slot"]["elements"] == totals["parameters"]
    assert totals == {
        "tensors": 78,
        "parameters": 2 * (4481 + 9090),
        "nbytes": sum(tensor["nbytes"] for tensor in document["tensors"]),
        "stored_nbytes": sum(
            file.stat().st_size
            for file in TF_SAMPLE.parent.glob("ckpt-15000.*")
            if "ckpttool" not in file.name
        ),
    }
    by_path = {tensor["path"]: tensor for tensor in document["tensors"]}
    kernel = by_path["policy/critic/q1/l1/kernel"]
    assert kernel["key"].startswith("policy/critic_optimizer/_trainable_variables/")
    assert kernel["keys"] == [{"attr": name} for name in ("policy", "critic", "q1", "l1", "_kernel")]
    assert (kernel["dtype"], kernel["shape"], kernel["nbytes"]) == ("float32", [4, 64], 1024)
    assert (kernel["role"], kernel["of"], kernel["slot"]) == ("parameter", None, None)
    moments = [t for t in document["tensors"] if t["of"] == "policy/critic/q1/l1/kernel"]
    assert sorted(t["slot"] for t in moments) == ["m", "v"]
    assert {t["role"] for t in moments} == {"slot"}
    assert by_path["policy/total_it"]["role"] == "counter"


def test_a_torch_moment_names_its_weight() -> None:
    document = in_process("inspect", TORCH_SAMPLE, "--json").json()
    by_key = {tensor["key"]: tensor for tensor in document["tensors"]}
    moment = by_key["critic_optimizer.state.6.exp_avg"]
    assert (moment["of"], moment["slot"], moment["role"]) == ("critic/q2/l1/weight", "exp_avg", "slot")
    assert {"path": "total_it", "keys": [{"key": "total_it"}], "type": "int", "value": 14000} in document[
        "values"
    ]


def test_a_glob_filters_and_totals_follow() -> None:
    document = in_process("inspect", TF_SAMPLE, "--glob", "actor/**", "--json").json()
    assert [t["path"] for t in document["tensors"]] == [
        f"policy/actor/l{n}/{name}" for n in (1, 2, 3) for name in ("kernel", "bias")
    ]
    assert document["totals"]["parameters"] == 4481
    one = in_process("inspect", TF_SAMPLE, "--glob", "*/actor/l2/k*", "--json").json()
    assert [t["path"] for t in one["tensors"]] == ["policy/actor/l2/kernel"]
    rooted = in_process("inspect", TF_SAMPLE, "--glob", "/actor/**", "--json").json()
    assert rooted["tensors"] == []


def test_the_tree_fits_a_terminal_and_has_no_colour_in_a_pipe() -> None:
    ran = in_process("inspect", TF_SAMPLE)
    assert ran.status == 0
    assert "\x1b" not in ran.out
    assert re.search(r"^        kernel +float32\[4, 64\] +256 +1\.02 kB$", ran.out, re.MULTILINE)
    assert re.search(r"  m of policy/[^…]*l3/kernel$", ran.out, re.MULTILINE)
    ran = in_process("inspect", TF_SAMPLE, "-q", env={"LINES": "200", "NO_COLOR": "1"}, kind=Terminal)
    assert re.search(r"  m of policy/\S*…\S*l3/kernel$", ran.out, re.MULTILINE)
    assert max(map(len, ran.out.splitlines())) <= 80
    wide = in_process("inspect", TF_SAMPLE, env={"COLUMNS": "200"})
    assert " policy/critic/q2/l3/kernel" in wide.out


def on_a_terminal(*words: str) -> str:
    """Return what a successful command prints on a terminal of 80 columns."""
    master, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        (sys.executable, "-m", "ckpttool", *words), stdout=terminal, env=environment
    ) as process:
        os.close(terminal)
        shown = b""
        # Linux says EIO where the last writer is gone.
        with contextlib.suppress(OSError):
            while piece := os.read(master, 1 << 16):
                shown += piece
        os.close(master)
    assert process.returncode == 0
    return shown.decode()


def test_help_has_its_colours_on_a_terminal() -> None:
    shown = on_a_terminal("check", "--help")
    assert "\x1b[" in shown
    assert r"\x1b" not in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r", "")
    assert max(map(len, plain.splitlines())) <= 80
    assert "\x1b" not in (piped := in_process("check", "--help").out)
    assert plain.split() == piped.split()


def test_sentences_are_wrapped_on_a_terminal_and_one_line_in_a_pipe(tmp_path: Path) -> None:
    command = ("convert", str(TF_SAMPLE), str(tmp_path / "x.pt"), "--dry-run")
    lines = on_a_terminal(*command).splitlines()
    (note,) = [line for line in in_process(*command).out.splitlines() if line.startswith("note: ")]
    assert len(note) > 80
    first = next(n for n, line in enumerate(lines) if line.startswith("note: "))
    below = list(itertools.takewhile(lambda line: line.startswith("    "), lines[first + 1 :]))
    assert " ".join([lines[first], *map(str.strip, below)]) == note
    assert max(map(len, (lines[first], *below))) <= 80


def test_names_from_a_file_are_never_raw(tmp_path: Path) -> None:
    names = ["\x1b[31mred", "line\nbreak", "nul\0", "bidi\u202etxt", "lone\udc80", "tab\t", "plain"]
    torch = torch_tree({name: np.zeros(1, np.float32) for name in names if "\udc80" not in name})
    save(torch, str(tmp_path / "x.pt"))
    for command in (["inspect"], ["inspect", "--keys"], ["digest"]):
        ran = in_process(command[0], tmp_path / "x.pt", *command[1:])
        assert ran.status == 0, ran.err
        assert not set("\x1b\0\u202e\t") & set(ran.out)
        assert r"\x1b[31mred" in ran.out
    document = in_process("inspect", tmp_path / "x.pt", "--json")
    assert "\x1b" not in document.out
    assert "\x1b[31mred" in [t["key"] for t in document.json()["tensors"]]


def test_native_keys_can_be_shown() -> None:
    ran = in_process("inspect", TF_SAMPLE, "--keys", "--glob", "critic/q1/l1/*", "--quiet")
    assert "policy/critic_optimizer/_trainable_variables/0/.ATTRIBUTES/VARIABLE_VALUE" in ran.out


# --- digest -----------------------------------------------------------------------------------------


def test_a_digest_can_be_saved_and_checked(tmp_path: Path) -> None:
    ran = in_process("digest", TORCH_SAMPLE, "--json")
    assert ran.status == 0
    document = ran.json()
    assert document["checksums"] == "verified"
    assert len(document["tensors"]) == 90
    saved = tmp_path / "saved.json"
    saved.write_text(ran.out)
    assert in_process("digest", TORCH_SAMPLE, "--check", saved).status == 0
    other = TORCH_SAMPLE.with_name("ckpt-12500.pt")
    differs = in_process("digest", other, "--check", saved, "--json")
    assert differs.status == 1
    check = differs.json()["check"]
    assert not check["equal"]
    assert "actor.l1.weight" in check["different"]
    assert check["only_here"] == check["only_saved"] == []


def test_a_digest_can_be_checked_against_a_sidecar() -> None:
    assert in_process("digest", TF_SAMPLE, "--check", f"{TF_SAMPLE}.ckpttool.json").status == 0
    other = TF_SAMPLE.with_name("ckpt-2500")
    assert in_process("digest", other, "--check", f"{TF_SAMPLE}.ckpttool.json").status == 1


def test_a_plain_value_is_part_of_the_whole_digest(tmp_path: Path) -> None:
    for number in (1, 2):
        save(torch_tree({"x": np.zeros(2, np.float32), "step": number}), str(tmp_path / f"{number}.pt"))
    one, two = (in_process("digest", tmp_path / f"{n}.pt", "--json").json() for n in (1, 2))
    assert one["tensors"] == two["tensors"]
    assert one["sha256"] != two["sha256"]


@pytest.mark.parametrize("content", ["not json", "[]", '{"x": 1}', '{"tensors": 3}', '{"tensors": [1]}'])
def test_what_is_no_saved_digest(tmp_path: Path, content: str) -> None:
    (tmp_path / "saved.json").write_text(content)
    refused(in_process("digest", TORCH_SAMPLE, "--check", tmp_path / "saved.json"))


def test_a_missing_saved_digest(tmp_path: Path) -> None:
    refused(in_process("digest", TORCH_SAMPLE, "--check", tmp_path / "none.json"))


# --- Bad input: one sentence, exit 2, nothing executed, nothing written ------------------------------


class Hostile:
    """Would leave a mark if anything built it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self.mark),))


def hostile_zip(path: Path, mark: Path) -> None:
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=2).dump({"weights": Hostile(mark)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        archive.writestr("archive/version", "3\n")


def bad_inputs(folder: Path) -> dict[str, Path]:
    """Return the path to pass to a command, by name of the case."""
    folder.mkdir()
    cases: dict[str, Path] = {"missing": folder / "none.pt"}

    def case(name: str, content: bytes, suffix: str = ".pt") -> None:
        file = folder / (name.replace(" ", "-") + suffix)
        file.write_bytes(content)
        cases[name] = file

    case("empty file", b"")
    case("one byte", b"x")
    case("lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    case("html", b"\n <!DOCTYPE html><html></html>")
    case("text", b"hello, I am a config\n")
    case("noise", bytes(range(128, 256)) * 20)
    case("gzip", b"\x1f\x8b\x08\0\0\0\0\0\0")
    case("hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100))
    case("cut zip", TORCH_SAMPLE.read_bytes()[:5000])
    case("zip of something", zipped({"a.txt": b"x"}))

    index, data = (Path(f"{TF_SAMPLE}{end}").read_bytes() for end in (".index", ".data-00000-of-00001"))

    def bundle(name: str, index: bytes, data: bytes | None) -> None:
        target = folder / name.replace(" ", "-")
        target.mkdir()
        (target / "c.index").write_bytes(index)
        if data is not None:
            (target / "c.data-00000-of-00001").write_bytes(data)
        cases[name] = target / "c"

    bundle("cut index", index[: len(index) // 2], data)
    bundle("wrong magic", index[:-8] + bytes(8), data)
    bundle("missing shard", index, None)
    bundle("short shard", index, data[:1000])
    flipped = bytearray(index)
    flipped[200] ^= 4
    bundle("flipped index", bytes(flipped), data)
    empty = folder / "empty-folder"
    empty.mkdir()
    cases["folder without a checkpoint"] = empty
    state = folder / "stale"
    state.mkdir()
    (state / "checkpoint").write_text('model_checkpoint_path: "../../etc/passwd"\n')
    cases["stale state file"] = state
    fifo = folder / "pipe"
    os.mkfifo(fifo)
    cases["fifo"] = fifo
    unix = socket.socket(socket.AF_UNIX)
    os.chdir(folder)  # a socket's path must be short
    unix.bind("s")
    unix.close()
    os.chdir(ROOT)
    cases["socket"] = folder / "s"
    (folder / "dangling").symlink_to(folder / "nowhere")
    cases["dangling link"] = folder / "dangling"
    return cases


CASES = [
    "missing", "empty file", "one byte", "lfs pointer", "html", "text", "noise", "gzip", "hdf5", "cut zip",
    "zip of something", "cut index", "wrong magic", "missing shard", "short shard", "flipped index",
    "folder without a checkpoint", "stale state file", "fifo", "socket", "dangling link",
]  # fmt: skip


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cases = bad_inputs(tmp_path_factory.mktemp("bad") / "in")
    assert set(cases) == set(CASES)
    return cases


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


# An index alone tells every name and shape: inspect lists these, and says what is missing.
BAD = [
    pytest.param(name, command, id=f"{name}-{command}")
    for name in CASES
    for command in ("inspect", "digest", "convert", "eval")
    if (name, command) != ("missing shard", "inspect")
]


@pytest.mark.parametrize(("name", "command"), BAD)
def test_bad_input(bad: dict[str, Path], name: str, command: str, tmp_path: Path) -> None:
    path = bad[name]
    before = snapshot(path.parent)
    extra = {"convert": [tmp_path / "out.pt"], "eval": ["--env", "Pendulum-v1"]}.get(command, [])
    refused(in_process(command, path, *extra, cwd=tmp_path))
    assert not list(tmp_path.iterdir())
    assert snapshot(path.parent) == before, "an input was touched"


# The words about broken HDF5 are those of its library.
@pytest.mark.parametrize("name", [name for name in CASES if name != "hdf5"])
def test_bad_input_is_named(bad: dict[str, Path], name: str, golden: Golden) -> None:
    folder = str(bad["missing"].parent)
    golden(refused(in_process("digest", bad[name])).replace(folder, "FOLDER"))


def test_an_index_without_its_shard_is_listed_with_what_is_missing(
    bad: dict[str, Path], golden: Golden
) -> None:
    ran = in_process("inspect", bad["missing shard"], "--json")
    assert ran.status == 0
    assert len(ran.json()["tensors"]) == 78
    golden("\n".join(ran.json()["notes"]))


def test_a_hostile_pickle_is_shown_and_nothing_of_it_is_run_or_written(
    tmp_path: Path, golden: Golden
) -> None:
    (folder := tmp_path / "in").mkdir()
    mark, path = folder / "MARK", folder / "hostile.pt"
    hostile_zip(path, mark)
    before = snapshot(tmp_path)
    shown = in_process("inspect", path)
    assert shown.status == 0
    golden(next(line for line in shown.out.splitlines() if line.startswith("note:")))
    assert in_process("inspect", path, "--json").json()["details"]["calls"]
    assert in_process("digest", path).status == 0
    assert in_process("eval", path, "--env", "Pendulum-v1").status == 2
    assert in_process("convert", path, folder / "out.pt").status in (1, 2)
    assert snapshot(tmp_path) == before


def test_bad_input_as_json(bad: dict[str, Path]) -> None:
    cases = {"missing": "not_found", "lfs pointer": "not_a_checkpoint", "wrong magic": "format"}
    for name, kind in cases.items():
        ran = in_process("inspect", bad[name], "--json")
        assert ran.status == 2
        assert not ran.err
        error = ran.json()["error"]
        assert set(error) == {"kind", "message", "file", "hint"}
        assert error["kind"] == kind


def test_a_flipped_data_byte_is_found_where_it_is(tmp_path: Path) -> None:
    prefix = copy_bundle(tmp_path)
    data = Path(f"{prefix}.data-00000-of-00001")
    content = bytearray(data.read_bytes())
    content[100_000] ^= 1
    data.write_bytes(content)
    assert in_process("inspect", prefix).status == 0  # listing reads no tensor
    sentence = refused(in_process("digest", prefix))
    assert "crc32c" in sentence
    assert "policy/" in sentence, "the tensor is not named"
    refused(in_process("convert", prefix, tmp_path / "x.pt"))
    assert not (tmp_path / "x.pt").exists()
    torch_copy = tmp_path / "t.pt"
    torch_content = bytearray(TORCH_SAMPLE.read_bytes())
    torch_content[100_000] ^= 1
    torch_copy.write_bytes(torch_content)
    refused(in_process("digest", torch_copy))


def test_an_unreadable_file(tmp_path: Path, golden: Golden) -> None:
    file = tmp_path / "x.pt"
    shutil.copy(TORCH_SAMPLE, file)
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("this user may read everything")
    golden(refused(in_process("inspect", file)))


def test_a_near_name_is_offered() -> None:
    ran = in_process("inspect", TF_SAMPLE.with_name("ckpt-1500"))
    refused(ran)
    assert "ckpt-15000" in ran.err


def test_a_folder_of_files_offers_them() -> None:
    ran = in_process("digest", TORCH_SAMPLE.parent)
    refused(ran)
    # The highest number comes first, by value and not by text.
    assert 0 < ran.err.index("ckpt-15000.pt") < ran.err.index("ckpt-10000.pt") < ran.err.index("ckpt-7500.pt")


def test_a_folder_of_folders_offers_what_is_nearest_and_follows_no_link(tmp_path: Path) -> None:
    deep = tmp_path / "runs" / "td3" / "seed0"
    deep.mkdir(parents=True)
    (deep.parent / "again").symlink_to(tmp_path / "runs")
    (deep / "notes.txt").write_text("nothing to read")
    assert in_process("inspect", "runs", cwd=tmp_path).status == 2
    (deep / "later").mkdir()
    for folder in (deep, deep / "later"):
        shutil.copy(TORCH_SAMPLE, folder / "agent.pt")
    assert in_process("inspect", "runs", "--json", cwd=tmp_path).json()["path"] == "runs/td3/seed0/agent.pt"
    assert in_process("doctor", "runs", cwd=tmp_path).err == "using runs/td3/seed0/agent.pt\n"
    checked = in_process("check", "runs", "--json", cwd=tmp_path).json()["checkpoints"]
    assert [row["path"] for row in checked] == ["runs/td3/seed0/agent.pt", "runs/td3/seed0/later/agent.pt"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["nonsense"],
        ["inspect", "x", "--nonsense"],
        ["eval", "x", "--episodes", "none"],
        ["inspect", ""],
    ],
    ids=str,
)
def test_wrong_usage(arguments: list[str]) -> None:
    refused(in_process(*arguments))


def test_wrong_usage_as_json() -> None:
    ran = in_process("inspect", "--json")
    assert ran.status == 2
    assert ran.json()["error"]["kind"] == "usage"


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m ckpttool inspect {TF_SAMPLE} --json | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == '{\n "schema'
    assert not done.stderr


def test_the_version() -> None:
    from ckpttool import __version__

    assert ckpttool("--version").out == in_process("-V").out == f"ckpttool {__version__}\n"


@pytest.mark.parametrize("kind", ["formats", "layouts", "backends"])
def test_listings(kind: str) -> None:
    rows = in_process(kind, "--json").json()[kind]
    text = in_process(kind).out
    assert len(rows) >= 3
    assert all(row["name"] in text for row in rows)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.long
def test_many_tensors_stay_many_lines(tmp_path: Path) -> None:
    save(torch_tree({f"block.{n}.w": np.zeros(1, np.float32) for n in range(3000)}), str(tmp_path / "x.pt"))
    ran = in_process("inspect", tmp_path / "x.pt")
    assert ran.status == 0
    assert sum("float32[1]" in line for line in ran.out.splitlines()) == 1
    ran = in_process("inspect", tmp_path / "x.pt", "--all")
    assert sum("float32[1]" in line for line in ran.out.splitlines()) == 3000


class Settings:
    """A user's class, pickled with the tensors."""

    def __init__(self) -> None:
        self.lr = 0.5


def test_an_object_shows_its_class_and_is_not_built(tmp_path: Path, golden: Golden) -> None:
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=2).dump({"args": Settings()})
    (tmp_path / "x.pt").write_bytes(zipped({"a/data.pkl": stream.getvalue(), "a/version": b"3\n"}))
    ran = in_process("inspect", tmp_path / "x.pt")
    assert ran.status == 0, ran.err
    golden("\n".join(line for line in ran.out.splitlines() if "Settings" in line))
    assert "= 0.5" in ran.out


def test_a_glob_without_a_match_is_noted(golden: Golden) -> None:
    golden(in_process("inspect", TF_SAMPLE, "--glob", "nope/**"))


def test_a_folder_of_bundles_without_a_state_file_offers_the_newest(tmp_path: Path) -> None:
    for step in (7500, 15000):
        for end in (".index", ".data-00000-of-00001"):
            shutil.copy(f"{TF_SAMPLE.with_name(f'ckpt-{step}')}{end}", tmp_path)
    ran = in_process("digest", tmp_path)
    refused(ran)
    assert ran.err.strip().endswith("ckpt-15000?")


def test_the_input_is_never_changed(tmp_path: Path) -> None:
    prefix = copy_bundle(tmp_path)
    before = snapshot(tmp_path)
    assert in_process("inspect", prefix).status == 0
    assert in_process("digest", prefix).status == 0
    assert snapshot(tmp_path) == before


def test_json_has_no_bare_nan(tmp_path: Path) -> None:
    save(
        torch_tree({"x": np.zeros(1, np.float32), "loss": float("nan"), "best": -np.inf}),
        str(tmp_path / "x.pt"),
    )
    text = in_process("inspect", tmp_path / "x.pt", "--json").out
    values = {
        v["path"]: v["value"] for v in json.loads(text, parse_constant=lambda c: pytest.fail(c))["values"]
    }
    assert values == {"loss": "NaN", "best": "-Infinity"}


def test_struct_is_little_endian_everywhere() -> None:
    document = in_process("digest", TF_SAMPLE, "--json", "--quiet").json()
    counter = next(t for t in document["tensors"] if t["path"] == "save_counter")
    import hashlib

    assert counter["sha256"] == hashlib.sha256(struct.pack("<q", 6)).hexdigest()


def test_a_list_of_very_many_objects_has_a_line_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"rows": [{"n": n, "x": [1.5, float("nan")]} for n in range(5)], "one": {"a": []}}
    short = console.render_document(content)
    monkeypatch.setattr(console, "_MANY", 4)
    long = console.render_document(content)
    assert json.loads(long) == json.loads(short)
    assert json.loads(long)["rows"][4] == {"n": 4, "x": [1.5, "NaN"]}
    assert sum(line.startswith('  {"n": ') for line in long.splitlines()) == 5


@pytest.mark.parametrize("most", [0, 1_000])
def test_records_of_a_document_are_written_as_their_objects(
    most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(torch_tree({"x": np.zeros(2, np.float32), "loss": float("nan")}), str(tmp_path / "x.pt"))
    result = summary(str(tmp_path / "x.pt"))
    monkeypatch.setattr(console, "_MANY", most)
    assert console.render_document(result.listed()) == console.render_document(result.document())
    output: list[int] = []
    monkeypatch.setattr(type(result.tensors[0]), "document", lambda row: output.append(id(row)) or {})
    lines = console._iter_document(result.listed())
    assert next(lines)
    assert not output


@pytest.mark.parametrize("command", [command.name for command in app.COMMANDS])
def test_the_short_help_is_one_screen_with_every_option(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A screen has 24 lines of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    short = in_process(command, "-h")
    lines = short.out.splitlines()
    assert (short.status, len(lines) <= 24) == (0, True), short.out
    assert max(map(len, lines[:-4])) <= 80
    every = re.findall(r"(?<=[ │])--(?:no-)?([a-z0-9-]+)", in_process(command, "--help").out)
    assert {*every} - {*re.findall(r"--(?:no-)?([a-z0-9-]+)", short.out)} <= {"help"}
