"""What is told of a refresh that goes on: rows, chunks, rate, and what is left by the statistics."""

from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console

from dbsync.cli_progress import Pace, duration, view
from dbsync.requests import Refresh


def a_refresh(rows: int = 0, chunks: int = 0, state: str = "running", estimated_rows: int | None = 1000) -> Refresh:
    return Refresh(
        id=7,
        slot="mine",
        kind="request",
        query="SELECT * FROM orders",
        params=None,
        chunk_rows=None,
        state=state,
        part=0,
        last_key=None,
        rows=rows,
        superseded=0,
        chunks=chunks,
        voided=0,
        estimated_rows=estimated_rows,
        message=None,
        requested_by="app",
        requested_at=datetime.now(UTC),
        started_at=None,
        finished_at=None,
    )


def test_the_rate_counts_from_where_we_began_to_look() -> None:
    pace = Pace()
    assert pace.words(a_refresh(state="queued"), 0.0) == "waiting for its turn"
    assert pace.words(a_refresh(200, 2), 100.0) == "200 rows in 2 chunks"
    assert pace.words(a_refresh(400, 4), 110.0) == "400 rows in 4 chunks, 20 rows/s, about 0:30 left"


@pytest.mark.parametrize("estimated_rows", [None, 0, 10])
def test_statistics_that_know_nothing_promise_nothing(estimated_rows: int | None) -> None:
    pace = Pace()
    pace.words(a_refresh(estimated_rows=estimated_rows), 0.0)
    assert pace.words(a_refresh(1, 1, estimated_rows=estimated_rows), 1.0).startswith("1 row in 1 chunk, 1 rows/s")
    assert "left" not in pace.words(a_refresh(2000, 1, estimated_rows=estimated_rows), 1.0)


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (7322, "2:02:02")])
def test_a_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_bar_only_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    told = StringIO()
    with view(Console(file=told, force_terminal=True, width=120), bar=True) as shown:
        shown.show(a_refresh(400, 4))
    assert "400 rows in 4 chunks" in told.getvalue()
    assert capsys.readouterr().err == ""
    elsewhere = StringIO()
    with view(Console(file=elsewhere), bar=True) as shown:
        shown.show(a_refresh(400, 4))
    assert elsewhere.getvalue() == ""
