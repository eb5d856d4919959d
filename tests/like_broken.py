"""Factories that fail, each in its own way; no framework is imported here."""

from __future__ import annotations

NUMBER = 3


def raises(width: int = 1) -> object:
    raise ValueError(f"first line\nno model of width {width}")


def leaves() -> object:
    raise SystemExit("usage: train.py")


def no_model() -> object:
    return {"a": 1}
