"""The house: who may import whom, what looking loads, what the package shows."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import ckpttool
from ckpttool.core import plugins
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.conftest import ckpttool as run

PACKAGE = ROOT / "ckpttool"

# A package may import those before it. `ckpttool` itself and `version` stand outside.
FLOORS = [
    {"core"},
    {"encodings"},
    {"formats", "mapping"},
    {"libraries"},
    {"networks"},
    {"evaluation"},
    {"commands"},
    {"report", "browser"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
UPWARD: set[tuple[str, str]] = set()
FORBIDDEN = {
    ("formats", "libraries"),
    ("formats", "networks"),
    ("formats", "mapping"),
    ("mapping", "formats"),
}
FRAMEWORKS = {"torch", "tensorflow", "keras", "gymnasium", "mujoco", "jax", "onnx", "onnxruntime", "ray"}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports(file: Path) -> frozenset[str]:
    """Return what a module imports anywhere."""
    return imported(ast.walk(ast.parse(file.read_text())), file)


def imported(nodes: Iterable[ast.AST], file: Path) -> frozenset[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem[0] != "_")


def imports_go_one_way(file: Path) -> None:
    here = room_of(file)
    for name in imports(file):
        if not name.startswith("ckpttool."):
            continue
        there = name.split(".")[1]
        if there in (here, "version", "__version__") or there not in FLOOR:
            continue
        assert (here, there) not in FORBIDDEN, f"{here} imports {there}"
        assert FLOOR[there] < FLOOR[here] or (here, there) in UPWARD, f"{here} imports {there}"


def frameworks_are_named_by_their_backends_only(file: Path) -> None:
    allowed = {
        "networks/torch_backend.py": {"torch"},
        "networks/torch_programs.py": {"torch"},
        "networks/tensorflow_backend.py": {"tensorflow", "keras"},
        "networks/tensorflow_training.py": {"tensorflow", "keras"},
        "networks/onnx_backend.py": {"onnx", "onnxruntime"},
        "networks/onnx_export.py": {"onnx"},
        "evaluation/torch_rollout.py": {"torch"},
        # What shows the operations of a user's model, imported in that model's process.
        "networks/tracing.py": {"tensorflow", "torch"},
        # Tasks that run on the policy's device, imported there when they are played.
        "evaluation/simulators.py": {"torch"},
        "evaluation/fast_engines.py": {"torch", "mujoco"},
        "evaluation/gymnasium_engine.py": {"gymnasium", "mujoco"},
        "evaluation/environments.py": {"gymnasium"},
        # The library that writes its own files, in a process of its own.
        "formats/sb3_child.py": {"torch", "gymnasium"},
        # What turns a leaf into a framework's tensor, imported when somebody asks for one.
        "core/checkpoint.py": {"torch", "tensorflow"},
    }.get(str(file.relative_to(PACKAGE)), set())
    assert {name.split(".")[0] for name in imports(file)} & FRAMEWORKS <= allowed


def what_draws_is_named_where_it_draws_and_only_when_it_does(file: Path) -> None:
    allowed = {"cli/plots.py": {"matplotlib"}, "evaluation/video.py": {"PIL", "imageio_ffmpeg"}}
    drawing = {"matplotlib", "PIL", "imageio", "imageio_ffmpeg", "pygame"}
    here = str(file.relative_to(PACKAGE))
    assert {name.split(".")[0] for name in imports(file)} & drawing <= allowed.get(here, set())
    # Never at the top, where it would be loaded with the command.
    if any("matplotlib" in name for name in imports(file)):
        at_the_top = imported(ast.parse(file.read_text()).body, file)
        assert not [name for name in at_the_top if "matplotlib" in name]


def test_only_the_report_knows_the_library_of_templates() -> None:
    for file in modules():
        if room_of(file) != "report":
            assert not {name.split(".")[0] for name in imports(file)} & {"jinja2", "markupsafe"}, file


def only_the_command_line_knows_typer_and_rich(file: Path) -> None:
    # The browser's library draws with rich.
    allowed = {"cli": {"typer", "rich"}, "browser": {"rich", "textual"}}.get(room_of(file), set())
    assert {name.split(".")[0] for name in imports(file)} & {"typer", "rich", "textual"} <= allowed


def only_remote_knows_who_speaks_with_servers(file: Path) -> None:
    speaking = {
        "fsspec",
        "aiohttp",
        "yarl",
        "s3fs",
        "botocore",
        "gcsfs",
        "huggingface_hub",
        "requests",
        "http",
    }
    remote = str(file.relative_to(PACKAGE)).startswith("core/remote")
    assert remote or not {name.split(".")[0] for name in imports(file)} & speaking
    # By their names alone, when somebody has named a URL (filesystem.named).
    assert remote or not [name for name in imports(file) if "ckpttool.core.remote" in name]


RULES = (
    imports_go_one_way,
    frameworks_are_named_by_their_backends_only,
    what_draws_is_named_where_it_draws_and_only_when_it_does,
    only_the_command_line_knows_typer_and_rich,
    only_remote_knows_who_speaks_with_servers,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Callable[[Path], None]) -> None:
    broken = {}
    for file in modules():
        try:
            rule(file)
        except AssertionError as error:
            broken[str(file.relative_to(PACKAGE))] = str(error).partition("\n")[0]
    assert not broken


def test_mapping_and_agents_name_no_format_and_no_backend() -> None:
    for room, words in {
        "mapping": ("tensor_bundle", "pytorch"),
        "networks": ("tensor_bundle", "pytorch"),
    }.items():
        for file in (PACKAGE / room).rglob("*.py"):
            assert not [word for word in words if f'"{word}"' in file.read_text()], file


LOOKING = """
import json, sys
import ckpttool
from ckpttool.libraries.recognize import recognize_tree as recognise
for path in json.loads(sys.argv[1]):
    checkpoint = ckpttool.open(path)
    assert len(checkpoint.tree) > 50
    assert recognise(checkpoint.tree, "x") is not None
    ckpttool.summary(path)
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def test_looking_at_every_sample_loads_no_framework_and_no_numpy() -> None:
    samples = [str(p)[: -len(".index")] for p in (ROOT / "sample_ckpts").rglob("*.index")]
    samples += [str(path) for path in (ROOT / "sample_ckpts").rglob("*.pt")]
    assert len(samples) >= 10
    command = [sys.executable, "-c", LOOKING, json.dumps(samples)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    drawing = {"typer", "rich", "jinja2", "textual"}
    assert not loaded & (FRAMEWORKS | drawing | {"numpy", "ml_dtypes", "zipfile", "pickle"})


def test_importing_the_package_loads_almost_nothing() -> None:
    code = "import sys; before = set(sys.modules); import ckpttool; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {name for name in ast.literal_eval(done.stdout) if name.startswith("ckpttool")}
    assert loaded == {"ckpttool", "ckpttool.version"}


def test_the_public_face_is_what_it_says() -> None:
    for name in ckpttool.__all__:
        assert getattr(ckpttool, name) is not None
    visible = {name for name in dir(ckpttool) if not name.startswith("_")}
    assert visible == set(ckpttool.__all__) - {"__version__"}
    with pytest.raises(AttributeError):
        _ = ckpttool.nonsense


def test_every_public_name_has_a_docstring() -> None:
    for name in ckpttool.__all__:
        if name != "__version__":
            assert getattr(ckpttool, name).__doc__, name


def test_the_registry_loads_and_answers_to_its_names() -> None:
    for kind, known in plugins.BUILT_IN.items():
        for plugin in known:
            if not plugin.available():
                continue
            module = plugin.load()
            name = module.TABLE.name if kind == "layouts" else module.NAME
            assert name == plugin.name


COMMANDS = [
    "inspect",
    "digest",
    "check",
    "textconv",
    "convert",
    "verify",
    "eval",
    "report",
    "browse",
    "formats",
    "layouts",
    "backends",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    ran = in_process(command, "--help")
    assert ran.status == 0
    assert re.search("Examples?: ckpttool", ran.out)
    assert "--json" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_help_lists_every_command() -> None:
    ran = run("--help")
    assert ran.status == 0
    assert all(command in ran.out for command in COMMANDS)


def test_a_format_of_another_package_is_found(tmp_path: Path) -> None:
    # A package as pip leaves it behind: a module and its metadata with an entry point.
    info = tmp_path / "shout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpttool.formats]\nshout = shout_format\n")
    (tmp_path / "shout_format.py").write_text(STRANGER)
    (tmp_path / "x.shout").write_bytes(b"SHOUT" + bytes(8))
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    ran = run("inspect", tmp_path / "x.shout", "--json", env=environment)
    assert ran.status == 0, ran.err
    assert ran.json()["format"] == "shout"
    assert ran.json()["tensors"][0]["shape"] == [2]
    listed = run("formats", "--json", env=environment).json()["formats"]
    assert "shout" in [row["name"] for row in listed]
    # The same name from two packages is an error that names both.
    (info / "entry_points.txt").write_text("[ckpttool.formats]\npytorch = shout_format\n")
    clash = run("formats", env=environment)
    assert clash.status == 2
    assert "shout" in clash.err
    assert "ckpttool" in clash.err


def test_a_broken_package_is_named(tmp_path: Path) -> None:
    info = tmp_path / "shout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpttool.formats]\nshout = nowhere_at_all\n")
    (tmp_path / "x.shout").write_bytes(b"SHOUT" + bytes(8))
    ran = run("inspect", tmp_path / "x.shout", env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert ran.status == 2
    assert "shout of package shout cannot be loaded" in ran.err
    assert "fault of ckpttool" not in ran.err


@pytest.mark.parametrize("kind", ["dist-info", "egg-info", "egg", "archive", "finder", "object"])
def test_a_package_is_found_wherever_its_metadata_lies(tmp_path: Path, kind: str) -> None:
    place = tmp_path / ("shout-1.0.egg" if kind == "egg" else "place")
    info = place / ("EGG-INFO" if kind == "egg" else f"shout-1.0.{kind if '-' in kind else 'dist-info'}")
    info.mkdir(parents=True)
    (info / ("PKG-INFO" if "egg" in kind else "METADATA")).write_text(
        "Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text("[ckpttool.formats]\nshout = shout_format\n")
    found = str(place)
    if kind == "archive":
        found = shutil.make_archive(str(tmp_path / "packed"), "zip", place)
    code = tmp_path / "code"
    code.mkdir()
    (code / "shout_format.py").write_text(STRANGER)
    if kind == "finder":
        (code / "sitecustomize.py").write_text(FINDER.format(place=found))
        found = ""
    elif kind == "object":
        program = f"import pathlib, sys; sys.path.append(pathlib.Path({found!r}))"
        (code / "sitecustomize.py").write_text(program)
        found = ""
    environment = {"PYTHONPATH": ":".join(filter(None, [str(ROOT), str(code), found]))}
    listed = run("formats", "--json", env=environment)
    assert "shout" in [row["name"] for row in listed.json()["formats"]]


FINDER = """
import importlib.metadata, sys

class Finder(importlib.metadata.MetadataPathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None

    @classmethod
    def find_distributions(cls, context):
        return super().find_distributions(importlib.metadata.DistributionFinder.Context(path=[{place!r}]))

sys.meta_path.append(Finder)
"""


def test_packages_without_entry_points_of_ours_are_not_parsed(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[console_scripts]\nckpttool.formats = other:main\n")
    program = (
        "import sys; from ckpttool.core import plugins; plugins.installed('formats'); "
        "sys.exit('importlib.metadata' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    subprocess.run([sys.executable, "-S", "-c", program], env=environment, check=True)


STRANGER = """
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tree import Leaf, key
from ckpttool.core.source import File, Span
from ckpttool.core.tree import Tree

NAME, TITLE, WRITES, FRAMEWORK = "shout", "A stranger's format", False, "numpy"

def claims(probe):
    return probe.path if probe.head.startswith(b"SHOUT") else None

def read(location):
    file = File.stamp(location)
    leaf = Leaf("float32", (2,), Span(file, 5, 8), "x")
    return Checkpoint(location, NAME, Tree({(key("x"),): leaf}), (file,))
"""


def test_samples_are_there() -> None:
    assert Path(f"{TF_SAMPLE}.index").is_file()
    assert TORCH_SAMPLE.is_file()


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.glob("test_*.py")), ids=lambda path: path.stem)
def test_no_test_imports_tensorflow_to_learn_whether_it_is_there(file: Path) -> None:
    # Beside PyTorch it may end the process; tensorflow_child.require looks without importing.
    told = re.findall(r'importorskip\(\s*"(keras|tensorflow|tf_keras)', file.read_text())
    assert told == []


def test_the_quick_tests_are_there() -> None:
    listed = re.search(r"^QUICK := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    quick = listed[1].replace("\\\n", " ").split()
    assert [name for name in quick if not (ROOT / "tests" / f"test_{name}.py").is_file()] == []
    assert "house" in quick


def test_one_command_runs_every_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import __main__ as together

    runs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main(" in path.read_text()}
    apart = {"conversion_floor"} | {"claims", "claims_mujoco_py"}  # converting starts it; need a corpus
    assert set(together.ALL) == runs - {"__main__"} - apart
    assert all(map(together.title, together.ALL))
    begun: list[str] = []

    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        begun.append(command[-1])
        return subprocess.CompletedProcess(command, int("playing" in command[-1]))

    monkeypatch.setattr(subprocess, "run", fails)
    assert together.main() == 1
    assert begun == [f"benchmarks.{name}" for name in together.ALL]


def test_the_command_line_starts_without_numpy() -> None:
    heavy = {"numpy", "rich.table", "h5py", "textual"}
    program = f"import sys, ckpttool.cli.app; print(sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
