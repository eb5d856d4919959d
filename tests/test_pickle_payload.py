"""Files whose unpickling would act: listed whole, the calls named, nothing run, nothing else opened."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool.core import CkpttoolError, FormatError, Record, ValueLeaf, dangerous_calls
from ckpttool.encodings import Global, PickleObject, dumps, parse_pickle
from ckpttool.formats import open_checkpoint
from ckpttool.listing.audit import audit_notes
from tests.conftest import in_process
from tests.pickles import ACTING
from tests.test_format_pytorch import archive, floats, tensor
from tests.test_format_stable_baselines2 import zipped

ROOT = Path(ckpttool.__file__).resolve().parents[1]


@pytest.fixture
def watched(monkeypatch):
    """Fail at a call that should not be made (after the test: pytest itself asks for the folder)."""
    called: list[Any] = []
    monkeypatch.setattr(os, "getcwd", lambda: called.append("os.getcwd") or "/")
    monkeypatch.setattr(subprocess, "Popen", partial(called.append, "subprocess.Popen"))
    monkeypatch.setattr(pickle, "loads", partial(called.append, "pickle.loads"))
    yield
    monkeypatch.undo()
    assert not called


@pytest.mark.parametrize(("data", "name"), ACTING.values(), ids=ACTING)
def test_calls_become_objects_and_are_named(data, name, watched):
    contents = parse_pickle(data)
    assert dangerous_calls(contents.code_references) == [name]
    [acting] = [reference for reference in contents.code_references if reference.name == name]
    assert acting.verdict == "would run code"
    assert 0 <= (acting.offset or 0) < len(data)


@pytest.mark.parametrize(("data", "name"), ACTING.values(), ids=ACTING)
@pytest.mark.parametrize("end", [b"", b"h\x63.", b"NN."])
def test_what_comes_before_damage_is_named_too(data, name, end, watched):
    with pytest.raises(CkpttoolError, match=re.escape(name)):
        parse_pickle(data[:-1] + end)


def test_each_name_is_told_once_and_work_is_bounded(golden):
    data = b"cos\ngetcwd\n" + b"2)R0" * 100_000 + b"."
    assert dangerous_calls(parse_pickle(data).code_references) == ["os.getcwd"]
    with pytest.raises(FormatError) as caught:
        parse_pickle(b"cos\n" + b"a" * 5000 + b"\n)R.")
    golden(caught.value)


HARMLESS = {
    "a partial of a class that is not called": b"cfunctools\npartial\n(cbuiltins\ndict\ntR.",
    "a name that is not called": b"cos\ngetcwd\n.",
    "a class of a library": b"cmy.net\nPolicy\n)\x81.",
}


@pytest.mark.parametrize("data", HARMLESS.values(), ids=HARMLESS)
def test_what_calls_nothing_is_not_named(data):
    assert not dangerous_calls(parse_pickle(data).code_references)


# ------------------------------------------------------------------ every format that holds pickles


def module() -> Any:
    """A whole module with a payload among its attributes, as a pickle would say it."""
    inner = {"_parameters": {"weight": tensor()}, "_buffers": {}, "_modules": {}}
    state = {"_modules": {"l1": PickleObject(Global("gone", "Layer"), (), 0, state=inner)}, "_parameters": {}}
    state |= {"_buffers": {}, "trap": PickleObject(Global("posix", "system"), ("touch was_run",), 0)}
    return PickleObject(Global("gone", "Net"), (), 0, state=state)


def hostile(folder: Path) -> dict[str, Path]:
    """One file of each format with a payload in it."""
    plain = PickleObject(Global("posix", "system"), ("touch was_run",), 0)
    text = json.dumps({"x": {":type:": "", ":serialized:": base64.b64encode(dumps({"a": plain})).decode()}})
    files = {
        "module.pt": archive(dumps(module()), {"0": floats(1, 2, 3, 4)}),
        "dict.pkl": dumps({"a": plain, "n": 1}),
        "agent.zip": zipped(data=text.encode()),
        "agent.pkl": dumps({"stable_baselines.a": plain, "n": 1}),
        "checkpoint-1": dumps({"worker": pickle.dumps({"filters": 1})[:-1] + dumps([plain])[2:-1] + b"0."}),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in files}


@pytest.mark.parametrize("name", ["module.pt", "dict.pkl", "agent.zip", "agent.pkl", "checkpoint-1"])
def test_every_format_lists_the_file_and_names_the_call(name, tmp_path, golden):
    checkpoint = open_checkpoint(str(hostile(tmp_path)[name]))
    acting = dangerous_calls(checkpoint.code_references)
    assert acting == (["gone.Net", "gone.Layer"] if name == "module.pt" else []) + ["posix.system"]
    golden("\n".join(audit_notes(checkpoint.code_references)))
    if name != "checkpoint-1":
        assert any(
            isinstance(leaf, ValueLeaf) and leaf.value == Record("posix.system", "'touch was_run'")
            for leaf in checkpoint.tree.values()
        )
    assert not (tmp_path / "was_run").exists()


def test_the_tensors_of_a_hostile_module_are_read(tmp_path):
    checkpoint = open_checkpoint(str(hostile(tmp_path)["module.pt"]))
    [(_, leaf)] = checkpoint.tree.tensors()
    assert (leaf.key, leaf.array().tolist()) == ("l1.weight", [1, 2, 3, 4])


def test_many_names_are_counted(tmp_path, golden):
    calls = {f"k{n}": PickleObject(Global("os", f"name_{n}"), (), 0) for n in range(50)}
    (tmp_path / "x.pkl").write_bytes(dumps(calls))
    checkpoint = open_checkpoint(str(tmp_path / "x.pkl"))
    notes = audit_notes(checkpoint.code_references)
    assert len(notes) == 21
    golden(notes[-1])
    assert len(dangerous_calls(checkpoint.code_references)) == 50


class Trap:
    """Asks for a call when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch was_run",)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("form", ["zip", "stream", "pickle"])
