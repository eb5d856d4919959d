"""The working directory: files in it are read when they are named, and none of them is ever run."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpttool.core import search_paths
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, command_loop

# What pip installs as the command.
SCRIPT = "import sys\nfrom ckpttool.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
MODULE = "open({mark!r}, 'a').write({name!r} + chr(10))\nraise SystemExit(99)\n"
PROGRAM = "#!/bin/sh\necho {name} >> {mark}\nexit 99\n"
PROGRAMS = [
    "ffmpeg",
    "gcc",
    "cc",
    "ld",
    "ldconfig",
    "objdump",
    "uname",
    "git",
    "gcloud",
    "nvidia-smi",
    "latex",
]
GROUPS = ["ckpttool.formats", "ckpttool.layouts", "ckpttool.backends", "gymnasium.envs", "torch.backends"]
GROUPS += ["fsspec.specs", "matplotlib.backend"]
TORCH, TF = str(TORCH_SAMPLE), str(TF_SAMPLE)
PLAYED = [TORCH, "--env", "Pendulum-v1", "--episodes", "1"]
COMMANDS: list[list[str]] = [
    ["inspect", TORCH, "--graph", "a.svg"],
    ["digest", TF],
    ["convert", TORCH, "agent.zip", "--to", "sb3", "--no-verify"],
    ["convert", TORCH, "filled.pt", "--like", "users_model:Model", "--part", "actor", "--allow-missing"],
    ["verify", TORCH, TORCH],
    ["eval", *PLAYED, "--plot", "b.pdf", "--video", "b.gif", "--csv", "b.csv", "--jobs", "1"],
    ["eval", TORCH, "--env", "users_environments:Pendulum-v1", "--episodes", "1"],
    ["stats", TORCH],
    ["doctor", TORCH, "--env", "Pendulum-v1"],
    ["check", TORCH, TF],
    ["textconv", TORCH],
    ["diff", TORCH, TF],
    ["report", TORCH],
    ["browse", TORCH],
    ["formats"],
    ["layouts"],
    ["backends"],
    ["limits"],
    ["schema"],
]
STATUS = {"diff": 1, "browse": 2}


def everything() -> set[str]:
    """Return every name that an import could ask for."""
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    return installed | sys.stdlib_module_names | {"sitecustomize", "usercustomize", "ckpttool", "readline"}


def plant(folder: Path, names: set[str]) -> Path:
    """Fill a folder with modules and programs that leave a mark when they run; return the mark."""
    mark = folder / "RAN"
    for name in names:
        (folder / f"{name}.py").write_text(MODULE.format(mark=str(mark), name=name))
    for name in PROGRAMS:
        (folder / name).write_text(PROGRAM.format(mark=mark, name=name))
        (folder / name).chmod(0o755)
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (folder / "stranger.py").write_text(MODULE.format(mark=str(mark), name="entry point"))
    (info / "entry_points.txt").write_text("".join(f"[{group}]\nstranger = stranger:x\n" for group in GROUPS))
    # matplotlib would start latex, and then draw a page of a square kilometre.
    (folder / "matplotlibrc").write_text(
        "text.usetex: True\nsavefig.dpi: 1000000\nbackend: module://stranger\n"
    )
    for name in (".env", ".netrc", "pyvenv.cfg", "setup.cfg", "pyproject.toml", "keras.json", "fsspec.json"):
        (folder / name).write_text("\0 no such settings {")
    return mark


def run(
    start: Sequence[str], folder: Path, words: Sequence[str], inputs: str | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f":.:{os.environ['PATH']}:",
        "CUDA_VISIBLE_DEVICES": "",
        **env,
    }
    return subprocess.run(
        [*start, *words],
        cwd=folder,
        env=environment,
        input=inputs,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_all(folder: Path, commands: Sequence[Sequence[str]], **env: str) -> list[tuple[int, str, str]]:
    """Run commands one after the other in one process, started as pip's; return statuses and outputs."""
    loop = folder.parent / f"{folder.name}-bin" / "ckpttool"
    loop.parent.mkdir(exist_ok=True)
    loop.write_text(command_loop())
    lines = json.dumps([" ".join(words) for words in commands])
    done = run([sys.executable, str(loop)], folder, [], inputs=lines, **env)
    assert done.returncode == 0, done.stderr
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])[0]]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command as pip installs it."""
    file = tmp_path_factory.mktemp("bin") / "ckpttool"
    file.write_text(SCRIPT)
    return [sys.executable, str(file)]


def test_no_command_is_left_out() -> None:
    from ckpttool.cli import app

    assert {entry.name for entry in app.COMMANDS} == {words[0] for words in COMMANDS}


def starts_framework(words: list[str]) -> bool:
    """Return whether a command starts a framework that another command starts as well."""
    return words[0] == "verify" or "sb3" in words


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_in_the_working_directory_is_run(tmp_path: Path, apart: bool) -> None:
    """All commands in one process, which imports each module once, or each in a process of its own."""
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    mark = plant(tmp_path, everything())
    (tmp_path / "users_model.py").write_text(
        "import users_helper, torch\n"
        f"open({str(tmp_path / 'MODEL')!r}, 'w')\n"
        "class Model(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(torch.nn.Linear(3, users_helper.WIDTH))\n"
    )
    (tmp_path / "users_helper.py").write_text("WIDTH = 64\n")
    (tmp_path / "users_environments.py").write_text("import gymnasium\n")

    # The user's own environment is imported from here, which the process remembers.
    alone = [words for words in COMMANDS if apart or any("users_environments" in word for word in words)]
    together = [words for words in COMMANDS if words not in alone and not starts_framework(words)]
    for commands in (together, *([words] for words in alone)):
        ran = run_all(tmp_path, commands)
        assert not mark.exists(), mark.read_text()
        for words, (status, _, err) in zip(commands, ran, strict=True):
            assert status == STATUS.get(words[0], 0), (words, err)
    assert (tmp_path / "MODEL").exists()


def started_by(start: list[str], folder: Path) -> set[str]:
    """Return what Python itself imports before the first line of a program that is started like this."""
    package = folder / "ckpttool"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import sys\nprint(*sys.modules)\n")
    (package / "__main__.py").write_text("")
    return set(run(start, folder, [], PYTHONPATH="").stdout.split())


@pytest.mark.parametrize("joined", [False, True], ids=["-m", "-m, and an empty element in PYTHONPATH"])
def test_run_as_a_module_it_leaves_the_working_directory_first(tmp_path: Path, joined: bool) -> None:
    """Python imports modules of its own before it comes to us, from the working directory where they are."""
    start = [sys.executable, "-m", "ckpttool"]
    before = started_by(start, tmp_path / "before") | {"ckpttool", "sitecustomize", "usercustomize"}
    folder = tmp_path / "here"
    folder.mkdir()
    mark = plant(folder, everything() - before)
    path = f":{ROOT}" if joined else str(ROOT)
    for words in (["inspect", TORCH], ["digest", TF]):
        done = run(start, folder, words, PYTHONPATH=path)
        assert not mark.exists(), mark.read_text()
        assert done.returncode == 0, done.stderr


PLUGIN = """
from pathlib import Path
Path({mark!r}).touch()
NAME, TITLE, WRITES, FRAMEWORK = "stranger", "A stranger's format", False, "numpy"
def claims(probe): return None
def read(probe): return None
"""
CHILD = "from ckpttool.formats import child_process\nprint(child_process.child_paths())\n"
LISTING = "import ckpttool.core.plugins as p\nfor each in p.installed('formats'): each.load()\n"


def metadata(folder: Path, kind: str, name: str = "stranger") -> None:
    """Put the metadata of a package with a format, and the format's module, in a folder."""
    info = folder / ("EGG-INFO" if kind == "egg" else f"{name}-1.0.{kind}")
    info.mkdir(parents=True)
    (info / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[ckpttool.formats]\n{name} = {name}\n")
    (folder / f"{name}.py").write_text(PLUGIN.format(mark=str(folder / "RAN")))


# How a user's own program starts in a folder of strangers' files: its words, and elements of PYTHONPATH.
STARTS = {
    "-c": (["-c", LISTING], []),
    "-m": (["-m", "users_tool"], []),
    "script": (["users_script.py"], []),
    "standard input": (["-"], []),
    "-c, empty element": (["-P", "-c", LISTING], [""]),
    "-m, empty element": (["-m", "users_tool"], ["", ""]),
    "-c, relative element": (["-c", f"import sys; sys.path.append('.')\n{LISTING}"], []),
}


@pytest.mark.parametrize("kind", ["dist-info", "egg-info", "egg"])
@pytest.mark.parametrize("start", STARTS)
def test_no_entry_point_is_loaded_from_the_working_directory(tmp_path: Path, start: str, kind: str) -> None:
    """In a user's own program as well, where Python itself searches the working directory for modules."""
    folder = tmp_path / ("stranger-1.0.egg" if kind == "egg" else "downloads")
    metadata(folder, kind)
    tools = tmp_path / "tools"
    metadata(tools, "dist-info", "wanted")
    (tools / "users_tool.py").write_text(LISTING)
    (folder / "users_script.py").write_text(LISTING)
    words, elements = STARTS[start]
    path = os.pathsep.join([*elements, str(ROOT), str(tools)])
    done = run([sys.executable], folder, words, inputs=LISTING, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert not (folder / "RAN").exists()
    # The search itself works.
    assert (tools / "RAN").exists()


def test_a_reader_in_a_process_of_its_own_does_not_search_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "users_tool.py").write_text(CHILD)
    path = os.pathsep.join([str(ROOT), str(tmp_path / "tools")])
    done = run([sys.executable, "-m", "users_tool"], tmp_path, [], PYTHONPATH=path)
    paths = json.loads(done.stdout)
    assert str(tmp_path) not in paths
    assert str(tmp_path / "tools") in paths


@pytest.mark.parametrize("choice", ["named", "named by a dot", "site-packages"])
def test_entry_points_in_the_working_directory_that_the_user_chose(tmp_path: Path, choice: str) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    folder = tmp_path / "lib" / version / "site-packages"
    metadata(folder, "dist-info")
    prefix = ""
    if choice == "site-packages":
        prefix = (
            f"import site, sys; site.PREFIXES[:] = [{str(tmp_path)!r}]; sys.path.append({str(folder)!r})\n"
        )
    chosen = {"named": str(folder), "named by a dot": "."}.get(choice)
    path = os.pathsep.join(filter(None, [str(ROOT), chosen]))
    done = run([sys.executable, "-c", prefix + LISTING], folder, [], PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert (folder / "RAN").exists()


def test_a_module_with_the_name_of_an_installed_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    mark = plant(folder, {"torch", "gymnasium"})
    (folder / "package").mkdir()  # a folder without modules has no say
    commands = [
        ["convert", TORCH, "x.pt", "--like", "torch.nn:Linear", "--json"],
        ["eval", TORCH, "--env", "gymnasium:Pendulum-v1", "--json"],
        ["doctor", TORCH, "--env", "gymnasium:Pendulum-v1", "--json"],
    ]
    for words, (status, out, err) in zip(commands, run_all(folder, commands), strict=True):
        assert status == 2, err
        error = json.loads(out)["error"]
        assert error["kind"] == "usage"
        assert error["file"] == str(folder / f"{'torch' if words[0] == 'convert' else 'gymnasium'}.py")
    assert not mark.exists()


def test_the_folder_that_pythonpath_names_is_the_users_choice(tmp_path: Path, script: list[str]) -> None:
    (tmp_path / "users_environments.py").write_text("import tkinter\n")
    mark = plant(tmp_path, {"tkinter"})
    done = run(
        script,
        tmp_path,
        ["eval", *PLAYED[:1], "--env", "users_environments:Pendulum-v1"],
        PYTHONPATH=f".:{ROOT}",
    )
    assert done.returncode != 0
    assert mark.exists()


def test_child_processes_search_named_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, os.pathsep.join(["", ".", "tools", "", "/usr/bin", ""]))
    variables = search_paths.child_environment()
    assert variables["PATH"] == "/usr/bin"
    # A relative folder of modules is one that the user typed.
    typed = os.pathsep.join([".", "tools", "/usr/bin"])
    assert (variables["PYTHONPATH"], variables["LD_LIBRARY_PATH"]) == (typed, typed)


def test_every_python_is_started_without_the_working_directory() -> None:
    count = 0
    texts = {file: file.read_text() for file in (ROOT / "ckpttool").rglob("*.py")}
    for file in (file for file, text in texts.items() if "executable" in text):
        for node in ast.walk(ast.parse(texts[file])):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                count += 1
                assert ast.literal_eval(node.elts[1]) in ("-I", "-P"), file
    assert count >= 3


def test_plots_have_no_style_but_ours(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    program = (
        "from ckpttool.cli import figures\n"
        "mpl = figures._import_matplotlib()\n"
        "assert mpl.rcParams['text.usetex'] is False, mpl.matplotlib_fname()\n"
    )
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    home = tmp_path / "config" / "matplotlib"
    home.mkdir(parents=True)
    (home / "matplotlibrc").write_bytes(b"text.usetex: True\n\xff\n")
    done = run([sys.executable, "-P", "-c", program], tmp_path, [], XDG_CONFIG_HOME=str(home.parent))
    assert done.returncode == 0, done.stderr
