"""`inspect`: the tree in all its forms, folders of checkpoints, and what the document says about both."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool import CkpttoolError
from ckpttool.cli.tree_tables import TreeView, render_tree
from ckpttool.commands.inspect import inspect_path
from ckpttool.conversion.write import save
from ckpttool.core import Container, Inline, Leaf, attr, shorten
from ckpttool.formats import CheckpointState, tf_common
from ckpttool.listing.contents import CheckpointSummary, Totals
from ckpttool.listing.modules import group_by_module, walk_modules
from ckpttool.listing.rows import TensorRow
from ckpttool.listing.signatures import signature_lines
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, Terminal, in_process, refused
from tests.golden_texts import Golden
from tests.trees import torch_tree


def rows(*named: tuple[str, tuple[int, ...], dict[str, object]]) -> list[TensorRow]:
    rows = []
    for path, shape, facts in named:
        of = facts.pop("of", None)
        aliases = facts.pop("aliases", ())
        leaf = Leaf("float32", shape, Inline(b""), path, **facts)  # type: ignore[arg-type]
        keys = tuple(map(attr, path.split("/")))
        rows.append(TensorRow(path, keys, leaf, of, aliases))  # type: ignore[arg-type]
    return rows


def listing(tensors: list[TensorRow], containers: dict[str, Container] | None = None) -> CheckpointSummary:
    """A listing of these tensors, as `summary` would return it."""
    from ckpttool.core import Checkpoint, Tree

    by_path = {tuple(map(attr, path.split("/"))): c for path, c in (containers or {}).items()}
    modules = group_by_module([(row.path, row) for row in tensors], by_path)
    checkpoint = Checkpoint("somewhere/agent", "test", Tree({row.keys: row.leaf for row in tensors}), ())
    totals = Totals(len(tensors), 0, 0, 0)
    return CheckpointSummary(checkpoint, None, tuple(tensors), (), totals, (), modules)


# --- The tree ---------------------------------------------------------------------------------------


def test_a_module_has_its_sums_its_class_and_its_activation(golden: Golden) -> None:
    summary = listing(
        rows(
            ("net/l1/kernel", (4, 64), {"trainable": False}),
            ("net/l1/bias", (64,), {}),
            ("net/l2/kernel", (64, 2), {}),
            ("net/norm/mean", (64,), {"role": "buffer"}),
        ),
        {
            "net/l1": Container("module", "Dense", {"activation": "relu", "units": 64}),
            "net/l2": Container("module", "Dense", {"activation": "linear"}),
        },
    )
    lines = render_tree(summary, TreeView(quiet=True)).splitlines()
    golden("\n".join(lines))
    assert len({line.index("B") for line in lines if "B" in line and "Dense" not in line}) == 1
    documents = {module.path: module.document() for module in summary.modules}
    assert documents["net/l1"] == {
        "path": "net/l1",
        "class": "Dense",
        "facts": {"activation": "relu", "units": 64},
        "tensors": 2,
        "parameters": 320,
        "nbytes": 1280,
    }
    assert documents["net"]["nbytes"] == 2048


def test_orders_and_depths() -> None:
    summary = listing(
        rows(("a/l10/w", (1,), {}), ("a/l2/w", (9,), {}), ("a/l1/w", (5,), {}), ("b/w", (99,), {}))
    )

    def names(view: TreeView) -> list[str]:
        return [line.split()[0] for line in render_tree(summary, view).splitlines()[1:]]

    assert names(TreeView(quiet=True)) == ["a", "l10", "w", "l2", "w", "l1", "w", "b", "w"]
    assert names(TreeView(quiet=True, sort="name")) == ["a", "l1", "w", "l2", "w", "l10", "w", "b", "w"]
    assert names(TreeView(quiet=True, sort="size")) == ["b", "w", "a", "l2", "w", "l1", "w", "l10", "w"]
    assert names(TreeView(quiet=True, depth=2)) == ["a", "l10", "l2", "l1", "b", "w"]
    folded = render_tree(summary, TreeView(quiet=True, depth=1)).splitlines()
    assert len(folded) == 3
    assert "(3 tensors)" in folded[1]
    assert folded[1].split()[-3:] == ["15", "60", "B"]


def test_deep_and_long_names_still_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal(io.BytesIO()))
    monkeypatch.setenv("NO_COLOR", "1")
    deep = "/".join(f"m{n}" for n in range(190))
    summary = listing(rows((f"{deep}/w", (1,), {}), (f"{deep[:-2]}/v", (1,), {}), ("x" * 500, (1,), {})))
    lines = render_tree(summary, TreeView(quiet=True)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("…" in line for line in lines)
    levels = listing(rows(*((f"{'s/' * n}w", (1,), {}) for n in range(200))))
    assert max(map(len, render_tree(levels, TreeView(quiet=True)).splitlines())) <= 80
    assert sum(1 for _ in walk_modules(levels.modules[0])) == 200


@pytest.mark.parametrize("width", range(12))
def test_shortened_text_keeps_both_ends(width: int) -> None:
    text = shorten("policy/critic/kernel", width)
    assert len(text) == width
    assert width < 3 or (text[0] == "p" and text[-1] == "l" and "…" in text)


def test_aliases_are_listed_whole() -> None:
    ran = in_process("inspect", TF_SAMPLE, "--aliases", "--glob", "critic/q1/l1/*", "--quiet")
    alias = "policy/critic_optimizer/_trainable_variables/0\n"
    assert alias in ran.out
    assert alias not in in_process("inspect", TF_SAMPLE, "--quiet").out


def test_replayed_experience_is_no_parameter() -> None:
    summary = listing(rows(("w", (2,), {}), ("replay/obs", (1000, 3), {"role": "replay"})))
    (replay,) = (module for module in summary.modules if module.path == "replay")
    assert (replay.parameters, replay.nbytes) == (0, 12_000)


def test_the_document_lists_modules() -> None:
    document = in_process("inspect", TF_SAMPLE, "--json").json()
    modules = {module["path"]: module for module in document["modules"]}
    assert modules["policy/critic"]["parameters"] == 9090
    assert modules["policy"]["nbytes"] + 8 == document["totals"]["nbytes"]
    assert document["checkpoints"] == []
    assert "graph" not in document


def test_an_unknown_order_is_refused(golden: Golden) -> None:
    golden(refused(in_process("inspect", TF_SAMPLE, "--sort", "colour")))


def test_signatures_are_a_few_clean_lines(golden: Golden) -> None:
    details = {
        "tags": [["serve"], ["serve", "gpu"]],
        "signatures": {
            "serving\x1b": {
                "inputs": {"obs": {"dtype": "float32", "shape": [-1, 3]}},
                "outputs": {"action": {"dtype": "float32", "shape": None}},
            },
            "empty": {},
        },
    }
    golden("\n".join(signature_lines(details, 80)))
    many = {"signatures": {f"s{n}": {"inputs": {f"i{k}": {} for k in range(50)}} for n in range(30)}}
    lines = signature_lines(many, 80)
    assert max(map(len, lines)) <= 80
    golden(lines[-1])
    assert signature_lines({}, 80) == signature_lines({"signatures": [1], "tags": 3}, 80) == []


# --- Folders ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints of the sample without a state file."""
    for step in (2500, 7500, 15000):
        for end in (".index", ".data-00000-of-00001"):
            shutil.copy(f"{TF_SAMPLE.with_name(f'ckpt-{step}')}{end}", tmp_path)
    return tmp_path


