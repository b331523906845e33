"""The demo in short: it ends with the truth, and with nothing left behind."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

import duckdb
import pytest
from rich.console import Console

from dbsync import demo
from dbsync.errors import ConfigError


@pytest.mark.usefixtures("spark")
def test_source_and_target_are_equal_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Root's PostgreSQL runs as another user, who must be able to enter the folder.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    words = io.StringIO()
    kept = tmp_path / "shop.duckdb"
    assert demo.run(seconds=3, rows=5000, keep=kept, console=Console(file=words))
    told = capsys.readouterr().out
    assert "compared, 0 differences." in told
    _assert_windows_were_shown(words.getvalue())
    assert list(folder.iterdir()) == []
    folder.rmdir()
    with duckdb.connect(str(kept)) as target:
        ((orders,),) = target.execute("SELECT count(*) FROM shop.shop.orders").fetchall()
    assert orders > 1500
    assert f"shop.orders       {orders:>10,} rows  equal" in told


def _assert_windows_were_shown(words: str) -> None:
    assert "two writers" in words
    assert words.count("First copy done in") == 5
    assert 'SELECT * FROM "shop"."order_lines"' in words
    assert "Re-read in" in words
    assert "overtaken by newer changes: SELECT * FROM shop.customers WHERE id <= 4000" in words
    last = words[words.index("now all is applied") :]
    assert "first copy 5 of 5 tables" in last
    found = re.search(r"windows 0 open now, (\d+) closed", last)
    assert found
    assert int(found[1]) > 16


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    kept = tmp_path / "mine.duckdb"
    kept.write_text("mine")
    with pytest.raises(ConfigError, match="already there"):
        demo.run(keep=kept)
    assert kept.read_text() == "mine"


def test_the_comparison_sees_every_kind_of_difference() -> None:
    source = [(1, "a"), (2, "b"), (3, "c"), (5, "e")]
    target = [(0, "z"), (1, "a"), (3, "C"), (4, "d")]
    pairs = list(demo._side_by_side(iter(source), iter(target), lambda row: row[0]))
    assert pairs == [
        (None, (0, "z")),
        ((1, "a"), (1, "a")),
        ((2, "b"), None),
        ((3, "c"), (3, "C")),
        (None, (4, "d")),
        ((5, "e"), None),
    ]
