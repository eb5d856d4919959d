"""The workflows of continuous integration: they parse, and what they name exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(file: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def steps(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def commands(workflow: dict[Any, Any]) -> list[str]:
    return [line for step in steps(workflow) for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_every_action_is_pinned_and_every_job_is_bounded_and_cannot_write(file: Path) -> None:
    workflow = load(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert True in workflow  # YAML 1.1 reads the key `on` so
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        assert "contents: write" not in str(job.get("permissions"))
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_every_file_make_target_and_command_exists(file: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in commands(load(file)):
        words = shlex.split(line)
        if words[0] == "make":
            assert set(words[1:]) <= targets, line
        for word in words:
            if re.match(r"(\.ci|tests|docs|sample_ckpts|benchmarks)/", word):
                assert list(ROOT.glob(f"{word}*")), line


def test_the_versions_of_python_are_those_of_the_package() -> None:
    listed = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for file in WORKFLOWS:
        for job in load(file)["jobs"].values():
            if "strategy" in job:
                assert job["strategy"]["matrix"]["python"] == listed