def test_a_folder_shows_its_checkpoints_and_what_the_latest_holds() -> None:
    document = in_process("inspect", TF_SAMPLE.parent, "--json").json()
    listed = document["checkpoints"]
    assert [row["step"] for row in listed] == [2500, 5000, 7500, 10000, 12500, 15000]
    assert [row["latest"] for row in listed] == [False] * 5 + [True]
    assert all(row["complete"] for row in listed)
    assert listed[-1]["path"] == document["path"] == str(TF_SAMPLE)
    sizes = [os.path.getsize(f"{TF_SAMPLE}{end}") for end in (".index", ".data-00000-of-00001")]
    assert listed[-1]["nbytes"] == sum(sizes)
    assert listed[0]["time"] == "2026-11-21T04:09:51Z"  # of the state file, not of a copy
    assert len(document["tensors"]) == 78
    text = in_process("inspect", TF_SAMPLE.parent).out
    assert re.search(r"^15,000 .* \S+/ckpt-15000  latest$", text, re.MULTILINE)
    assert "kernel" in text


def test_without_a_state_file_a_folder_is_only_listed(folder: Path, golden: Golden) -> None:
    ran = in_process("inspect", folder)
    assert ran.status == 0, ran.err
    golden(ran.out.splitlines()[-1])
    assert ran.out.strip().endswith("ckpt-15000")
    assert "kernel" not in ran.out
    document = in_process("inspect", folder, "--json").json()
    whole = in_process("inspect", TF_SAMPLE, "--json").json()
    assert document.keys() == whole.keys()
    assert document["format"] is None
    assert [checkpoint["step"] for checkpoint in document["checkpoints"]] == [2500, 7500, 15000]
    assert not any(checkpoint["latest"] for checkpoint in document["checkpoints"])


