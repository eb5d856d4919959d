"""Subprocesses started by a format; they import modules from the same folders as this process."""

from __future__ import annotations

import json
import os
import sys

from ckpttool.core import search_paths

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def child_program(code: str) -> str:
    """Return the command of a subprocess that runs `code` with this process's module search path.

    Its first command line argument is the result of `child_paths`.
    """
    return f"""
import json, sys
sys.path += [path for path in json.loads(sys.argv[1]) if path not in sys.path]
{code}
"""


def child_paths() -> str:
    """Return this process's module search path as JSON, without the working directory."""
    return json.dumps([_PACKAGE, *search_paths.installed_folders(tuple(map(os.fsdecode, sys.path)))])
