"""The benchmarks run: here on next to nothing, with -m long on a tenth of what they measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "bench.py"


def results(name: str, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCH), name, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["machine"]["cores"] >= 1
    found: list[dict[str, Any]] = told["results"]
    return found


def test_a_benchmark_prints_both_sides_and_the_ratio() -> None:
    mirror, marks = results("drain", "--size", "2000", "--runs", "1")
    for found in (mirror, marks):
        assert len(found["ours"]) == len(found["theirs"]) == 1
        assert found["ratio"] == pytest.approx(found["ours"][0] / found["theirs"][0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size"),
    [("drain", "100000"), ("refresh", "100000"), ("latency", "400"), ("compaction", "1000000"), ("start", "1")],
)
def test_every_benchmark_runs(name: str, size: str) -> None:
    assert results(name, "--size", size, "--runs", "1")