def test_files_of_any_format_are_listed() -> None:
    document = in_process("inspect", TORCH_SAMPLE.parent, "--json").json()
    assert [saved["step"] for saved in document["checkpoints"]] == [2500, 5000, 7500, 10000, 12500, 15000]
    assert {checkpoint["format"] for checkpoint in document["checkpoints"]} == {"pytorch"}
    assert document["checkpoints"][0]["nbytes"] == TORCH_SAMPLE.with_name("ckpt-2500.pt").stat().st_size


def test_what_is_missing_is_said(folder: Path) -> None:
    (folder / "ckpt-2500.data-00000-of-00001").unlink()
    (folder / "ckpt-7500.index").unlink()
    result = inspect_path(str(folder))
    listed = {os.path.basename(checkpoint.path): checkpoint for checkpoint in result.checkpoints}
    assert {name: row.complete for name, row in listed.items()} == {
        "ckpt-2500": False, "ckpt-7500": False, "ckpt-15000": True
    }  # fmt: skip
    assert listed["ckpt-7500"].format is None
    assert "incomplete" in in_process("inspect", folder).out


def test_a_state_file_of_another_machine(folder: Path) -> None:
    state = CheckpointState("/home/her/runs/ckpt-7500", ("/home/her/runs/ckpt-7500",), (86_400.0 * 365,))
    (folder / "checkpoint").write_bytes(tf_common.encode_state(state))
    document = in_process("inspect", folder, "--json").json()
    assert document["path"] == str(folder / "ckpt-7500")
    assert any("/home/her/runs/ckpt-7500" in note for note in document["notes"])
    latest = [checkpoint for checkpoint in document["checkpoints"] if checkpoint["latest"]]
    assert [(row["step"], row["time"]) for row in latest] == [(7500, "1971-01-01T00:00:00Z")]


@pytest.mark.parametrize(
    "content",
    ['model_checkpoint_path: "gone-1"', 'model_checkpoint_path: "x', 'all_model_checkpoint_paths: "x"'],
    ids=["gone", "open quote", "no latest"],
)
def test_a_state_file_that_does_not_help(folder: Path, content: str, golden: Golden) -> None:
    (folder / "checkpoint").write_text(content)
    ran = in_process("inspect", folder)
    assert ran.status == 0, ran.err
    golden("\n".join(line for line in ran.out.splitlines() if line.startswith("note: ")))
    assert len(re.findall(r"^ *[\d,]+ .*ckpt-\d+$", ran.out, re.MULTILINE)) == 3
    refused(in_process("digest", folder))


def test_times_that_no_calendar_has(folder: Path) -> None:
    name = str(folder / "ckpt-7500")
    (folder / "checkpoint").write_bytes(tf_common.encode_state(CheckpointState(name, (name,), (1e300,))))
    assert in_process("inspect", folder, "--json").status == 0


def test_a_folder_of_one_file_is_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CkpttoolError):
        inspect_path(str(tmp_path))
    save(torch_tree({"x": np.zeros(1, np.float32)}), str(tmp_path / "x.pt"))
    assert in_process("inspect", tmp_path, "--json").json()["path"] == str(tmp_path / "x.pt")


