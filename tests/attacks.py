"""What a hostile file tries on the machine that opens it; the program is text, for a file of any kind.

`outcomes` runs it: each attack ends with "done" or with the class of the exception that refused it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ATTACKS = (
    "write",
    "append",
    "delete",
    "chmod",
    "read",
    "connect",
    "exec",
    "fork",
    "dlopen",
    "signal",
    "link",
)
# `there` has the paths; `results` gets the outcomes.
PROGRAM = """
import ctypes, os, socket, subprocess
def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
def tries():
    yield "write", lambda: open(there["folder"] + "/written", "w").close()
    yield "append", lambda: open(there["victim"], "a").close()
    yield "chmod", lambda: os.chmod(there["victim"], 0o777)
    yield "read", lambda: open(there["secret"]).close()
    yield "connect", lambda: socket.create_connection(("127.0.0.1", there["port"])).close()
    yield "exec", lambda: subprocess.run(["/bin/sh", "-c", ":"], check=True)
    yield "fork", fork
    yield "dlopen", lambda: ctypes.CDLL(there["library"])
    yield "signal", lambda: os.kill(os.getppid(), 0)
    yield "link", lambda: os.symlink(there["victim"], there["own"] + "/planted")
    yield "delete", lambda: os.remove(there["victim"])
results = {}
def run():
    for name, attack in tries():
        try:
            attack()
            results[name] = "done"
        except Exception as error:
            results[name] = type(error).__name__
run()
"""


@dataclass
class Target:
    """A folder with files that no attack may reach, and a local server that none may connect to."""

    folder: Path
    listener: socket.socket

    def paths(self, own: str = ".") -> dict[str, object]:
        """Return what the attacks need; `own` is the folder that the attacked process may write."""
        return {
            "folder": str(self.folder),
            "victim": str(self.folder / "victim.txt"),
            "secret": str(self.folder / "secret.txt"),
            "library": str(self.folder / "planted.so"),
            "port": self.listener.getsockname()[1],
            "own": own,
        }

    def program(self) -> str:
        """Return a program that attacks, and raises an error that lists what was done (`parse_done`)."""
        ending = (
            "done = [name for name in results if results[name] == 'done']\n"
            "raise RuntimeError('attacks: %d, done: %s.' % (len(results), ' '.join(done)))\n"
        )
        own = "there['own'] = os.environ.get('TMPDIR', there['folder'])\n"
        inner = f"import os\nthere = {self.paths()!r}\n{own}{PROGRAM}{ending}"
        return f"exec({inner!r}, {{}})"  # names of its own, wherever it runs

    @property
    def untouched(self) -> bool:
        """Whether the folder is as it was, and no connection came."""
        self.listener.settimeout(0)
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            names = {path.name for path in self.folder.iterdir()}
            victim = self.folder / "victim.txt"
            return (
                "written" not in names
                and victim.read_text() == "before"
                and victim.stat().st_mode & 0o777 == 0o600
            )
        return False


@contextmanager
def target(folder: Path) -> Iterator[Target]:
    """Make the files and the server."""
    import _ctypes

    (folder / "secret.txt").write_text("secret")
    (folder / "victim.txt").write_text("before")
    os.chmod(folder / "victim.txt", 0o600)
    shutil.copy(_ctypes.__file__, folder / "planted.so")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Target(folder, listener)


def outcomes(there: dict[str, object]) -> dict[str, str]:
    """Run all attacks in this process."""
    names: dict[str, object] = {"there": there}
    exec(PROGRAM, names)
    result = names["results"]
    assert isinstance(result, dict)
    return result


def parse_done(text: str) -> set[str]:
    """Return the attacks that were done, from the text of an error that ends `Target.program`."""
    match = re.search(r"attacks: (\d+), done: ([a-z ]*)\.", text)
    assert match, text
    assert int(match[1]) == len(ATTACKS)
    return set(match[2].split())
