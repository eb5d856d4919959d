"""The package: what is built holds what it should, and a machine without any framework can use it."""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from tests.conftest import ROOT, TF_SAMPLE, command_loop, in_process

pytest.importorskip("hatchling", reason="hatchling builds the package")

INFO = f"ckpttool-{ckpttool.__version__}.dist-info"
# What a package of another kind than modules is there for: types, JSON Schemas, what pages are made of.
DATA = {".typed", ".json", ".txt", ".html", ".css", ".js", ".j2", ".tcss"}


@dataclass(frozen=True)
class Built:
    """A wheel and a source distribution."""

    wheel: Path
    sdist: Path

    def members(self) -> dict[str, bytes]:
        with zipfile.ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}


def build(source: Path, folder: Path, *targets: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *targets]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def own_files(folder: Path) -> set[str]:
    package = (path for path in (folder / "ckpttool").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in package if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    names = set(built.members())
    assert {name for name in names if not name.startswith(INFO)} == own_files(ROOT)
    assert {Path(name).suffix or Path(name).name for name in own_files(ROOT)} <= {".py", "py.typed", *DATA}
    assert "ckpttool/py.typed" in names
    assert {name.removeprefix(f"{INFO}/") for name in names if name.startswith(INFO)} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip


def test_the_version_stands_in_one_place(built: Built) -> None:
    metadata = email.message_from_bytes(built.members()[f"{INFO}/METADATA"])
    assert metadata["Version"] == ckpttool.__version__ == in_process("--version").out.split()[1]
    named = [
        path for path in (ROOT / "ckpttool").rglob("*.py") if f'"{ckpttool.__version__}"' in path.read_text()
    ]
    assert named == [ROOT / "ckpttool" / "version.py"]
    assert f"## {ckpttool.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_metadata(built: Built) -> None:
    metadata = email.message_from_bytes(built.members()[f"{INFO}/METADATA"])
    assert metadata["Name"] == "ckpttool"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert built.members()[f"{INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    classifiers = set(metadata.get_all("Classifier", []))
    assert {"Operating System :: POSIX", "Typing :: Typed"} <= classifiers
    # What the README promises, no less and no more.
    versions = {item.rpartition(" ")[2] for item in classifiers if re.search(r":: 3\.\d+$", item)}
    assert versions == {"3.11", "3.12", "3.13"}
    assert "Python 3.11 to 3.13" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_links_of_the_readme_are_absolute(built: Built) -> None:
    metadata = email.message_from_bytes(built.members()[f"{INFO}/METADATA"])
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    home, readme = urls["Homepage"], str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"(?:\]\(|(?:src|srcset|href)=\")([^)\"\s]+)", readme)
    assert len(links) > 30
    assert {link for link in links if not link.startswith("https://")} == set()
    assert f"({home}/blob/main/docs/tutorial.md)" in readme
    assert f'srcset="{home}/raw/main/docs/images/report-dark.png"' in readme
    for link in links:
        if (file := re.match(rf"{home}/(?:blob|raw)/main/([^#]+)", link)) is not None:
            assert (ROOT / file[1]).is_file()


def test_every_extra_that_is_named_is_there_and_all_has_those_for_users(built: Built) -> None:
    metadata = email.message_from_bytes(built.members()[f"{INFO}/METADATA"])
    extras = set(metadata.get_all("Provides-Extra", []))
    naming = re.compile(r"(?:ckpttool\[|install_extra\(\"|require_package\([^)]*, \")(\w+)")
    named = {
        extra
        for path in (ROOT / "ckpttool").rglob("*.py")
        for extra in naming.findall(path.read_text(encoding="utf-8"))
    }
    assert named <= extras
    assert {"torch", "gif"} <= named
    needed: dict[str, set[str]] = {}
    for requirement_line in metadata.get_all("Requires-Dist", []):
        requirement, _, condition = requirement_line.partition(";")
        for extra in re.findall(r"extra == '(\w+)'", condition):
            needed.setdefault(extra, set()).add(requirement.strip())
    for_users = extras - {"all", "dev", "docs", "fuzz", "gs", "hf"}  # see pyproject.toml
    assert needed["all"] == set().union(*(needed[extra] for extra in for_users))


def test_an_unpacked_sdist_builds_the_same_wheel_and_has_what_its_tests_need(
    built: Built, tmp_path: Path
) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert unpacked.name == f"ckpttool-{ckpttool.__version__}"
    for name in ("tests", "docs", "examples", "benchmarks", "sample_ckpts"):
        here = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()}
        here = {path for path in here if "__pycache__" not in path.parts}
        assert {path.relative_to(unpacked) for path in (unpacked / name).rglob("*") if path.is_file()} == here
    for name in ("Makefile", "constraints.txt", "pyproject.toml", ".pre-commit-hooks.yaml", "SECURITY.md"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    build(unpacked, tmp_path / "again", "-t", "wheel")
    assert (tmp_path / "again" / built.wheel.name).read_bytes() == built.wheel.read_bytes()


@pytest.mark.skipif(
    not (Path(sys.prefix) / ".installed").exists() or importlib.util.find_spec("pip") is None,
    reason="the Makefile did not make this environment",
)
def test_the_pinned_environment_has_no_conflicts() -> None:
    # Without the path of the tests, on which Keras 2 is (tests/conftest.py).
    command = [sys.executable, "-I", "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def works(python: str) -> bool:
    """Return whether there is such an interpreter; a shim of an absent version fails."""
    name = shutil.which(python)
    return (
        name is not None
        and subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13"])
def test_the_wheel_works_in_a_fresh_environment(built: Built, tmp_path: Path, python: str) -> None:
    if not works(python):
        pytest.skip(f"{python} is not installed")
    folder = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", folder], check=True)
    install = [folder / "bin" / "pip", "install", "--quiet", built.wheel]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the dependencies cannot be installed: {done.stderr[-200:]}")
    program = folder / "bin" / "ckpttool"
    for line in ("--version", f"inspect {TF_SAMPLE}", f"convert {TF_SAMPLE} agent.npz --to npz"):
        done = subprocess.run(
            [program, *line.split()], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout, line
    assert (tmp_path / "agent.npz").exists()


# --- A machine that has the core and nothing else ---------------------------------------------------

# In one process, as somebody types them: the arguments, the status, what is said. {} is the folder.
WORKS = [
    "inspect {tf}", "digest {tf}", "stats {tf}", "convert {tf} agent.pt --quiet", "diff {tf} agent.pt",
    "convert agent.pt back-1 --to tf --quiet", "convert agent.pt agent.h5 --to keras --quiet",
    "convert agent.pt agent.npz --quiet", "convert agent.pt agent.safetensors --quiet", "doctor agent.pt",
    "check agent.pt agent.npz", "textconv agent.pt", "formats", "layouts", "backends", "limits",
    "report agent.pt --out page.html", "eval agent.pt --episodes 2",
]  # fmt: skip
# What needs more, and the extra that the hint must name.
LACKS = {
    "eval agent.pt --env HalfCheetah-v5": "eval",
    "eval agent.pt --backend torch": "torch",
    "eval agent.pt --backend tensorflow": "tensorflow",
    "eval agent.pt --backend onnxruntime": "onnx",
    "eval agent.pt --plot returns.png": "eval",
    "eval agent.pt --video play.mp4": "gif",
    "eval agent.pt --ray local": "ray",
    "convert agent.pt agent.onnx": "onnx",
    "convert agent.pt agent.zip --to sb3": "sb3",
    "browse agent.pt": "browse",
    "inspect https://localhost/agent.pt": "remote",
    "inspect s3://bucket/agent.pt": "s3",
}
# A terminal, which the browser requires.
TERMINAL = """
class Terminal:
    def isatty(self):
        return True

os.environ["TERM"] = "xterm"
sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = Terminal()
"""


def closure(names: list[str]) -> set[str]:
    """Return the distributions that these need, themselves included; extras are left out."""
    result: set[str] = set()
    left = [re.split(r"[\s<>=!~;\[(]", name)[0] for name in names if "extra ==" not in name]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in result:
            continue
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        result.add(name)
        left += [re.split(r"[\s<>=!~;\[(]", item)[0] for item in needed if "extra ==" not in item]
    return result


@pytest.fixture(scope="session")
def bare(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python that has the wheel, and of all that is installed here what the wheel needs."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(packages)
    metadata = email.message_from_bytes(built.members()[f"{INFO}/METADATA"])
    for name in closure(metadata.get_all("Requires-Dist", [])):
        installed = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (packages / top).symlink_to(str(installed.locate_file(top)))
    return folder / "bin" / "python"


def test_without_a_framework_all_works_that_needs_none_and_the_rest_names_its_extra(
    bare: Path, tmp_path: Path
) -> None:
    lines = [word.format(tf=TF_SAMPLE) for word in (*WORKS, *LACKS)]
    process: Any = subprocess.run(
        [bare, "-I", "-c", command_loop(TERMINAL)],
        input=json.dumps(lines),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    answers, loaded = json.loads(process.stdout)
    for line, (status, out, err) in zip(lines[: len(WORKS)], answers, strict=False):
        assert (status, err) == (0, ""), line
        assert out, line
    for line, extra, (status, out, err) in zip(LACKS, LACKS.values(), answers[len(WORKS) :], strict=True):
        assert (status, out) == (2, ""), line
        assert err.startswith("ckpttool: "), line
        assert err.splitlines()[1:] == [f"hint: {bare} -m pip install 'ckpttool[{extra}]'"], line
    assert not {"torch", "tensorflow", "keras", "gymnasium", "matplotlib", "ray", "textual", "fsspec"} & set(
        loaded
    )