def test_what_torch_wrote_is_listed_with_its_payload(form, tmp_path, monkeypatch, golden):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Linear(2, 3)
    net.trap = Trap()
    if form == "pickle":
        Path("x").write_bytes(pickle.dumps(net, 4))
    else:
        torch.save(net, "x", _use_new_zipfile_serialization=form == "zip")
    checkpoint = open_checkpoint("x")
    assert dangerous_calls(checkpoint.code_references) == ["posix.system"]
    golden("\n".join(audit_notes(checkpoint.code_references)))
    read_back = {leaf.key: leaf.array() for _, leaf in checkpoint.tree.tensors()}
    assert read_back.keys() == net.state_dict().keys()
    assert all((read_back[name] == value.numpy()).all() for name, value in net.state_dict().items())
    assert not Path("was_run").exists()


# ------------------------------------------------------------------ the command line


def test_inspect_notes_it_and_digest_and_convert_take_it_as_a_record(tmp_path, golden):
    path = str(hostile(tmp_path)["module.pt"])
    ran = in_process("inspect", path, cwd=tmp_path)
    assert ran.status == 0
    golden("\n".join(line for line in ran.out.splitlines() if "posix" in line))
    assert "l1" in ran.out
    document = in_process("inspect", path, "--json", cwd=tmp_path).json()
    assert document["details"]["calls"] == ["gone.Net", "gone.Layer", "posix.system"]
    digest = in_process("digest", path, "--json", cwd=tmp_path).json()
    assert [item["key"] for item in digest["tensors"]] == ["l1.weight"]
    done = in_process("convert", path, "out.pt", cwd=tmp_path)
    assert done.status == 0, done.err
    assert b"posix" not in (tmp_path / "out.pt").read_bytes()
    assert not (tmp_path / "was_run").exists()


