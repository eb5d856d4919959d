"""`convert`: bit for bit, byte-identical twice, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.conversion import format_conversion, targets
from ckpttool.conversion.write import save
from ckpttool.core import (
    Alias,
    ChecksumError,
    FormatError,
    Leaf,
    MappingError,
    Output,
    TargetExistsError,
    Tree,
    UnsupportedError,
    UsageError,
    atomic_write,
    attr,
    display,
    write_atomically,
)
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.trees import attributes, dense, keys, leaf, tensorflow_tree, torch_tree


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    target = tmp_path / "agent.pt"
    assert convert(str(TF_SAMPLE), str(target)).written
    return target


def arrays(path: Path) -> dict[str, np.ndarray]:
    tree = open_checkpoint(str(path)).tree
    return {tree.names[at]: result.array() for at, result in tree.tensors()}


def test_every_weight_is_the_same_bits_after_its_transpose(converted: Path) -> None:
    before, after = arrays(TF_SAMPLE), arrays(converted)
    networks = [
        name for name in before if "optimizer" not in name and "policy/" in name and "total" not in name
    ]
    assert len(networks) == 36
    for name in networks:
        there = name.removeprefix("policy/").replace("kernel", "weight")
        expected = before[name].T if name.endswith("kernel") else before[name]
        np.testing.assert_array_equal(after[there], expected, strict=True)


def test_every_moment_lies_with_its_weight(converted: Path) -> None:
    source = open_checkpoint(str(TF_SAMPLE)).tree
    after = arrays(converted)
    torch_order = {
        network: [n for n in after if n.startswith(f"{network}/")] for network in ("actor", "critic")
    }
    moments = [(path, result) for path, result in source.tensors() if result.role == "slot"]
    assert len(moments) == 36
    for path, result in moments:
        assert result.of is not None
        owner = source.names[result.of].removeprefix("policy/").replace("kernel", "weight")
        network = owner.split("/")[0]
        number = torch_order[network].index(owner)
        name = {"m": "exp_avg", "v": "exp_avg_sq"}[str(result.slot)]
        there = after[f"{network}_optimizer/state/{number}/{name}"]
        expected = result.array().T if owner.endswith("weight") else result.array()
        np.testing.assert_array_equal(there, expected, err_msg=source.names[path], strict=True)


def test_counters_and_hyperparameters_arrive(converted: Path) -> None:
    tree = open_checkpoint(str(converted)).tree
    values = {tree.names[path]: result.value for path, result in tree.plain()}
    assert (values["total_it"], values["save_counter"]) == (14000, 6)
    group = "actor_optimizer/param_groups/0"
    assert values[f"{group}/lr"] == float(np.float32(1e-3))
    # The sidecar of the sample knows Adam's epsilon; the checkpoint does not hold it.
    assert values[f"{group}/eps"] == 1e-7
    assert (values[f"{group}/betas/0"], values[f"{group}/betas/1"]) == (0.9, 0.999)
    assert arrays(converted)["actor_optimizer/state/0/step"].item() == 7000
    assert arrays(converted)["critic_optimizer/state/11/step"].item() == 14000


def test_what_is_assumed_is_said(tmp_path: Path, golden: Golden) -> None:
    for file in TF_SAMPLE.parent.glob(f"{TF_SAMPLE.name}.*[!n]"):
        shutil.copy(file, tmp_path)
    done = convert(str(tmp_path / TF_SAMPLE.name), str(tmp_path / "x.pt"))
    golden("\n".join(done.report.assumed))
    assert not any("learning_rate" in line for line in done.report.assumed)
    receipt = json.loads((tmp_path / "x.pt.ckpttool.json").read_text())
    assert receipt["assumed"] == list(done.report.assumed)
    assert receipt["obs_dim"] == 3
    golden(json.dumps(receipt["provenance"], indent=2))


def test_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        convert(str(TF_SAMPLE), str(tmp_path / name / "agent.pt"))
    for file in ("agent.pt", "agent.pt.ckpttool.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_sidecar_is_a_receipt(converted: Path, golden: Golden) -> None:
    receipt = json.loads(Path(f"{converted}.ckpttool.json").read_text())
    assert receipt["source"] == {
        "path": "ckpt-15000",
        "sha256": digest(str(TF_SAMPLE)).sha256,
        "format": "tensor_bundle",
        "layout": "td3_tf",
        "epsilon": "uncorrected",
    }
    assert receipt["target_sha256"] == digest(str(converted)).sha256
    assert len(receipt["rules"]) == 94
    assert receipt["env"]["id"] == "Pendulum-v1"
    assert (receipt["action_low"], receipt["action_high"]) == ([-2.0], [2.0])
    golden(json.dumps(receipt["provenance"], indent=2))
    assert receipt["residue"] == []


def test_a_sidecar_of_other_weights_is_refused(converted: Path, tmp_path: Path, golden: Golden) -> None:
    other = tmp_path / "other.pt"
    shutil.copy(TORCH_SAMPLE, other)
    shutil.copy(f"{converted}.ckpttool.json", f"{other}.ckpttool.json")
    with pytest.raises(ChecksumError) as caught:
        restore_agent(str(other))
    golden(caught.value)
    refused(in_process("convert", other, tmp_path / "x.npz"))
    assert not (tmp_path / "x.npz").exists()


def test_a_torch_file_is_copied_as_it_is(tmp_path: Path) -> None:
    convert(str(TORCH_SAMPLE), str(tmp_path / "copy.pt"))
    assert digest(str(tmp_path / "copy.pt")).sha256 == digest(str(TORCH_SAMPLE)).sha256
    before, after = (open_checkpoint(str(p)).tree for p in (TORCH_SAMPLE, tmp_path / "copy.pt"))
    assert dict(before.containers) == dict(after.containers)


def test_a_tree_without_a_layout_goes_by_kinds() -> None:
    generator = np.random.default_rng(0)
    tensors = dense(generator, "model/encoder/fc", 3, 4) | {
        "model/encoder/norm/gamma": np.ones(4, np.float32),
        "model/encoder/norm/beta": np.zeros(4, np.float32),
        "model/conv/filters": np.zeros((3, 3, 2, 2), np.float32),
    }
    from ckpttool.mapping import plan_to_torch

    tree = tensorflow_tree(tensors)
    moves = {display(m.target): m for m in plan_to_torch(tree).moves}
    assert set(moves) == {
        "model/encoder/fc/weight",
        "model/encoder/fc/bias",
        "model/encoder/norm/weight",
        "model/encoder/norm/bias",
    }
    assert moves["model/encoder/fc/weight"].rule.name == "transpose"


def test_tensors_that_share_storage_go_on_sharing_it(tmp_path: Path) -> None:
    weight = leaf(np.arange(4, dtype=np.float32), "a")
    tree = Tree({keys("a"): weight}, {keys("a"): (Alias(keys("b"), "b"),)})
    save(tree, str(tmp_path / "tied.pt"))
    again = open_checkpoint(str(tmp_path / "tied.pt"))
    assert [alias.path for alias in again.tree.aliases[keys("a")]] == [keys("b")]
    assert [t.key for t in digest(str(tmp_path / "tied.pt")).tensors] == ["a", "b"]


# --- Refusals: nothing written, nothing lost ---------------------------------------------------------


def left_over(folder: Path, *known: str) -> set[str]:
    return {path.name for path in folder.iterdir()} - set(known)


def test_an_unmapped_tensor_stops_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = open_checkpoint(str(TF_SAMPLE))
    mystery = {attributes("policy/mystery"): leaf(np.zeros((3, 4), np.float32), "m")}
    from dataclasses import replace

    # The sample's sidecar was written for other weights.
    whole = Tree({**original.tree.leaves, **mystery}, original.tree.aliases)
    changed = replace(original, path="x", tree=whole)
    monkeypatch.setattr(format_conversion, "open_checkpoint", lambda _: changed)
    done = convert("x", str(tmp_path / "agent.pt"))
    assert done.report.unused == ("policy/mystery",)
    assert not done.written
    assert not left_over(tmp_path)
    done = convert("x", str(tmp_path / "agent.pt"), allow_missing=True)
    assert done.written
    receipt = json.loads((tmp_path / "agent.pt.ckpttool.json").read_text())
    assert receipt["residue"] == [{"path": "policy/mystery"}]


def test_a_lost_moment_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    original = open_checkpoint(str(TF_SAMPLE))
    lost = next(p for p, f in original.tree.tensors() if f.role == "slot" and f.slot == "v")
    rest = {path: result for path, result in original.tree.items() if path != lost}
    monkeypatch.setattr(
        format_conversion, "open_checkpoint", lambda _: replace(original, path="x", tree=Tree(rest))
    )
    done = convert("x", str(tmp_path / "agent.pt"))
    assert len(done.report.missing) == 1
    assert "exp_avg_sq" in done.report.missing[0]
    assert not done.written


def test_an_existing_target_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "agent.pt"
    target.write_bytes(b"precious")
    with pytest.raises(TargetExistsError):
        convert(str(TF_SAMPLE), str(target))
    assert target.read_bytes() == b"precious"
    assert not left_over(tmp_path, "agent.pt")
    assert convert(str(TF_SAMPLE), str(target), force=True).written


def test_an_existing_sidecar_is_kept(tmp_path: Path) -> None:
    (tmp_path / "agent.pt.ckpttool.json").write_text("mine")
    with pytest.raises(TargetExistsError):
        convert(str(TF_SAMPLE), str(tmp_path / "agent.pt"))
    assert not left_over(tmp_path, "agent.pt.ckpttool.json")


def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in ("/dev/null", str(tmp_path / "pipe"), str(tmp_path)):
        with pytest.raises(TargetExistsError) as caught:
            convert(str(TF_SAMPLE), target, to="torch", force=True)
        assert caught.value.file == target
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert left_over(tmp_path) == {"pipe"}


def test_a_name_that_stands_for_a_checkpoint_is_taken(tmp_path: Path, golden: Golden) -> None:
    for end in (".index", ".data-00000-of-00001"):
        shutil.copy(f"{TF_SAMPLE}{end}", tmp_path)
    ran = in_process("convert", TORCH_SAMPLE, tmp_path / TF_SAMPLE.name, "--to", "torch")
    golden(refused(ran))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("link", [False, True])
def test_a_source_is_never_the_target(tmp_path: Path, link: bool, golden: Golden) -> None:
    source = tmp_path / "a.pt"
    shutil.copy(TORCH_SAMPLE, source)
    target = tmp_path / "b.pt" if link else source
    if link:
        target.symlink_to(source)
    with pytest.raises(UsageError) as caught:
        convert(str(source), str(target), force=True)
    golden(caught.value)
    assert source.read_bytes() == TORCH_SAMPLE.read_bytes()


def test_a_damaged_source_leaves_no_file(tmp_path: Path) -> None:
    for file in TF_SAMPLE.parent.glob(f"{TF_SAMPLE.name}.*"):
        shutil.copy(file, tmp_path)
    data = tmp_path / f"{TF_SAMPLE.name}.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    before = left_over(tmp_path)
    with pytest.raises(FormatError):
        convert(str(tmp_path / TF_SAMPLE.name), str(tmp_path / "agent.pt"))
    assert left_over(tmp_path) == before


def test_a_write_that_went_wrong_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.formats import torch_zip

    whole = torch_zip.pieces

    def lossy(tree: Tree) -> object:
        leaves = dict(tree.leaves)
        path, first = next((p, f) for p, f in tree.tensors() if f.size > 9)
        wrong = leaf(np.zeros(first.shape, np.float32), first.key)
        first.read()
        return whole(Tree({**leaves, path: wrong}, tree.aliases, tree.containers))

    monkeypatch.setattr(torch_zip, "pieces", lossy)
    with pytest.raises(FormatError) as caught:
        convert(str(TF_SAMPLE), str(tmp_path / "agent.pt"))
    assert caught.value.path == "actor/l1/weight"
    assert not left_over(tmp_path)


def test_of_two_writers_one_wins_whole(tmp_path: Path) -> None:
    target = str(tmp_path / "x")
    barrier = threading.Barrier(2)
    outcomes: list[str] = []

    def write(content: bytes) -> None:
        def check(_: str) -> None:
            barrier.wait()

        try:
            write_atomically((Output(target, lambda stream: _put(stream, content), check),))
            outcomes.append(content.decode())
        except TargetExistsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(content,)) for content in (b"one", b"two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes)[1] == "refused" or sorted(outcomes)[0] == "refused"
    assert (tmp_path / "x").read_text() in outcomes
    assert not left_over(tmp_path, "x")


def _put(stream: object, content: bytes) -> None:
    stream.write(content)  # type: ignore[attr-defined]


def test_the_second_of_two_files_failing_takes_the_first_away(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    outputs = [Output(str(tmp_path / name), lambda stream: _put(stream, b"x")) for name in ("new", "taken")]
    with pytest.raises(TargetExistsError):
        write_atomically(outputs)
    assert left_over(tmp_path) == {"taken"}
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UsageError) as caught:
        write_atomically((Output(str(tmp_path / "x"), full),))
    assert caught.value.file == str(tmp_path / "x")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert not left_over(tmp_path)


@contextmanager
def paused_while_writing(tmp_path: Path, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Run a conversion that has written half of its target, and waits; `before` starts its command."""
    code = f"""
import sys, time
from ckpttool.cli import app
from ckpttool.conversion import write
def slow(tree, target, kind, **rest):
    from ckpttool.core.atomic_write import Output, write_atomically
    def fill(stream):
        stream.write(b"half"); stream.flush(); print("ready", flush=True); time.sleep(60)
    write_atomically((Output(target, fill),))
write.write_checkpoint = slow
sys.argv = ["ckpttool", "convert", {str(TF_SAMPLE)!r}, {str(tmp_path / "x.pt")!r}]
app.run()
"""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*before, sys.executable, "-c", code], cwd=ROOT, **pipes) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, golden: Golden) -> None:
    with paused_while_writing(tmp_path) as child:
        assert left_over(tmp_path)
        child.send_signal(number)
        _, err = child.communicate(timeout=30)
    assert child.returncode == 128 + number
    golden(err)
    assert not left_over(tmp_path)