def test_hostile_names_in_a_folder(tmp_path: Path) -> None:
    for name in ("\x1b[31mred.pt", "line\nbreak.pt", "\udcff.pt"):
        save(torch_tree({"x": np.zeros(1, np.float32)}), str(tmp_path / name))
    (tmp_path / ("d" * 200)).mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    ran = in_process("inspect", tmp_path)
    assert ran.status == 0, ran.err
    assert "\x1b" not in ran.out
    assert len(in_process("inspect", tmp_path, "--json").json()["checkpoints"]) == 3


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A folder whose only content are two folders with numbers, each with a checkpoint and its state file."""
    for version, step in ((9, 7500), (10, 15000)):
        (tmp_path / str(version)).mkdir()
        for end in (".index", ".data-00000-of-00001"):
            source = f"{TF_SAMPLE.with_name(f'ckpt-{step}')}{end}"
            shutil.copy(source, tmp_path / str(version) / f"variables{end}")
    return tmp_path


def _saved_models(folder: Path) -> None:
    for version in folder.iterdir():
        (version / "variables").mkdir()
        for file in version.glob("variables.*"):
            file.rename(version / "variables" / file.name)
        (version / "fingerprint.pb").write_bytes(b"")


def test_a_folder_of_versions_stands_for_the_highest(served: Path) -> None:
    _saved_models(served)
    document = in_process("inspect", served, "--json").json()
    assert document["path"] == str(served / "10")
    assert [(os.path.basename(c["path"]), c["latest"]) for c in document["checkpoints"]] == [
        ("9", False), ("10", True)
    ]  # fmt: skip
    shutil.rmtree(served / "10")
    assert in_process("inspect", served, "--json").json()["path"] == str(served / "9")
    assert in_process("digest", served, "-q").status == 0


def test_folders_without_numbers_are_only_listed(served: Path) -> None:
    _saved_models(served)
    (served / "9").rename(served / "best")
    document = in_process("inspect", served, "--json").json()
    assert document["tensors"] == []
    assert not any(checkpoint["latest"] for checkpoint in document["checkpoints"])


def test_the_latest_of_the_only_folder(tmp_path: Path) -> None:
    shutil.copytree(TF_SAMPLE.parent, tmp_path / "run")
    document = in_process("inspect", tmp_path, "--json").json()
    assert document["path"] == str(tmp_path / "run" / TF_SAMPLE.name)
    sizes = [os.path.getsize(f"{TF_SAMPLE}{end}") for end in (".index", ".data-00000-of-00001")]
    assert document["checkpoints"][0]["nbytes"] == sum(sizes)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("inspct", "x"), "inspect"),
        (("inspect", TF_SAMPLE, "--sort", "sze"), "size"),
        (("convert", TF_SAMPLE, "x", "--to", "toch"), "torch"),
        (("convert", TF_SAMPLE, "x.pt", "--layout", "td3tf"), "td3_tf"),
    ],
)
def test_a_mistyped_word(arguments: tuple[object, ...], meant: str, tmp_path: Path) -> None:
    ran = in_process(*(tmp_path / a if a in ("x", "x.pt") else a for a in arguments))
    assert ran.status == 2
    assert re.search(f"[Dd]id you mean '?{meant}", ran.err)


def test_a_slot_whose_path_names_its_parameter_needs_no_second_name() -> None:
    slot = {"role": "slot", "slot": "m"}
    summary = listing(
        rows(
            ("net/l1/w", (2,), {}),
            ("net/l1/w/Adam", (2,), {**slot, "of": "net/l1/w"}),
            ("opt/slots/m/net/l1/w", (2,), {**slot, "of": "net/l1/w"}),
            ("opt/m/0", (2,), {**slot, "of": "net/l1/w"}),
            ("opt/m/internet/l1/w", (2,), {**slot, "of": "net/l1/w"}),
        )
    )
    notes = [
        line.partition(" B")[2].strip() for line in render_tree(summary, TreeView(quiet=True)).splitlines()
    ]
    assert [note for note in notes if note] == ["slot m", "slot m", "m of net/l1/w", "m of net/l1/w"]


def test_a_framework_s_own_lists_are_no_names() -> None:
    own = (
        "variables/0",
        "_self_tracked/1",
        "layer-1/kernel",
        "keras_api/layers/0/kernel",
        "model/layers/0/w",
    )
    summary = listing(
        rows(("l1/w", (2,), {"aliases": (*own, "first/w", "other/w")}), ("l2/w", (2,), {"aliases": own}))
    )
    text = render_tree(summary, TreeView(quiet=True))
    assert text.count("also") == 1
    assert "also first/w (+1)" in text
    assert all(f"also {name}\n" in f"{render_tree(summary, TreeView(aliases=True))}\n" for name in own)


def test_frozen_parameters_are_counted() -> None:
    summary = listing(
        rows(("a", (3,), {"trainable": False}), ("b", (2,), {"trainable": True}), ("c", (9,), {}))
    )
    assert "(3 frozen)" in render_tree(summary, TreeView())
    assert "frozen" not in render_tree(listing(rows(("b", (2,), {"trainable": True}))), TreeView())


def test_plain_values_have_the_whole_line(tmp_path: Path) -> None:
    name = "prioritized_replay_beta_iters"
    file = tmp_path / "x.npz.pkl"
    file.write_bytes(pickle.dumps({"w": np.zeros(3), "data": {name: 7, "note": "n" * 300}}))
    ran = in_process("inspect", file)
    assert f"{name}  = 7" in ran.out
    assert max(map(len, ran.out.splitlines()[2:])) <= 80


def test_a_numbered_layer_has_its_own_name(golden: Golden) -> None:
    summary = listing(
        rows(
            ("model/_operations/1/kernel", (2,), {"name": "mlp/hidden/kernel"}),
            ("model/_operations/1/bias", (2,), {"name": "mlp/hidden/bias"}),
            ("model/_operations/2/kernel", (2,), {"name": "a/kernel"}),
            ("model/_operations/2/bias", (2,), {"name": "b/bias"}),
            ("model/layer-7/kernel", (2,), {"name": "x/kernel"}),
            ("model/head/kernel", (2,), {"name": "y/kernel"}),
            ("model/_momentums/0", (2,), {"name": "adam/m"}),
        ),
        {"model/layer-7": Container("module", "Dense", {"layer": "out", "activation": "relu"})},
    )
    modules = [
        " ".join(line.split())
        for line in render_tree(summary, TreeView(quiet=True)).splitlines()
        if " 8 B" not in line
    ]
    assert [line.rpartition(" B")[0].rsplit(" ", 2)[0] for line in modules[1:]] == [
        "model", "_operations", "1 hidden", "2",
    ]  # fmt: skip
    text = render_tree(summary, TreeView(quiet=True, depth=2))
    golden(text)
    assert not re.search("adam|: y| y ", text)


def test_names_sort_by_their_numbers_of_however_many_digits() -> None:
    from ckpttool.core.text import natural_sort_key

    in_order = ["a", "l01", "l1", "l2", "l10", "l10a", "l" + "9" * 5000, "l1" + "0" * 5000]
    shuffled = in_order[::-1]
    assert sorted(shuffled, key=natural_sort_key) == in_order


def test_very_many_values_are_counted_and_shown_by_all(tmp_path: Path) -> None:
    entries: dict[str, Any] = {f"config/k{number}": number for number in range(3000)}
    for number in range(150):
        entries |= {f"lists/l{number}/{at}": at + number for at in range(10)}
    entries |= {f"layers/l{number}.weight": np.ones(2, np.float32) for number in range(150)}
    path = tmp_path / "many.pt"
    save(torch_tree(entries), str(path))
    short, whole = (in_process("inspect", path, *words).out.splitlines() for words in ((), ("--all",)))
    assert len(whole) > 4650
    assert len(short) < 1500
    assert any("2,980 more" in line for line in short)
    assert any("520 values" in line for line in short)
    assert sum("float32[2]" in line for line in whole) == 150
    assert len(in_process("inspect", path, "--json").json()["values"]) == 4500


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ({"w": np.ones(3)}, "SAFE to load"),
        ({"w": np.ones(3), "space": Terminal}, "NEEDS CLASSES"),
        ({"w": np.ones(3), "run": os.system}, "RUNS CODE"),
    ],
    ids=["plain", "classes", "code"],
)
def test_the_verdict_is_the_first_line_and_that_of_check(value: Any, label: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(value))
    verdict = ckpttool.summary(str(path)).verdict
    ran = in_process("inspect", path)
    assert ran.out.startswith(f"{label}: ")
    assert ran.out.split(":")[0] == verdict.label
    assert in_process("check", path, "--no-numbers", "--quiet").status == (not verdict.passes)
    assert in_process("doctor", path).out.startswith(f"{label}: ")
    assert in_process(path).out.startswith(f"{label}: ")
