"""The bundle of wheels for a machine without a network: what it holds, what is installed from it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bundle

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def wheel(folder: Path, name: str, version: str, *requires: str) -> bundle.Wheel:
    """Write a wheel of one module."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    contents = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": "\n".join([*lines, *(f"Requires-Dist: {item}" for item in requires)]) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in (contents | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)
    content = file.read_bytes()
    return bundle.Wheel(file.name, name, version, len(content), hashlib.sha256(content).hexdigest())


def manifest(folder: Path, *wheels: bundle.Wheel, **changes: Any) -> None:
    facts = {
        "python": HERE,
        "platform": f"manylinux_2_28_{platform.machine()}",
        "optional": {},
        "wheels": [vars(item) for item in wheels],
    }
    (folder / bundle.MANIFEST).write_text(json.dumps(facts | changes))


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the requirements that are installed in these tests."""
    expected: list[str] = []
    monkeypatch.setattr(bundle, "_roots", lambda _: expected)
    return expected


def test_older_platforms_are_included() -> None:
    tags = bundle.platforms("manylinux_2_28_x86_64")
    assert tags[0] == "manylinux_2_28_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} <= set(tags)
    assert "manylinux_2_29_x86_64" not in tags
    assert bundle.platforms("macosx_14_0_arm64") == ["macosx_14_0_arm64"]


def test_what_the_machine_has_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roots: list[str]
) -> None:
    machine = {"present": "2.0", "old": "1.0", "numpy": "1.20"}
    monkeypatch.setattr(bundle, "_installed", machine.get)
    wheels = {
        candidate.name: candidate
        for candidate in (
            wheel(tmp_path, "present", "9.0"),
            wheel(tmp_path, "old", "2.0", "further>=1", "other; python_version < '3'", "more; extra == 'x'"),
            wheel(tmp_path, "numpy", "2.4"),
            wheel(tmp_path, "further", "1.5"),
            wheel(tmp_path, "new", "0.30"),
        )
    }
    expected = ["present>=1", "old>=2", "numpy>=1.26", "new>=0.24,<0.29", "absent"]
    chosen, lacking = bundle.choose(tmp_path, wheels, expected)
    assert [candidate.name for candidate in chosen] == ["old", "further"]
    assert {name.split(">")[0].split("<")[0] for name in lacking} == {"numpy", "new", "absent"}


def test_an_installation_without_a_network(tmp_path: Path, roots: list[str]) -> None:
    folder, target = tmp_path / "bundle", tmp_path / "site"
    folder.mkdir()
    manifest(
        folder,
        wheel(folder, "ckpttool_first", "1.0", "ckpttool_second"),
        wheel(folder, "ckpttool_second", "3"),
    )
    roots += ["ckpttool_first"]
    # Names are compared as packages indexes do.
    facts = json.loads((folder / bundle.MANIFEST).read_text())
    for row in facts["wheels"]:
        row["name"] = row["name"].replace("_", "-")
    (folder / bundle.MANIFEST).write_text(json.dumps(facts))
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in unreachable.items():
            patched.setenv(name, value)
        for _ in range(2):  # the second replaces the first
            assert bundle.main([str(folder), "--install", str(target)]) == 0
    program = "import ckpttool_first, ckpttool_second; print(ckpttool_second.version)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "3"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / bundle.MANIFEST).unlink(),
        lambda folder: (folder / bundle.MANIFEST).write_text("[1]"),
        lambda folder: manifest(folder, wheel(folder, "a", "1"), python="2.7"),
        lambda folder: manifest(folder, wheel(folder, "a", "1"), platform="manylinux_2_28_sparc"),
        lambda folder: (folder / "a-1-py3-none-any.whl").unlink(),
        lambda folder: (folder / "a-1-py3-none-any.whl").write_bytes(b"PK"),
        lambda folder: wheel(folder, "a", "1", "b"),
        lambda folder: manifest(folder, bundle.Wheel("../a-1-py3-none-any.whl", "a", "1", 1, "")),
    ],
    ids=["no manifest", "other", "python", "machine", "missing", "broken", "changed", "outside"],
)
def test_a_bundle_that_does_not_fit_installs_nothing(
    tmp_path: Path, roots: list[str], spoil: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = tmp_path / "bundle", tmp_path / "site"
    folder.mkdir()
    manifest(folder, wheel(folder, "a", "1"))
    roots += ["a"]
    spoil(folder)
    assert bundle.main([str(folder), "--install", str(target)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not target.exists()


class TestMaking:
    """The bundle with a stand-in for pip, whose downloads are wheels of one module."""

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
        calls: list[tuple[str, ...]] = []

        def pip(*arguments: str) -> None:
            calls.append(arguments)
            kind = "--dest" if arguments[0] == "download" else "--wheel-dir"
            folder = Path(arguments[arguments.index(kind) + 1])
            wheel(folder, "ckpttool" if arguments[0] == "wheel" else "typer", "0.28")

        monkeypatch.setattr(bundle, "_pip", pip)
        return calls

    def test_it_holds_the_core_and_says_what_it_leaves_out(
        self, tmp_path: Path, commands: list[tuple[str, ...]]
    ) -> None:
        folder = tmp_path / "gpu_bundle"
        for _ in range(2):  # a new one replaces an older one
            assert bundle.main([str(folder), "--python", "3.12"]) == 0
        facts = json.loads((folder / bundle.MANIFEST).read_text())
        assert {wheel["name"] for wheel in facts["wheels"]} == {"ckpttool", "typer"}
        assert {"torch", "mujoco"} <= set(facts["left_out"])
        assert facts["python"] == "3.12"
        assert sorted(file.suffix for file in folder.iterdir()) == [".json", ".txt", ".whl", ".whl"]
        project = tomllib.loads((bundle.ROOT / "pyproject.toml").read_text())["project"]
        assert set(project["dependencies"]) <= set(commands[0])
        assert not any("torch" in argument for argument in commands[0])
        assert "mujoco" not in commands[0]

    def test_mujoco_is_added(self, tmp_path: Path, commands: list[tuple[str, ...]]) -> None:
        assert bundle.main([str(tmp_path / "b"), "--mujoco"]) == 0
        assert "mujoco" in commands[0]
        assert "mujoco" in json.loads((tmp_path / "b" / bundle.MANIFEST).read_text())["optional"]

    def test_a_folder_of_other_things_is_left_alone(
        self, tmp_path: Path, commands: list[tuple[str, ...]]
    ) -> None:
        (tmp_path / "notes").write_text("mine")
        assert bundle.main([str(tmp_path)]) == 2
        assert [file.name for file in tmp_path.iterdir()] == ["notes"]
        assert commands == []

    def test_one_that_is_too_large_is_not_kept(
        self, tmp_path: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bundle, "MOST_BYTES", 10)
        assert bundle.main([str(tmp_path / "b")]) == 2
        assert list(tmp_path.iterdir()) == []