def test_signals_that_the_starter_ignores_stay_ignored(tmp_path: Path, golden: Golden) -> None:
    """As `nohup` and background jobs start it: neither a hangup nor another job's Ctrl-C ends it."""
    with paused_while_writing(tmp_path, "sh", "-c", 'trap "" INT HUP; exec "$@"', "sh") as child:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            child.send_signal(number)
        _, err = child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM
    golden(err)
    assert not left_over(tmp_path)


def test_an_error_that_an_interruption_made_is_the_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    def stopped(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr("ckpttool.conversion.format_conversion.run_conversion", stopped)
    ran = in_process("convert", TF_SAMPLE, tmp_path / "x.pt")
    golden(ran)


def test_temporary_names_are_recognisable() -> None:
    assert atomic_write.is_hidden_name(atomic_write.temporary_path("/x/agent.pt"))


def test_nothing_of_a_known_kind_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    from dataclasses import replace

    original = open_checkpoint(str(TF_SAMPLE))
    tree = tensorflow_tree({"x": np.zeros((2, 2, 2), np.float32)})
    monkeypatch.setattr(
        format_conversion, "open_checkpoint", lambda _: replace(original, path="x", tree=tree)
    )
    with pytest.raises(MappingError) as caught:
        convert("x", str(tmp_path / "x.pt"))
    golden(caught.value)


# --- As a process ----------------------------------------------------------------------------------


def test_the_command_converts_and_reports(tmp_path: Path, golden: Golden) -> None:
    ran = in_process("convert", TF_SAMPLE, tmp_path / "agent.pt", "--json")
    assert ran.status == 0, ran.err
    document = ran.json()
    assert document["schema"] == 1
    assert document["tool"].startswith("ckpttool ")
    assert (document["unused"], document["missing"]) == ([], [])
    assert document["mapped"][0] == {
        "source": "policy/actor/l1/kernel",
        "target": "actor/l1/weight",
        "rule": "transpose",
        "shape_in": [3, 64],
        "shape_out": [64, 3],
    }
    assert document["digest"] == digest(str(tmp_path / "agent.pt")).sha256
    again = in_process("convert", TF_SAMPLE, tmp_path / "agent.pt")
    golden(refused(again))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    ran = in_process("convert", TF_SAMPLE, tmp_path / "agent.pt", "--dry-run")
    assert ran.status == 0
    assert "policy/critic/q2/l3/kernel" in ran.out
    assert any(
        line.split() == ["->", "critic/q2/l3/weight", "transpose", "[64,", "1]", "->", "[1,", "64]"]
        for line in ran.out.splitlines()
    )
    assert not left_over(tmp_path)


def test_an_unmapped_tensor_exits_with_one(tmp_path: Path, golden: Golden) -> None:
    # A state_dict next to the agent's networks that no rule names.
    tree = open_checkpoint(str(TORCH_SAMPLE)).tree
    extra = torch_tree({"mystery/x": np.zeros(3, np.float32)})
    save(Tree({**tree.leaves, **extra.leaves}, {}, tree.containers), str(tmp_path / "a.pt"))
    ran = in_process("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--layout", "td3_torch")
    assert ran.status == 1
    golden("\n".join(line for line in ran.out.splitlines() if ":" in line))
    assert left_over(tmp_path) == {"a.pt"}
    ran = in_process(
        "convert", tmp_path / "a.pt", tmp_path / "b.pt", "--layout", "td3_torch", "--allow-missing"
    )
    assert ran.status == 0
    assert (tmp_path / "b.pt").exists()


@pytest.mark.parametrize(
    "arguments",
    [["x.unknown"], ["x.pt", "--to", "onnx9"], ["missing/x.pt"], ["x.pt", "--layout", "sb9"]],
    ids=" ".join,
)
def test_impossible_targets(tmp_path: Path, arguments: list[str], golden: Golden) -> None:
    golden(refused(in_process("convert", TF_SAMPLE, *arguments, cwd=tmp_path)))
    assert not left_over(tmp_path)


@pytest.mark.parametrize("word", ["onnx", "torch", "npz"])
@pytest.mark.parametrize("suffix", [".tflite", ".keras", ".pb", ".gguf"])
def test_a_suffix_of_another_program_is_refused(suffix: str, word: str, tmp_path: Path) -> None:
    ran = in_process("convert", TORCH_SAMPLE, f"out{suffix}", "--to", word, "--json", cwd=tmp_path)
    assert ran.json()["error"]["kind"] == "usage"
    assert not list(tmp_path.iterdir())
    name = ran.json()["error"]["hint"].rpartition(" ")[2]
    assert targets.infer_target_word(name, word) == word
    with pytest.raises(ckpttool.CkpttoolError):
        ckpttool.export(str(TORCH_SAMPLE), str(tmp_path / f"out{suffix}"))


@pytest.mark.parametrize("word", {kind.format: word for word, kind in targets.TARGETS.items()}.values())
def test_a_tree_without_tensors_is_refused_or_read_back(word: str, tmp_path: Path) -> None:
    target = str(tmp_path / ("out.npz" if word == "npz" else "out"))
    try:
        written = ckpttool.save(ckpttool.Tree({}), target, word)
    except UnsupportedError:  # a file of an agent
        assert not list(tmp_path.iterdir())
        return
    checkpoint = ckpttool.open(target)
    assert checkpoint.format == targets.TARGETS[word].format
    # TensorFlow's own count of saves is not of the tree.
    assert {*checkpoint} <= {"save_counter"}
    assert len(written.tensors) == len([*checkpoint])


def test_a_suffix_of_another_target_is_refused() -> None:
    words = (*targets.TARGETS, *targets.EXPORTS)
    refusals = 0
    for suffix, word in itertools.product(targets._SUFFIXES, words):
        target = f"a.b{suffix}"
        try:
            chosen = targets.infer_target_word(target, word)
        except UsageError as error:
            refusals += 1
            name = str(error.hint).rpartition(" ")[2]
            assert targets.infer_target_word(name, word) == word
            assert targets.infer_target_word(target, None) != word
        else:
            formats = {
                targets.TARGETS[name].format for name in (chosen, targets._SUFFIXES[suffix]) if name != "onnx"
            }
            assert len(formats) <= 1
    assert 2 * refusals > len(targets._SUFFIXES) * len(words)


@pytest.mark.parametrize("word", [None, "keras", "torch", "npz"])
def test_no_target_is_a_keras_archive(word: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        targets.infer_target_word("model.keras", word)
    name = str(caught.value.hint).rpartition(" ")[2]
    assert targets.infer_target_word(name, word) == (word or "keras")


# --- The frameworks read it -------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_loads_it_strictly_and_trains_on(converted: Path) -> None:
    torch = pytest.importorskip("torch")
    states = torch.load(converted, weights_only=True)
    assert type(states["actor"]["l1.weight"]) is torch.Tensor  # a state_dict holds no Parameters
    assert list(states) == [
        "actor", "actor_target", "critic", "critic_target",
        "actor_optimizer", "critic_optimizer", "total_it", "save_counter",
    ]  # fmt: skip

    def mlp(n_in: int, n_out: int) -> torch.nn.Module:
        module = torch.nn.Module()
        for number, sizes in enumerate([(n_in, 64), (64, 64), (64, n_out)], start=1):
            setattr(module, f"l{number}", torch.nn.Linear(*sizes))
        return module

    critic = torch.nn.Module()
    critic.q1, critic.q2 = mlp(4, 1), mlp(4, 1)
    for module, name in ((mlp(3, 1), "actor"), (critic, "critic"), (critic, "critic_target")):
        module.load_state_dict(states[name], strict=True)
    actor = mlp(3, 1)
    actor.load_state_dict(states["actor"])
    optimizer = torch.optim.Adam(actor.parameters())
    optimizer.load_state_dict(states["actor_optimizer"])
    moments = optimizer.state[actor.l2.weight]
    assert moments["step"].item() == 7000
    assert moments["exp_avg"].shape == actor.l2.weight.shape
    actor.l3(torch.relu(actor.l2(torch.relu(actor.l1(torch.ones(1, 3)))))).sum().backward()
    optimizer.step()
    assert optimizer.state[actor.l2.weight]["step"].item() == 7001


def test_leaves_keep_their_identity_in_the_canonical_tree() -> None:
    agent = restore_agent(str(TF_SAMPLE))
    kernel = agent.tree[attr("actor"), *attributes("0/kernel")]
    assert isinstance(kernel, Leaf)
    assert kernel.shape == (3, 64)


@pytest.mark.parametrize("inputs", [None, "9"])
def test_numpy_s_threads_rest_and_the_environment_stays(tmp_path: Path, inputs: str | None) -> None:
    name = "OPENBLAS_THREAD_TIMEOUT"
    (tmp_path / "numpy.py").write_text(f"import os\nfound = os.environ.get({name!r})\n")
    program = f"""
import os, sys
from ckpttool.cli import convert as converting
sys.path.insert(0, sys.argv[1])
converting._import_numpy()
print(sys.modules["numpy"].found, os.environ.get({name!r}))
"""
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if inputs is None else {name: inputs})
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.split() == ["4" if inputs is None else inputs, str(inputs)]


def test_a_conversion_imports_little(tmp_path: Path) -> None:
    source = tmp_path / "x"
    save(tensorflow_tree({"l/kernel": np.ones((4, 4), np.float32)}), str(source), "tf1")
    program = """
import json, sys
from ckpttool.cli import main
try:
    main()
finally:
    print(json.dumps([*sys.modules]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, "convert", str(source), str(tmp_path / "x.pt"), "--quiet"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    modules = set(json.loads(ran.stdout.splitlines()[-1]))
    assert not modules & {"tomllib", "importlib.metadata", "email", "asyncio", "ckpttool.core.remote"}


# Options: one record, keywords for its fields, and one table of what excludes what.


def test_keywords_replace_the_fields_of_an_options_record(tmp_path: Path) -> None:
    options = ckpttool.ConversionOptions(to="npz", dry_run=True)
    planned = ckpttool.convert(str(TF_SAMPLE), str(tmp_path / "x"), options, part="policy/actor")
    assert not planned.written
    assert len(planned.report.mapped) == 6
    assert options.part is None
    assert ckpttool.convert(str(TF_SAMPLE), str(tmp_path / "x"), options, dry_run=False).written


@pytest.mark.parametrize("call", [ckpttool.convert, ckpttool.export, ckpttool.load_into])
def test_an_unknown_keyword_is_a_type_error_with_the_one_that_was_meant(call: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'dryrun'.*'dry_run'"):
        call(str(TF_SAMPLE), str(tmp_path / "x.pt"), dryrun=True)


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("x.onnx", {"part": "policy"}, "part="),
        ("x.onnx", {"rules": "rules.toml"}, "rules="),
        ("x.onnx", {"verify": False}, "verify=False"),
        ("x.pt", {"network": "actor"}, "network="),
        ("x.pt", {"like": "a:b", "layout": "none"}, "layout="),
        ("x.pt", {"like": "a:b", "facts": ckpttool.AgentFacts(head="tanh")}, "head="),
        ("x.pt", {"like": "a:b", "env": "Pendulum-v1"}, "env="),
        ("x.pt", {"cast": True}, "cast=True"),
        ("x.pt", {"strip": True, "restore": True}, "strip=True"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_anything_is_read(
    target: str, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(
            str(tmp_path / "missing"), str(tmp_path / target), ckpttool.ConversionOptions(**options)
        )
    assert caught.value.message.split()[0] == named


JOBS = {"x.onnx": ckpttool.ExportOptions, "x.pt": ckpttool.FormatOptions, "x.npz": ckpttool.ModelFileOptions}
# The word for the format of an ONNX model; the exit status of entries that a written model does not show.
OF_THE_COMMAND = {"to", "allow_missing"}


@pytest.mark.parametrize("target", [*JOBS])
def test_options_of_another_job_are_refused(target: str, tmp_path: Path) -> None:
    """Before, `convert SRC x.onnx --cast` and `--run-code` changed nothing and were accepted."""
    own = {field.name for field in dataclasses.fields(JOBS[target])} | OF_THE_COMMAND
    like = {"like": "a:b"} if target == "x.npz" else {}
    others = [field for field in dataclasses.fields(ckpttool.ConversionOptions) if field.name not in own]
    assert len(others) > 5
    for field in others:
        if field.name == "like" and target == "x.pt":
            continue  # it is what makes another job of this one
        value = ckpttool.AgentFacts(head="tanh") if field.name == "facts" else field.default is not True
        options = ckpttool.ConversionOptions(**{field.name: value}, **like)
        with pytest.raises(UsageError) as caught:
            ckpttool.convert(str(tmp_path / "missing"), str(tmp_path / target), options)
        keyword = "head" if field.name == "facts" else field.name
        assert caught.value.message.startswith(f"{keyword}="), field.name


@pytest.mark.parametrize("words", [("-o", "DST"), ("--out", "DST"), ("--out=DST",)])
def test_the_target_may_be_an_option(words: tuple[str, ...], tmp_path: Path) -> None:
    """As in `eval` and `report`, whose commands are the pattern for a newcomer."""
    target = tmp_path / "out.npz"
    arguments = [word.replace("DST", str(target)) for word in words]
    assert in_process("convert", *arguments, TORCH_SAMPLE).status == 0
    assert in_process("convert", TORCH_SAMPLE, target, *arguments).status == 2
    assert in_process("convert", TORCH_SAMPLE, *arguments).status == 2
    assert in_process("convert", TORCH_SAMPLE, *arguments, "--force").status == 0
