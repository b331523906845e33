"""What the tests of targets in folders share: tables, batches, values of every kind, and a run that is killed anywhere.

As a program, `filetargets.py CLASS FOLDER STEP` plays the same four batches into a folder again and again, each time in
a process that is ended before a line of dbsync's own code, `STEP` lines later than the time before; another process
then goes on from the position, as dbsync does. It prints how many folders it left.

`filetargets.py FORM FOLDER` hands a batch to that target for each line it reads, as a user who may write only where
everybody may, and says what came of it.
"""

from __future__ import annotations

import importlib
import json
import os
import pwd
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dbsync.batcher import Batcher, BatchInfo
from dbsync.batcher.folder import OURS
from dbsync.config import Settings
from dbsync.errors import BatcherError
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


@contextmanager
def no_room_beyond(size_bytes: int) -> Iterator[None]:
    """A disk that is full for every file that would get larger than that. Needs no rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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

# The first row of `kinds` and some of its second, as every target that is told in JSON gets them.
KINDS_IN_JSON: dict[str, dict[str, Any]] = {
    "1": {
        "small": -32768, "big": 9007199254740993, "real4": 0.1, "real8": 0.30000000000000004,
        "exact": "1234567890.10", "free": "1" + "0" * 30, "flag": True, "fixed": "ab   ", "raw": "\\x00ff5c",
        "day": "2024-02-29", "clock": "10:11:12.500000", "zoned": "10:11:12+02:00",
        "moment": "2024-02-29T10:11:12.123456", "at_zone": "2024-02-29T08:11:12.100000+00:00",
        "uid": "00000000-0000-0000-0000-000000000001", "span": -93784.5, "span2": 86401.0,
        "doc": {"a": [1, None, 'ü"x', "1.5E+400", True], "b": {"c": "\0"}},
        "docb": {"a": [1, 12345678901234567890123, 0.1], "b": "s"}, "address": "10.0.0.1/8", "bits": "10101",
        "spot": "(1.5,2)", "numbers": "[1,5)", "feel": "so, so", "two": '(1,"x y")', "little": 7, "cost": "12.50",
        "ints": [1, None, 3], "nums": ["1.500", "NaN"], "stamps": ["infinity", "2024-01-01T00:00:00+00:00"],
        "matrix": [[1, 2], [3, 4]], "blobs": ["\\x00", "\\xff"], "docs": [{"a": [1]}, [1, 2], None],
        "feels": ["sad", "so, so"], "flags": [True, False, None],
        "class": "kinds", "classes": ["kinds"],  # by the search_path of the role that reads the log
    },
    "2": {
        "real4": "NaN", "real8": "-Infinity", "exact": "NaN", "free": "Infinity", "flag": False, "words": "",
        "day": "infinity", "clock": "24:00:00", "moment": "-infinity", "at_zone": "infinity",
        "span": "10 mons 3 days 04:05:06", "doc": "text", "docb": "text", "markup": None, "ints": [],
    },
}  # fmt: skip

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


def waits_for_permission(form: str) -> dict[str, Any]:
    """What a target says of a folder that it may not write to; when it may, it goes on in the same process."""
    # Not in pytest's own folder, which is closed to other users.
    with tempfile.TemporaryDirectory(prefix="dbsync-") as name:
        Path(name).chmod(0o755)
        folder = Path(name, "target")
        folder.mkdir(mode=0o555)
        with _somebody(form, folder) as tries:
            refused = tries()
            assert tries() == refused
            folder.chmod(0o777)
            assert tries() == {"position": "0/A"}
            if (ours := folder / OURS).exists():
                ours.chmod(0o555)
                assert tries()["message"] == refused["message"]
                ours.chmod(0o755)
            assert tries() == {"position": "0/14"}
    return refused


@contextmanager
def _somebody(form: str, folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, __file__, form, str(folder)]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin
        assert stdout

        def tries() -> dict[str, Any]:
            stdin.write("\n")
            stdin.flush()
            told: dict[str, Any] = json.loads(stdout.readline())
            return told

        yield tries
        stdin.close()
        assert process.wait(60) == 0


def goes_away_and_comes_back(made: Callable[[Path], Batcher], folder: Path) -> None:
    """A disk that is taken out, say. No folder is made in its place, which would take the batches meanwhile."""
    with opened(batcher := made(folder)):
        apply(batcher, 10, docs={"1": {"n": 1}}, of=[ITEMS])
        away = folder.rename(folder.with_name("away"))
        for _ in range(2):
            with pytest.raises(BatcherError, match="cannot be used: No such file") as raised:
                apply(batcher, 20, docs={"2": {"n": 2}}, deletes=["1"], of=[ITEMS])
            assert raised.value.retryable
            assert not folder.exists()
        away.rename(folder)
        apply(batcher, 20, docs={"2": {"n": 2}}, deletes=["1"], of=[ITEMS])
    with opened(made(folder)) as position:
        assert position == LSN(20)


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


def _may_write_little() -> None:
    """Root may write everywhere."""
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)


def _try_whenever_asked(form: str, folder: str) -> None:
    opens = importlib.import_module("dbsync.batcher.urls").open_target
    # Once elsewhere, so that all is imported: the environment of the tests may be closed to other users.
    with tempfile.TemporaryDirectory() as elsewhere, opened(batcher := opens(Settings(to=form.format(elsewhere)))):
        apply(batcher, 10, docs={"1": {"n": 1}}, of=[ITEMS])
    _may_write_little()
    batcher = opens(Settings(to=form.format(folder)))
    batcher.log_name = LOG
    is_started, last = False, 0
    for _ in sys.stdin:
        told: dict[str, Any]
        try:
            is_started = is_started or batcher.position() is None
            apply(batcher, last + 10, docs={str(last): {"n": last}}, of=[ITEMS])
            last += 10
            told = {"position": str(batcher.position())}
        except BatcherError as error:
            told = {"message": error.message, "hint": error.hint, "retryable": error.retryable}
        print(json.dumps(told), flush=True)
    batcher.close()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _try_whenever_asked(*sys.argv[1:])
    else:
        main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
