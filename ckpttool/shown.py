"""How names, sentences and numbers of a file are shown to people, wherever that is: no control characters."""

from __future__ import annotations

from ckpttool.errors import CkpttoolError

_UNITS = ("B", "kB", "MB", "GB", "TB")
# Characters of what is said of an error, whatever a hostile file puts into its names.
_LONGEST, _LONGEST_NAME = 600, 200


def clean(text: str) -> str:
    """Return the text with everything that does not print (control, bidi, surrogates) as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def shortened(text: str, width: int) -> str:
    """Return the text in at most `width` characters: the middle is left out, because both ends tell most."""
    if len(text) <= width:
        return text
    if width < 3:
        return text[: max(0, width)]
    # The end of a path tells more than its beginning.
    tail = (width - 1) * 3 // 5
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def size(nbytes: int) -> str:
    """Return a number of bytes as people read it, in powers of a thousand."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def count(number: int, word: str, words: str | None = None) -> str:
    """Return `1 tensor`, `2 tensors`, or with other `words` for several what these are."""
    return f"{number:,} {word if number == 1 else words or f'{word}s'}"


def sentence(error: CkpttoolError) -> str:
    """Return what is said of an error: one line, inert, of a length that fits a few lines of a terminal."""
    text = clean(str(error))
    if len(text) <= _LONGEST or not error.file:
        return fitting(text)
    # What is wrong comes after the name of the file, which may be long.
    file, rest = clean(error.file), text.removeprefix(clean(error.file))
    return fitting(fitting(file, _LONGEST_NAME) + rest)


def fitting(text: str, most: int = _LONGEST) -> str:
    """Return the text, its middle left out where it is long: no few lines hold what a file may name."""
    return text if len(text) <= most else f"{text[: most // 2 - 3]}...{text[-most // 2 :]}"
