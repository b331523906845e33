"""What the tests of targets in folders share: tables, batches, values of every kind, and a run that is killed anywhere.

As a program, `filetargets.py CLASS FOLDER STEP` plays the same four batches into a folder again and again, each time in
a process that is ended before a line of dbsync's own code, `STEP` lines later than the time before; another process
then goes on from the position, as dbsync does. It prints how many folders it left.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from dbsync.batcher import Batcher, BatchInfo
from dbsync.lsn import LSN
from dbsync.relation import Column, Relation
from dbsync.values import compile, decoder

LOG = "7/shop/slot"


def column(name: str, oid: int, modifier: int = -1) -> Column:
    return Column(name, oid, modifier, decoder(oid))


def relation(*columns: Column, name: str = "thing") -> Relation:
    return Relation(1, "public", name, "d", columns, (0,))


def batch(last: int, *relations: Relation) -> BatchInfo:
    return BatchInfo(last, LSN(last), LSN(last), {relation.doctype: relation for relation in relations})


def apply(
    batcher: Batcher,
    last: int,
    doctype: str = "public.thing",
    docs: Mapping[str, dict[str, Any]] | None = None,
    *,
    deletes: Sequence[str] = (),
    truncates: bool = False,
    of: Sequence[Relation] = (),
) -> None:
    info = batch(last, *of)
    batcher.begin(info)
    if truncates:
        batcher.batch_truncate(doctype)
    if deletes:
        batcher.batch_delete(doctype, deletes)
    if docs:
        batcher.batch_upsert(doctype, docs)
    batcher.commit(info)


@contextmanager
def opened(batcher: Batcher, log: str = LOG) -> Iterator[LSN | None]:
    """As dbsync opens and closes a target; gives its position."""
    batcher.log_name = log
    try:
        yield batcher.position()
    finally:
        batcher.close()


NUMERIC_12_2 = ((12 << 16) | 2) + 4
# A column's name, type, modifier, PostgreSQL's text, the value in Arrow, the value in JSON.
LONG_NUMBER = "1" + "0" * 30 + ".000001"
VALUES: list[tuple[str, int, int, str, Any, Any]] = [
    ("small", 21, -1, "-7", -7, -7),
    ("whole", 23, -1, "7", 7, 7),
    ("big", 20, -1, "9007199254740993", 9007199254740993, 9007199254740993),
    ("oid", 26, -1, "4294967295", 4294967295, 4294967295),
    ("single", 700, -1, "0.5", 0.5, 0.5),
    ("double", 701, -1, "-Infinity", float("-inf"), "-Infinity"),
    ("exact", 1700, NUMERIC_12_2, "1234567890.12", Decimal("1234567890.12"), "1234567890.12"),
    ("free", 1700, -1, LONG_NUMBER, LONG_NUMBER, LONG_NUMBER),
    ("flag", 16, -1, "t", True, True),
    ("words", 25, -1, "ünï\ncode\t\"'", "ünï\ncode\t\"'", "ünï\ncode\t\"'"),
    ("raw", 17, -1, "\\x00ff", b"\x00\xff", "\\x00ff"),
    ("day", 1082, -1, "2024-02-29", date(2024, 2, 29), "2024-02-29"),
    ("clock", 1083, -1, "10:11:12.5", time(10, 11, 12, 500000), "10:11:12.500000"),
    ("zoned_clock", 1266, -1, "10:11:12+05:30", "10:11:12+05:30", "10:11:12+05:30"),
    (
        "moment", 1114, -1, "2024-02-29 10:11:12.123456", datetime(2024, 2, 29, 10, 11, 12, 123456),  # noqa: DTZ001
        "2024-02-29T10:11:12.123456",
    ),
    (
        "at_zone", 1184, -1, "0001-01-01 00:00:00+00", datetime(1, 1, 1, tzinfo=UTC),
        "0001-01-01T00:00:00+00:00",
    ),
    ("span", 1186, -1, "1 day -02:03:04", "21:56:56", 79016.0),
    (
        "uid", 2950, -1, "00000000-0000-0000-0000-00000000000a", "00000000-0000-0000-0000-00000000000a",
        "00000000-0000-0000-0000-00000000000a",
    ),
    ("doc", 3802, -1, '{"a": [1, null]}', '{"a": [1, null]}', {"a": [1, None]}),
    ("word", 3802, -1, '"x"', '"x"', "x"),
    ("list", 1007, -1, "{{1,NULL},{3,4}}", "[[1, null], [3, 4]]", [[1, None], [3, 4]]),
    ("address", 869, -1, "10.0.0.1", "10.0.0.1", "10.0.0.1"),
]  # fmt: skip

# What the Python or the Arrow type cannot hold: NULL in its column, and PostgreSQL's text beside it.
ODD = {
    "exact": "NaN",
    "day": "0044-03-15 BC",
    "clock": "24:00:00",
    "moment": "infinity",
    "at_zone": "294276-01-01 00:00:00+00",
}

KINDS = relation(*(column(name, oid, modifier) for name, oid, modifier, *_ in VALUES))


def ordinary() -> dict[str, Any]:
    return {name: _read(oid, text) for name, oid, _, text, *_ in VALUES}


def odd() -> dict[str, Any]:
    oids = {name: oid for name, oid, *_ in VALUES}
    return dict.fromkeys(oids) | {name: _read(oids[name], text) for name, text in ODD.items()}


def _read(oid: int, text: str) -> Any:
    return compile(decoder(oid))(text)


ITEMS = relation(column("n", 20), column("note", 25))
OTHERS = relation(column("n", 20), name='an odd/name. "é"')


def _play(batcher: Batcher, number: int) -> None:
    """One of four batches: rows of two tables, deletes, a truncate."""
    info = batch(number * 10, ITEMS, OTHERS)
    batcher.begin(info)
    if number == 3:
        batcher.batch_truncate(ITEMS.doctype)
    if number > 1:
        batcher.batch_delete(OTHERS.doctype, [str(number - 1), "nobody"])
    for start in (0, 100):
        docs = {str(n): {"n": n, "note": f"of {number}"} for n in range(start, start + number + 1)}
        batcher.batch_upsert(ITEMS.doctype, docs)
    batcher.batch_upsert(OTHERS.doctype, {str(number): {"n": number}})
    batcher.commit(info)


def play(batcher: Batcher) -> None:
    """All batches that are not in the target yet."""
    with opened(batcher) as position:
        for number in range(1, 5):
            if number * 10 > (position or 0):
                _play(batcher, number)


def killed_everywhere(target: str, folder: Path, step: int) -> list[Path]:
    """The folders that were left: the first by a run that nobody ended."""
    command = [sys.executable, __file__, target, str(folder), str(step)]
    # The tests may run from a checkout that is not installed.
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [folder / str(number) for number in range(int(done.stdout))]


def _in_a_process(work: Callable[[], None]) -> bool:
    """Whether it came to its end."""
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9), code
        return code == 0
    try:
        work()
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _end_at(line: int) -> None:
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if "/dbsync/batcher/" not in frame.f_code.co_filename or frame.f_code.co_filename.endswith("/columns.py"):
            return None  # how values are turned over leaves nothing behind
        if event == "line":
            left -= 1
            if left == 0:
                os._exit(9)
        return trace

    sys.settrace(trace)


def _run(make: Callable[..., Batcher], url: str, options: object, end_at: int) -> None:
    os.fsync = lambda _: None  # a process that ends, unlike a machine, takes nothing with it
    batcher = make(url, options)
    if end_at:
        _end_at(end_at)
    play(batcher)


def main(target: str, folder: Path, step: int) -> None:
    module, _, name = target.partition(":")
    make = getattr(importlib.import_module(module), name).from_url
    options = importlib.import_module("dbsync.batcher.urls").TargetOptions()
    scheme = module.rpartition(".")[2]
    rotation = "" if scheme == "delta" else "?rotate_bytes=900"
    ended, number = False, 0
    while not ended:
        url = f"{scheme}:{folder / str(number)}{rotation}"
        ended = _in_a_process(partial(_run, make, url, options, number * step)) and number > 0
        if not ended and number:
            assert _in_a_process(partial(_run, make, url, options, 0))
        number += 1
    print(number)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
