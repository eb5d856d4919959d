"""What a newcomer meets first: listings that fit the screen, and help with wrong words."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ckpttool.cli import console, evaluate, parameters
from ckpttool.cli.tree_tables import TreeView, render_tree
from ckpttool.commands.inspect import summary
from ckpttool.conversion.targets import infer_target_word
from ckpttool.conversion.write import save
from ckpttool.core import Span
from ckpttool.formats import open_checkpoint
from ckpttool.listing.outline import ListingOutline, SiblingGroup, missing_shards
from ckpttool.networks import tensorflow_backend
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, Ran, Terminal, in_process, refused
from tests.golden_texts import Golden
from tests.trees import torch_tree


def transformer(file: Path, blocks: int, width: int = 4) -> Path:
    """Write a model of equal blocks, whose names the format sorts alphabetically."""
    tensors = {"model.embed.weight": np.zeros((9, width), np.float32)}
    for n in range(blocks):
        for name in ("attn.k", "attn.o", "attn.q", "attn.v", "mlp.down", "mlp.up"):
            tensors[f"model.layers.{n}.{name}.weight"] = np.zeros((width, width), np.float32)
            tensors[f"model.layers.{n}.{name}.bias"] = np.zeros(width, np.float32)
    save(torch_tree(dict(sorted(tensors.items()))), str(file))
    return file


def flat(file: Path, number: int) -> Path:
    """Write tensors side by side, all of different shapes."""
    save(torch_tree({f"t{n}": np.zeros(n % 97 + 1, np.float32) for n in range(number)}), str(file))
    return file


def on_terminal(*words: object, lines: int = 24, cwd: Path | None = None, **env: str) -> Ran:
    environment = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": str(lines), **env}
    return in_process(*words, cwd=cwd, env=environment, kind=Terminal)


def groups(outline: ListingOutline) -> list[tuple[str, int]]:
    """Return name and count of all groups, from top to bottom."""
    assert outline.root is not None
    waiting, folded = list(reversed(outline.entries(outline.root))), []
    while waiting:
        name, entry = waiting.pop()
        if isinstance(entry, SiblingGroup):
            folded.append((name, entry.count))
        waiting += reversed(outline.children(entry))
    return folded


@pytest.mark.parametrize(("blocks", "tensors"), [(25, 301), (833, 9997)])
def test_a_large_model_fits_the_screen(blocks: int, tensors: int, tmp_path: Path, golden: Golden) -> None:
    file = transformer(tmp_path / "model.safetensors", blocks)
    text = on_terminal("inspect", file.name, NO_COLOR="1", cwd=tmp_path).out
    assert len(text.splitlines()) <= 23
    assert max(map(len, text.splitlines())) <= 80
    golden(text)
    whole = on_terminal("inspect", file, "--all", "--quiet")
    assert whole.out.count("float32[") == tensors
    assert len(in_process("inspect", file, "--json").json()["tensors"]) == tensors


@pytest.mark.parametrize("number", [300, 3000])
def test_a_flat_file_fits_the_screen(number: int, tmp_path: Path) -> None:
    file = flat(tmp_path / "flat.safetensors", number)
    assert len(on_terminal("inspect", file).out.splitlines()) <= 23
    assert len(on_terminal("inspect", file, lines=50).out.splitlines()) in range(40, 50)
    assert on_terminal("inspect", file, "--all").out.count("float32[") == number
    assert in_process("inspect", file).out.count("float32[") == number


def test_siblings_are_alike_by_their_whole_subtrees(tmp_path: Path) -> None:
    tensors = {f"net.{n}.{name}": np.zeros(2, np.float32) for n in range(12) for name in ("a", "b")}
    tensors["net.5.b"] = np.zeros(3, np.float32)
    tensors |= {f"pair{n}.w": np.zeros(2, np.float32) for n in range(2)}
    tensors |= {f"{name}.w": np.zeros(2, np.float32) for name in ("left", "middle", "right")}
    tensors |= {f"list.{n}": np.zeros(4, np.float32) for n in range(11)}
    file = tmp_path / "a.safetensors"
    save(torch_tree(tensors), str(file))
    listing = summary(str(file))
    assert groups(ListingOutline(listing.modules)) == [("0...4", 5), ("6...11", 6), ("0...10", 11)]
    assert groups(ListingOutline(listing.modules, whole=True)) == []
    text = render_tree(listing, TreeView(quiet=True))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "0...10 float32[4] (11 alike) 44 176 B" in rows
    assert "0...4 (5 alike) 20 80 B" in rows
    folded = render_tree(listing, TreeView(quiet=True, depth=2))
    assert "(6 alike, 12 tensors)" in folded
    for view in (TreeView(quiet=True, whole=True), TreeView(quiet=True, keys=True)):
        assert "alike" not in render_tree(listing, view)


def test_numbers_are_in_natural_order_where_names_are_sorted(tmp_path: Path) -> None:
    shapes = {str(n): np.zeros(n + 1, np.float32) for n in range(12)}
    for name, keys in (("sorted", sorted(shapes)), ("own", ["3", "11", "0"])):
        file = tmp_path / f"{name}.pt"
        save(torch_tree({key: shapes[key] for key in keys}), str(file))
        shown = [line.split()[0] for line in in_process("inspect", file, "-q").out.splitlines()[1:]]
        assert shown == (sorted(shapes, key=int) if name == "sorted" else keys)
        tensors = in_process("inspect", file, "--json").json()["tensors"]
        assert [tensor["path"] for tensor in tensors] == keys


def test_counters_show_their_values(tmp_path: Path) -> None:
    for sample, rows in ((TF_SAMPLE, {"save_counter": "6", "total_it": "14000"}), (TORCH_SAMPLE, {})):
        shown = in_process("inspect", sample).out
        for name, value in rows.items():
            assert re.search(rf"{name} +int64\[\] = {value} ", shown)
    many = {f"opt.{n}.step": np.array(n, np.float32) for n in range(100)}
    save(torch_tree({"w": np.zeros(3, np.float32), **many}), str(tmp_path / "a.pt"))
    assert in_process("inspect", tmp_path / "a.pt", "--all").out.count("[] = ") <= 64


def test_an_unreadable_counter_has_no_value(tmp_path: Path) -> None:
    for file in TF_SAMPLE.parent.glob("ckpt-15000*"):
        shutil.copy(file, tmp_path)
    row = open_checkpoint(str(TF_SAMPLE)).tree
    data = tmp_path / "ckpt-15000.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    for _, leaf in row.tensors():
        if leaf.role in ("counter", "other") and isinstance(leaf.source, Span):
            content[leaf.source.offset] ^= 1
    data.write_bytes(content)
    ran = in_process("inspect", tmp_path / "ckpt-15000")
    assert ran.status == 0
    assert "total_it" in ran.out
    assert "[] = " not in ran.out


def test_a_missing_shard_is_beside_the_path(tmp_path: Path) -> None:
    for file in TF_SAMPLE.parent.glob("ckpt-15000*"):
        shutil.copy(file, tmp_path)
    lost = tmp_path / "ckpt-15000.data-00000-of-00001"
    os.remove(lost)
    listing = summary(str(tmp_path / "ckpt-15000"))
    assert missing_shards(listing.checkpoint) == (lost.name,)
    assert lost.name in render_tree(listing, TreeView()).splitlines()[1]
    shard = transformer(tmp_path / "model-00001-of-00002.safetensors", 1)
    assert "model-00002-of-00002.safetensors" in in_process("inspect", shard).out.splitlines()[1]
    assert missing_shards(summary(str(TORCH_SAMPLE)).checkpoint) == ()


def test_code_in_a_pickle_comes_first_and_in_red(tmp_path: Path) -> None:
    file = tmp_path / "bad.pkl"
    file.write_bytes(b"\x80\x02}(X\x01\0\0\0acos\nsystem\nX\x04\0\0\0true\x85Ru.")
    first = on_terminal("inspect", file).out.splitlines()[0]
    assert first.startswith("\x1b[1;31m")
    assert "system" in first
    assert "system" in in_process("inspect", file).out.splitlines()[0]


def test_names_are_complete_in_a_pipe(tmp_path: Path) -> None:
    deep = ".".join(f"a_rather_long_name_of_a_module_{n}" for n in range(6))
    save(torch_tree({f"{deep}.weight": np.zeros(2), f"{deep}.b": np.zeros(2)}), str(tmp_path / "a.pt"))
    shown = in_process("inspect", tmp_path / "a.pt").out
    assert "…" not in shown
    assert deep.replace(".", "/") in shown
    assert "…" in on_terminal("inspect", tmp_path / "a.pt").out


class _Keyboard:
    def isatty(self) -> bool:
        return True


def test_a_long_listing_goes_through_the_pager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", _Keyboard())
    paged: list[tuple[list[str], str]] = []
    monkeypatch.setattr(
        console, "_run_pager", lambda command, text: bool(paged.append((command, text))) or True
    )
    file = flat(tmp_path / "flat.safetensors", 60)
    shown = on_terminal("inspect", file, "--all", "-q", PAGER="more -s")
    assert paged[0][0] == ["more", "-s"]
    assert paged[0][1].count("float32[") == 60
    assert not shown.out
    paged.clear()
    for words, env in ((("--all",), {"PAGER": "cat"}), ((), {"PAGER": "more"})):
        assert "float32[" in on_terminal("inspect", file, *words, **env).out
    assert in_process("inspect", file, "--all", env={"PAGER": "more"}).out.count("float32[") == 60
    assert not paged


def test_the_pager_gets_the_text(tmp_path: Path) -> None:
    copy = tmp_path / "seen"
    assert console._run_pager(["sh", "-c", f"cat > '{copy}'"], "one\ntwo")
    assert copy.read_text() == "one\ntwo\n"
    assert not console._run_pager([str(tmp_path / "absent")], "one")


def test_the_document_lists_everything(tmp_path: Path) -> None:
    """Folding changes the text only."""
    file = transformer(tmp_path / "model.safetensors", 4)
    assert in_process("inspect", file, "--json").out == on_terminal("inspect", file, "--json").out
    assert len(json.loads(in_process("inspect", file, "--json").out)["modules"]) > 4 * 8


def test_a_path_alone_is_listed_and_diagnosed(tmp_path: Path) -> None:
    shutil.copy(TORCH_SAMPLE, tmp_path / "agent.pt")
    alone = on_terminal("agent.pt", NO_COLOR="1", cwd=tmp_path)
    doctor = in_process("doctor", "agent.pt", cwd=tmp_path)
    assert alone.status == doctor.status
    assert doctor.out.splitlines()[-1] in alone.out
    assert len(alone.out.splitlines()) <= 23
    assert [words[:2] for words in alone.suggested()] == [["convert", "agent.pt"], ["eval", "agent.pt"]]
    assert in_process(TF_SAMPLE).status == in_process("doctor", TF_SAMPLE).status
    missing = in_process("agnt.pt", cwd=tmp_path)
    refused(missing)
    assert missing.err.endswith("agent.pt?\n")


def test_modules_come_before_values_where_not_all_fit(tmp_path: Path) -> None:
    content = {**{f"setting{n}" + "x" * n: n for n in range(30)}, "model.weight": np.ones(3, np.float32)}
    save(torch_tree(content), str(tmp_path / "training.pt"))
    text = on_terminal("inspect", "training.pt", NO_COLOR="1", cwd=tmp_path).out
    assert len(text.splitlines()) <= 23
    names = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert "model" in names
    assert "setting0" in names


def test_the_next_command_after_a_file_with_code_lists_it(tmp_path: Path) -> None:
    content = pickle.dumps({"reward": 1.0, "actor": os.getcwd}, protocol=2)
    with zipfile.ZipFile(tmp_path / "theirs.pt", "w") as archive:
        archive.writestr("agent/data.pkl", content)
        archive.writestr("agent/version", "3\n")
    text = on_terminal("inspect", "theirs.pt", cwd=tmp_path, NO_COLOR="1").out
    steps = [line.removeprefix("next: ckpttool ") for line in text.splitlines() if line.startswith("next: ")]
    assert steps == ["inspect theirs.pt --names"]
    listed = on_terminal(*shlex.split(steps[0]), cwd=tmp_path, NO_COLOR="1").out
    assert "posix.getcwd" in listed
    assert "next: " not in listed


def test_files_of_one_agent_are_one_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """TD3's authors' code writes several files per checkpoint."""
    document = in_process("inspect", corpus / "torch" / "fujimoto" / "bmcnns" / "models", "--json").json()
    names = [os.path.basename(row["path"]) for row in document["checkpoints"]]
    assert names == ["TD3_HalfCheetah-v3_0", "TD3_HalfCheetah-v3_1"]
    sizes = [
        sum(
            file.stat().st_size
            for file in (corpus / "torch" / "fujimoto" / "bmcnns" / "models").glob(f"{name}_*")
            if not file.suffix
        )
        for name in names
    ]
    assert [row["nbytes"] for row in document["checkpoints"]] == sizes


def test_logged_returns_are_no_checkpoint(tmp_path: Path) -> None:
    """EvalCallback of Stable-Baselines3 writes them beside the agent."""
    (tmp_path / "run").mkdir()
    np.savez(tmp_path / "run" / "evaluations.npz", timesteps=np.arange(3), results=np.ones((3, 2)))
    refused(in_process("stats", tmp_path / "run"))
    shutil.copy(TORCH_SAMPLE, tmp_path / "run" / "agent.pt")
    assert in_process("stats", tmp_path / "run").err.startswith(f"using {tmp_path / 'run' / 'agent.pt'}")
    assert in_process("inspect", tmp_path / "run" / "evaluations.npz").status == 0


def test_deeper_folders_are_named(tmp_path: Path) -> None:
    for name in ("a/one.pt", "a/two.pt", "b/deeper/three.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TORCH_SAMPLE, tmp_path / name)
    document = in_process("inspect", tmp_path, "--json").json()
    assert [os.path.basename(row["path"]) for row in document["checkpoints"]] == ["one.pt", "two.pt"]
    assert any(f"ckpttool check {tmp_path}" in note for note in document["notes"])
    assert "3 checkpoints" in in_process("check", tmp_path).out


@pytest.mark.parametrize(("scheme", "suffix"), [("zip", "zip"), ("tar", "tgz")])
def test_the_hint_of_an_archive_opens_it(scheme: str, suffix: str, tmp_path: Path) -> None:
    shutil.copy(TORCH_SAMPLE, tmp_path / "agent.pt")
    if scheme == "zip":
        with zipfile.ZipFile(tmp_path / f"a.{suffix}", "w") as archive:
            archive.write(tmp_path / "agent.pt", "agent.pt")
    else:
        with tarfile.open(tmp_path / f"a.{suffix}", "w:gz") as packed:
            packed.add(tmp_path / "agent.pt", "agent.pt")
    ran = in_process("inspect", f"a.{suffix}", cwd=tmp_path)
    refused(ran)
    hint = shlex.split(ran.err.rpartition("ckpttool ")[2])
    assert in_process(*hint, cwd=tmp_path).out.splitlines()[1].startswith(f"{scheme}://agent.pt::")


def test_the_hint_of_a_compressed_checkpoint_opens_it(tmp_path: Path) -> None:
    (tmp_path / "an agent.pt.gz").write_bytes(gzip.compress(TORCH_SAMPLE.read_bytes()))
    ran = in_process("inspect", "an agent.pt.gz", cwd=tmp_path)
    refused(ran)
    unpack, inspect = ran.err.rpartition("hint: ")[2].split("; ")
    subprocess.run(unpack, shell=True, check=True, cwd=tmp_path)
    assert in_process(*shlex.split(inspect)[1:], cwd=tmp_path).status == 0


@pytest.mark.torch
def test_networks_of_other_sizes_are_named(tmp_path: Path, shared_workers: None) -> None:
    sizes = {"l1.weight": (8, 5), "l1.bias": (8,), "l2.weight": (1, 8), "l2.bias": (1,)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in sizes.items()}
    save(torch_tree(arrays), str(tmp_path / "other.npz"))
    ran = in_process("verify", TORCH_SAMPLE, tmp_path / "other.npz", "--activation", "relu", "--head", "tanh")
    assert ran.status == 1, ran.err
    assert "A obs 3 -> 1; B obs 5 -> 1" in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line.endswith(" NO")]
    assert rows
    assert all(row[1:] == ["0", "-", "-", "-", "-", "NO"] for row in rows)


def test_a_hint_of_eval_lists_options_in_other_commands_too(corpus: Path, tmp_path: Path) -> None:
    agent = corpus / "tf" / "sb2" / "zoo" / "td3_Pendulum-v0.pkl"
    policy = corpus / "exported" / "onnx" / "g1_policy.onnx"
    ran = in_process("verify", agent, policy, "--bounds", "-2", "2")
    refused(ran)
    # Whether the model's tanh is scaled is a fact of the training program: both options are listed.
    assert ran.err.splitlines()[1].startswith("hint: add --head affine if")


def test_help_of_a_command() -> None:
    for words in (("digest",), ("convert",), ()):
        assert in_process("help", *words).out.strip() == in_process(*words, "--help").out.strip()
    assert refused(in_process("help", "nonsense"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("inspect", "A", "B"), ("diff", "A", "B")),
        (("inspect", "A", "B", "C"), ("check", "A", "B", "C")),
        (("digest", "A", "B", "-q"), ("diff", "A", "B")),
        (("doctor", "A", "B"), ("check", "A", "B")),
        (("A", "B"), ("diff", "A", "B")),
    ],
)
def test_several_paths_have_a_command(
    words: tuple[str, ...], expected: tuple[str, ...], tmp_path: Path
) -> None:
    for name in "ABC":
        shutil.copy(TORCH_SAMPLE, tmp_path / name)
    ran = in_process(*words, cwd=tmp_path)
    refused(ran)
    hint = ran.err.splitlines()[1].removeprefix("hint: ckpttool ").split()
    assert tuple(hint) == expected
    assert in_process(*hint, cwd=tmp_path).status in (0, 1)


@pytest.mark.parametrize(
    ("alias", "target"),
    [("pytorch", "torch"), ("tensorflow", "tf"), ("tf2", "tf"), ("hf", "safetensors"), ("torch", "torch")],
)
def test_targets_have_other_names(alias: str, target: str) -> None:
    assert infer_target_word("out", alias) == target


@pytest.mark.parametrize(
    ("alias", "backend"), [("pytorch", "torch"), ("tf", "tensorflow"), ("numpy", "numpy")]
)
def test_backends_have_other_names(alias: str, backend: str) -> None:
    play = evaluate.PlayOptions(backend=alias)
    assert evaluate._protocol(evaluate.EnvironmentOptions(), play).backend == backend


class _Input:
    """Stdin with these bytes."""

    def __init__(self, content: bytes, *, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(content)
        self.isatty = lambda: terminal


def test_a_checkpoint_comes_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {verb: in_process(verb, TORCH_SAMPLE, "--json").json() for verb in ("inspect", "digest")}
    for verb, document in expected.items():
        monkeypatch.setattr("sys.stdin", _Input(TORCH_SAMPLE.read_bytes()))
        assert in_process(verb, "-", "--json").json()["tensors"] == document["tensors"]
    monkeypatch.setattr("sys.stdin", _Input(TORCH_SAMPLE.read_bytes()))
    monkeypatch.setattr(parameters, "_MOST_STDIN", 1000)
    assert in_process("inspect", "-", "--json").json()["error"]["kind"] == "limit"
    monkeypatch.setattr("sys.stdin", _Input(b"", terminal=True))
    assert in_process("inspect", "-", "--json").json()["error"]["kind"] == "usage"


@pytest.mark.parametrize("verb", ["inspect", "digest"])
def test_results_and_errors_name_stdin_and_not_its_copy(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", _Input(TORCH_SAMPLE.read_bytes()))
    assert in_process(verb, "-", "--json").json()["path"] == "stdin"
    monkeypatch.setattr("sys.stdin", _Input(TORCH_SAMPLE.read_bytes()))
    assert "ckpttool-" not in (text := in_process(verb, "-", kind=Terminal)).out + text.err
    for content in (b"", b"words", TORCH_SAMPLE.read_bytes()[:3000]):
        monkeypatch.setattr("sys.stdin", _Input(content))
        ran = in_process(verb, "-", "--json")
        error = ran.json()["error"]
        assert (ran.status, error["file"]) == (2, "stdin")
        assert "ckpttool-" not in str(error)


@pytest.mark.parametrize(
    "head",
    [
        b"\x89PNG\r\n\x1a\n", b"%PDF-1.7", b"SQLite format 3\0", b"\xff\xd8\xff\xe0", b"GIF89a", b"PAR1",
        b"ARROW1\0\0",
        b"\0\0\0\x18ftypmp42", b"\x7fELF\x02\x01\x01", b"MZ\x90\0", b"RIFF\1\2\3\4WEBP", b"RIFF\1\2\3\4WAVE",
        b"\x1a\x45\xdf\xa3", b"OggS\0", b"II*\0", b"\0asm\1\0\0\0", b"Obj\x01", b"<?xml version='1.0'?><a/>",
        b"plain words, one after another",
    ],
)  # fmt: skip
def test_everyday_files_are_named(head: bytes, tmp_path: Path, golden: Golden) -> None:
    file = tmp_path / "file.bin"
    file.write_bytes(head + bytes(40) if head[:1] not in b"<p" else head)
    golden(in_process("inspect", file))


@pytest.mark.parametrize(
    "path", ["C:\\runs\\agent.pt", "d:/runs/agent.pt", "runs\\agent.pt", "\\\\host\\runs\\a.pt"]
)
def test_windows_paths_are_explained(path: str, golden: Golden, tmp_path: Path) -> None:
    golden(in_process("digest", path, cwd=tmp_path))


def test_what_a_framework_prints_while_it_starts(capfd: pytest.CaptureFixture[str]) -> None:
    with tensorflow_backend.quiet_start():
        os.write(2, b"a note about the processor\n")
    assert capfd.readouterr().err == ""

    def fail() -> None:
        with tensorflow_backend.quiet_start():
            os.write(2, b"a library is missing\n")
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert capfd.readouterr().err == "a library is missing\n"


def test_stats_shortens_names_on_a_terminal_only(tmp_path: Path) -> None:
    long = "encoder." + "block." * 12 + "weight"
    save(torch_tree({long: np.zeros(3, np.float32)}), str(tmp_path / "m.pt"))
    shown = long.replace(".", "/")
    assert shown in in_process("stats", tmp_path / "m.pt").out
    assert shown not in on_terminal("stats", tmp_path / "m.pt").out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tf/sb2/zoo/td3_BipedalWalker-v2.zip", ["--env", "BipedalWalker-v3"]),
        ("tf/keras_h5/yosider_kerasrl/ddpg_Pendulum-v0_weights_actor.h5f", ["--env", "Pendulum-v1"]),
        ("torch/fujimoto/bmcnns/models/TD3_HalfCheetah-v3_0_actor", ["--env", "HalfCheetah-v4"]),
        ("torch/tianshou/Pendulum-v1/td3/policy.pth", ["--env", "Pendulum-v1"]),
        ("torch/sb3_zoo/tqc/Swimmer-v3_1/Swimmer-v3.zip", []),  # args.yml names it
    ],
)
def test_inspect_offers_the_environment_of_an_agent(name: str, expected: list[str], corpus: Path) -> None:
    ran = on_terminal("inspect", corpus / name)
    (words,) = (command for command in ran.suggested() if command[0] == "eval")
    assert words[-len(expected) - 1 :] == [str(corpus / name), *expected]


def test_two_environments_of_one_size_are_not_offered(tmp_path: Path) -> None:
    sizes = ((17, 32), (32, 32), (32, 6))
    state = {}
    for number, (rows, columns) in enumerate(sizes, start=1):
        state |= {f"l{number}.weight": np.ones((columns, rows)), f"l{number}.bias": np.ones(columns)}
    save(torch_tree(state), str(tmp_path / "actor.pt"))
    suggested = on_terminal("inspect", tmp_path / "actor.pt").suggested()
    (command,) = (words for words in suggested if words[0] == "eval")
    assert command[-2:] == ["--env", "ID"]


@pytest.mark.environment
def test_suggested_files_are_new(tmp_path: Path) -> None:
    """No suggested command is refused because its target exists, however often it is followed."""
    shutil.copy(TORCH_SAMPLE, tmp_path / "agent.pt")
    shutil.copy(f"{TORCH_SAMPLE}.ckpttool.json", tmp_path / "agent.pt.ckpttool.json")
    for file in ("a.pkl", "b.pkl"):
        (tmp_path / file).write_bytes(b"\x80\x02}(X\x01\0\0\0acos\nsystem\nX\x04\0\0\0true\x85Ru.")
    for _ in range(2):
        for words in on_terminal("agent.pt", cwd=tmp_path).suggested():
            assert in_process(*words, cwd=tmp_path).status == 0, words
        (verdict,) = (in_process("check", "a.pkl", "b.pkl", "--json", cwd=tmp_path).json()["checkpoints"],)
        for checkpoint in verdict:
            _, *words = shlex.split(checkpoint["findings"][0]["fix"])
            assert in_process(*words, cwd=tmp_path).status in (0, 1), words
    assert len({path.name for path in tmp_path.glob("*.index")}) == 2
    films = [
        words for words in on_terminal("eval", "agent.pt", cwd=tmp_path).suggested() if "--video" in words
    ]
    for words in films:
        target = tmp_path / words[words.index("--video") + 1]
        target.write_bytes(b"")
        again = on_terminal("eval", "agent.pt", cwd=tmp_path).suggested()
        assert target.name not in {word for other in again for word in other}


def test_an_environment_that_was_refused_is_not_suggested(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    agent = corpus / "torch/sb3_zoo/ppo/LunarLander-v2_1/LunarLander-v2.zip"
    ran = on_terminal(agent, cwd=tmp_path)
    assert [words for words in ran.suggested() if words[0] == "eval"] == []
    (fix,) = (finding["fix"] for finding in in_process("doctor", agent, "--json").json()["findings"])
    _, *words = shlex.split(fix)
    assert words == ["eval", str(agent), "--env", "LunarLander-v3"]


@pytest.mark.parametrize(
    ("words", "expected"), [("list", "inspect PATH"), ("export in.pt", "convert in.pt DST")]
)
def test_a_command_of_another_name_is_complete(words: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "in.pt").write_bytes(b"")
    assert f"ckpttool {expected}\n" in in_process(*words.split(), cwd=tmp_path).err


def test_a_refusal_of_code_names_the_source(tmp_path: Path) -> None:
    """What the code lacks is a fact of the source; the hint works."""
    source, target = tmp_path / "in.pt", tmp_path / "out.pt"
    save(torch_tree({"a.weight": np.zeros((3, 4)), "b.weight": np.zeros((5, 6))}), str(source))
    words = ("convert", source, target, "--code", tmp_path / "out.py")
    for more in ((), ("--network", "a")):
        error = in_process(*words, *more, "--json").json()["error"]
        assert (error["file"], target.exists()) == (str(source), False), error
        assert "--code" in error["hint"] or shlex.split(error["hint"])[2] == str(source)
    assert in_process(*words[:3]).status == 0
