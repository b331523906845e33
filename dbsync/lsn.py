"""A position in PostgreSQL's log, as a type of its own: an int that prints the way PostgreSQL prints it."""

from __future__ import annotations

import re
from typing import Self

_MAX = 0xFFFFFFFFFFFFFFFF
_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class LSN(int):
    """A log sequence number. Compares, adds and hashes as an int; its text is PostgreSQL's `16/B374D848`."""

    __slots__ = ()

    def __new__(cls, value: int | str = 0) -> Self:
        number = _parse(value) if isinstance(value, str) else value
        if not 0 <= number <= _MAX:
            raise ValueError(f"{number} is not an LSN: it takes a number from 0 to {_MAX}")
        return super().__new__(cls, number)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read PostgreSQL's text form."""
        return cls(_parse(text))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"LSN({str(self)!r})"

    def __format__(self, spec: str) -> str:
        # An f-string shows the position as PostgreSQL does; a number format is still the number's.
        return str(self) if not spec else int.__format__(self, spec)


def _parse(text: str) -> int:
    found = _TEXT.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not an LSN: it takes two hexadecimal numbers, like 16/B374D848")
    return (int(found[1], 16) << 32) | int(found[2], 16)