# Runs the command below an audit hook that writes down every event of the kinds that matter.
_AUDITED = """
import sys
seen = []
def hook(event, args):
    if event == "open" and isinstance(args[0], str) or event.split(".")[0] in FAMILIES or event in NAMES:
        seen.append((event, str(args[0]) if args else ""))
FAMILIES = {"subprocess", "socket", "urllib", "webbrowser", "pty", "shutil", "ftplib", "smtplib"}
NAMES = {"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.remove",
         "os.rename", "os.mkdir", "os.chmod", "pickle.find_class", "exec.file"}
from ckpttool.cli import main
sys.addaudithook(hook)
sys.argv = ["ckpttool", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    code = stop.code
else:
    code = 0
import json
print(json.dumps([code, seen]), file=sys.stderr)
"""


@pytest.mark.parametrize("name", ["module.pt", "dict.pkl", "agent.zip", "agent.pkl", "checkpoint-1"])
@pytest.mark.parametrize("verb", ["inspect", "digest"])
def test_an_audit_hook_sees_no_act(name, verb, tmp_path):
    path = str(hostile(tmp_path)[name])
    done = subprocess.run(
        [sys.executable, "-P", "-c", _AUDITED, verb, path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    code, events = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, None)
    opened = {what for event, what in events if event == "open"}
    assert path in opened or name == "module.pt"
    assert [event for event, _ in events if event != "open"] == []
    own = (str(ROOT / "ckpttool"), sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix))
    assert {what for what in opened - {path} if not what.startswith(own)} == set()


INSPECT = (sys.executable, "-P", "-m", "ckpttool", "inspect")
_CALLS = "execve,execveat,fork,vfork,clone,clone3,socket,connect,open,openat,unlink,unlinkat,rename,mkdir"


@pytest.mark.parametrize("name", ["module.pt", "dict.pkl", "agent.zip"])
def test_a_tracer_of_system_calls_sees_no_act(name, tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    path = str(hostile(tmp_path)[name])
    log = tmp_path / "log"
    done = subprocess.run(
        [strace, "-f", "-e", f"trace={_CALLS}", "-o", str(log), *INSPECT, path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = log.read_text().splitlines() if log.exists() else []
    if not any("execve(" in line for line in lines):
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[-100:]}")
    assert done.returncode == 0
    assert "note: " in done.stdout
    assert "posix.system" in done.stdout
    acts = [re.sub(r"^\d+ +", "", line) for line in lines]
    assert sum(act.startswith("execve(") for act in acts) == 1
    others = [act for act in acts if not act.startswith(("execve(", "open", "+++", "---"))]
    assert others == []
    # What comes after the input was opened first is only the input, the interpreter and the package.
    first = next(number for number, act in enumerate(acts) if path in act and act.startswith("open"))
    own = (str(ROOT / "ckpttool"), sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), "/usr/lib")
    for act in acts[first:]:
        match = re.search(r'open(?:at)?\((?:AT_FDCWD, )?"([^"]*)"', act)
        searched = match is not None and match[1] == str(ROOT) and "O_DIRECTORY" in act
        assert match is None or searched or match[1] == path or match[1].startswith(own), act
        assert match is None or match[1] != path or "O_RDONLY" in act, act
    assert not (tmp_path / "was_run").exists()


@pytest.mark.torch
def test_convert_makes_a_state_dict_of_a_hostile_module(tmp_path):
    """What is no tensor is reported and never written: only its state_dict goes into the new file."""
    torch = pytest.importorskip("torch")
    folder = tmp_path / "sub"
    folder.mkdir()
    whole = {"net": module(), "epoch": 3, "list": [PickleObject(Global("posix", "system"), ("true",), 0), 1]}
    (folder / "x.pt").write_bytes(archive(dumps(whole), {"0": floats(1, 2, 3, 4)}))
    done = in_process("convert", "x.pt", "out.pt", cwd=folder)
    assert done.status == 0, done.err
    assert "net/trap" in done.out
    back = torch.load(folder / "out.pt", weights_only=True, mmap=True)
    assert back["net"]["l1.weight"].tolist() == [1, 2, 3, 4]
    assert back["epoch"] == 3
    assert back["list"] == {1: 1}
    assert b"posix" not in (folder / "out.pt").read_bytes()
    assert not (folder / "was_run").exists()
