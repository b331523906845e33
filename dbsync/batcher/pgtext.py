"""A value as PostgreSQL writes it as text, which is also what PostgreSQL reads.

What a decoder of `values` made of a text becomes that text again, or another one that PostgreSQL takes for the same
value: `24:00:00` of an interval comes back as `1 day`, an array without the lower bounds it may have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from dbsync.batcher.jsontext import dumps


def text(value: Any) -> str:
    """What is text already stays so; what PostgreSQL has no form for is written as JSON."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case float():
            return str(value) if math.isfinite(value) else format(Decimal(value), "f")
        case int() | UUID():
            return str(value)
        case Decimal():
            return format(value, "f")
        case datetime():
            return _trimmed(value) if value.tzinfo is None else _trimmed(value.astimezone(UTC)) + "+00"
        case date():
            return value.isoformat()
        case time():
            clock, zone = _trimmed(value), value.isoformat()[len(value.replace(tzinfo=None).isoformat()) :]
            return clock + zone.removesuffix(":00")
        case timedelta():
            return _interval(value)
        case bytes():
            return "\\x" + value.hex()
    return dumps(value)


def array(value: Any, element: Callable[[Any], str] = text, delimiter: str = ",", *, flat: bool = False) -> str:
    """A list as an array, lists in it as further dimensions unless it is `flat`: an element may be a list itself."""
    if isinstance(value, str):
        return value

    def part(item: Any) -> str:
        if item is None:
            return "NULL"
        if isinstance(item, list) and not flat:
            return array(item, element, delimiter)
        return '"' + element(item).replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "{" + delimiter.join(map(part, value)) + "}"


def _interval(value: timedelta) -> str:
    """Days and clock with the same sign, where Python has a negative interval count back from its days."""
    sign, length = ("-", -value) if value < timedelta() else ("", value)
    seconds = length.seconds
    clock = sign + _trimmed(time(seconds // 3600, seconds // 60 % 60, seconds % 60, length.microseconds))
    if not length.days:
        return clock
    days = f"{sign}{length.days} {'day' if value.days == 1 else 'days'}"
    return days if length == timedelta(length.days) else f"{days} {clock}"


def _trimmed(value: datetime | time) -> str:
    text = str(value.replace(tzinfo=None))
    return text.rstrip("0") if value.microsecond else text
