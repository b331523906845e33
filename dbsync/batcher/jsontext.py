"""A document as JSON text.

What JSON has no form for becomes text: numbers of any size stay exact, bytes are PostgreSQL's hex form, times are
ISO 8601, intervals are seconds, NaN and the infinities are their names.
"""

from __future__ import annotations

import json
import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


def dumps(value: Any) -> str:
    try:
        return _dumps(value)
    except ValueError:  # NaN or an infinity: valid in PostgreSQL, not in JSON
        return _dumps(_finite(value))


def exact(value: Any) -> str:
    """What was parsed from JSON, as JSON again: a number that only a Decimal holds is written as a number."""
    try:
        return _dumps_plain(value)
    except TypeError:
        return _exact(value)


def _dumps_plain(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or _encodes(text) else json.dumps(value)


def _exact(value: Any) -> str:
    match value:
        case Decimal():
            return str(value)
        case dict():
            return "{" + ", ".join(f"{_dumps_plain(name)}: {_exact(item)}" for name, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_exact, value)) + "]"
    return _dumps_plain(value)


def _dumps(value: Any) -> str:
    text = json.dumps(value, default=plain, ensure_ascii=False, allow_nan=False)
    # PostgreSQL's json may hold half a surrogate pair, which no UTF-8 text can; only an escape can carry it.
    return text if text.isascii() or _encodes(text) else json.dumps(value, default=plain, allow_nan=False)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain(value: Any) -> Any:
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
        case bytes():
            return "\\x" + value.hex()
        case timedelta():
            return value.total_seconds()
        case set() | frozenset():
            return sorted(value)
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value
