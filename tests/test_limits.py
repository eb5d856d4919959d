"""The limits: one record, changed by name, for this thread, this process or those that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from ckpttool.core import CkpttoolError, LimitError, UsageError, WorkerThread, limits
from tests.conftest import in_process, refused


def test_the_record_is_frozen_and_every_limit_has_a_meaning() -> None:
    with pytest.raises(FrozenInstanceError):
        limits.current().members = 1  # type: ignore[misc]
    assert all(field.metadata["meaning"] for field in fields(limits.Limits))


def test_limits_hold_inside_the_block_and_in_the_lanes_that_it_starts() -> None:
    limits_seen = []
    with limits.using(replace(limits.Limits(), members=7)), WorkerThread() as lane:
        lane.do(lambda: limits_seen.append(limits.current().members))
    assert limits_seen == [7]
    assert limits.current() == limits.Limits()


@pytest.mark.parametrize(
    ("stated", "value"), [("5", 5), ("5K", 5 << 10), ("5MiB", 5 << 20), ("2gb", 2 << 30), ("1T", 1 << 40)]
)
def test_sizes_may_have_units_and_started_processes_are_told(stated: str, value: int) -> None:
    with limits.override_limits([f"members={stated}"]):
        assert limits.current().members == value
        program = "from ckpttool.core import limits; print(limits.current().members)"
        assert int(subprocess.check_output([sys.executable, "-c", program])) == value
    assert limits.VARIABLE not in os.environ


@pytest.mark.parametrize("wrong", ["members", "members=", "members=0", "members=-1", "members=1.5", "no=1"])
def test_a_wrong_limit_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError), limits.override_limits([wrong]):
        pass
    refused(in_process("--limit", wrong, "formats"))


def test_the_error_names_the_limit() -> None:
    error = limits.limit_error("members", "the archive has too many members", 10**7, file="a.zip")
    assert isinstance(error, LimitError)
    assert isinstance(error, CkpttoolError)
    assert "10,000,000" in str(error)
    assert "--limit members=N" in str(error.hint)


def test_the_command_lists_what_holds() -> None:
    listed = in_process("--limit", "members=3", "limits", "--json").json()["limits"]
    rows = {row["name"]: row for row in listed}
    assert rows["members"]["value"] == 3
    assert rows["members"]["default"] == limits.Limits().members
    text = in_process("--limit", "members=3", "limits").out
    assert "3 *" in text
    assert all(len(line) <= 80 for line in text.splitlines())
