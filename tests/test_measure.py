"""The benchmarks' measurements: memory, time and failures of programs whose figures are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure import Cost, Run, compare, once

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the launcher adopts orphans as Linux lets it"
)
ROOT = Path(__file__).parents[1]
# Written page by page: fresh memory takes no place before.
TOUCH = "import sys; held = bytearray(b'x') * (int(sys.argv[1]) << 20)"
LARGE_PARENT = """
import json, resource, sys
from benchmarks.measure import once
held = b"x" * (500 << 20)
here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([here, *(once(command) for command in json.loads(sys.argv[1]))]))
"""


def touching(mebibytes: int) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", TOUCH, str(mebibytes)]


def test_memory_is_the_command_s_whatever_its_parent_holds() -> None:
    commands = [["true"], touching(0), touching(6), touching(48)]
    program = [sys.executable, "-c", LARGE_PARENT, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=True)
    here, *costs = json.loads(done.stdout)
    small, empty, six, many = (Run(*run).mebibytes for run in costs)
    assert here > 500
    assert small < 4
    assert abs(six - empty - 6) < 2
    assert abs(many - empty - 48) < 2


def test_what_a_child_of_the_command_takes_counts() -> None:
    program = f"""
import os, sys
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    sys.argv = ["", "64"]
    {TOUCH}
"""
    assert 64 < once([sys.executable, "-I", "-S", "-c", program]).mebibytes < 96


def test_processor_seconds_are_not_those_of_the_clock() -> None:
    busy = once(
        ["sh", "-c", f"{sys.executable} -I -S -c 'import time\nwhile time.process_time() < 0.3: pass'"]
    )
    asleep = once(["sleep", "0.3"])
    assert busy.processor >= 0.3
    assert asleep.seconds >= 0.3
    assert asleep.processor < 0.3
    assert asleep.waits > 0


@pytest.mark.parametrize(
    "command",
    [["false"], ["no-such-command"], ["sh", "-c", "kill -9 $$"], ["sh", "-c", "echo why >&2; exit 3"]],
)
def test_a_command_that_fails_is_an_error_however_soon(command: list[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        once(command)
    assert command[0] in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_ratios_are_taken_round_by_round() -> None:
    # The machine is ten times slower in the last round: both are, and the ratio stays.
    own_cost, reference = (
        Cost.of([Run(scale * seconds, 1, scale, 0, 0) for scale in (1, 1.1, 10)]) for seconds in (3, 2)
    )
    assert own_cost.ratio(reference) == pytest.approx(1.5)
    assert own_cost.processor_ratio(reference) == pytest.approx(1)
    assert own_cost.seconds == pytest.approx(3.3)


def test_every_command_runs_in_every_round(tmp_path: Path) -> None:
    log = tmp_path / "log"
    commands = {name: ["sh", "-c", f"echo {name} >> {log}"] for name in ("a", "b")}
    costs = compare(commands, rounds=2)
    assert log.read_text().split() == ["a", "b"] * 3
    assert {len(cost.runs) for cost in costs.values()} == {2}
