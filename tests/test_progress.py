"""Progress: on a terminal's stderr only, only for what takes longer than a moment; nothing stays."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.conftest import ROOT, TORCH_SAMPLE

COUNTING = """
import time
from ckpttool.cli.progress import show_progress as progress
from ckpttool.cli import parameters
if {clock}:  # a moment, however long the machine takes
    now = iter({reports} * [0.0] + {reports} * [0.3])
    parameters.time = type("time", (), {{"monotonic": lambda: next(now)}})
with progress("eval", quiet={quiet}, unit="episodes") as moving:
    for n in range({reports}):
        moving(n, 40, 1000 * n)
        time.sleep(0 if {clock} else 0.1)
print("done")
"""

# So slow that its progress is seen, and without any work.
SLOW = """
import time
import gymnasium
from gymnasium.envs.classic_control.pendulum import PendulumEnv

class Slow(PendulumEnv):
    def step(self, action):
        time.sleep(0.002)
        return super().step(action)

gymnasium.register("Slow-v0", Slow, max_episode_steps=20)
"""


def watched(*arguments: str, path: Path = ROOT) -> tuple[str, str]:
    """Run Python with a terminal of 80 columns as stderr; return what it wrote there, and on stdout."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}", "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=terminal, env=environment
    ) as child:
        os.close(terminal)
        output = b""
        try:
            while part := os.read(master, 65536):
                output += part
        except OSError:
            # Linux says so when the last writer has gone.
            pass
        finally:
            os.close(master)
        out, _ = child.communicate(timeout=60)
    assert child.returncode == 0, output.decode()
    return output.decode(), out.decode()


def counting(reports: int, *, quiet: bool = False, clock: bool = False) -> tuple[str, str]:
    return watched("-c", COUNTING.format(reports=reports, quiet=quiet, clock=clock))


def test_a_long_play_shows_episodes_speed_and_the_time_that_is_left() -> None:
    text, out = counting(20)
    assert out == "done\n"
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", text)]
    shown = [line for line in lines if "episodes" in line]
    assert shown
    assert all(line.startswith("eval ") and len(line) <= 80 for line in shown)
    done, left = [], []
    for line in shown:
        facts = re.fullmatch(
            r"eval \S+ +(\d+)/40 episodes +([\d,]* steps/s)? *(\d+:\d\d:\d\d|-:--:--) *", line
        )
        assert facts is not None, line
        done.append(int(facts[1]))
        left.append(facts[3])
    assert done == sorted(done)
    assert re.search(r"\d,\d{3} steps/s", shown[-1])
    # The bar takes itself away, and gives the cursor back.
    assert text.endswith("\x1b[2K")
    assert "\x1b[?25h" in text


def test_a_long_conversion_shows_its_rate() -> None:
    program = COUNTING.format(reports=20, quiet=False, clock=False).replace("episodes", "bytes")
    text, out = watched("-c", program.replace("moving(n, 40, 1000 * n)", "moving(n * 10**6, 40 * 10**6)"))
    assert out == "done\n"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"eval \S+ +\d+% [\d.]+ MB/s (\d+:\d\d:\d\d|-:--:--)", plain)


def test_a_moment_shows_nothing() -> None:
    assert counting(3, clock=True) == ("", "done\n")


def test_quiet_shows_nothing() -> None:
    assert counting(14, quiet=True) == ("", "done\n")


@pytest.mark.environment
@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")
def test_eval_tells_how_fast_it_plays(tmp_path: Path) -> None:
    (tmp_path / "slow_games.py").write_text(SLOW)
    arguments = ("-m", "ckpttool", "eval", str(TORCH_SAMPLE), "--env", "slow_games:Slow-v0")
    text, out = watched(*arguments, "--episodes", "60", "--num-envs", "4", path=tmp_path)
    assert re.search(r"\d+/60 episodes", text)
    assert re.search(r"\d steps/s", text)
    assert "60 episodes" in out
    assert "\x1b" not in out
    assert "│" not in out, "a chart, although stdout is not a terminal"
