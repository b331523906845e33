"""What is installed from the wheel is whole: the SQL, the types, the command."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run(command, check=True, cwd=folder)
    (built,) = folder.glob("dbsync-*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [path for path in wheel.namelist() if path.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_wheel_carries_every_sql_file(wheel: zipfile.ZipFile) -> None:
    wanted = {f"dbsync/sql/{file.relative_to(ROOT / 'sql')}" for file in (ROOT / "sql").rglob("*.sql")}
    assert wanted
    assert wanted <= set(wheel.namelist())


def test_wheel_carries_every_module_and_says_it_is_typed(wheel: zipfile.ZipFile) -> None:
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "dbsync").rglob("*.py")}
    assert modules <= set(wheel.namelist())
    assert "dbsync/py.typed" in wheel.namelist()


def test_wheel_carries_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {path.split("/")[0] for path in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dbsync"}


def test_metadata_names_the_command_and_the_extras(wheel: zipfile.ZipFile) -> None:
    assert "dbsync = dbsync.cli:main" in metadata_file(wheel, "entry_points.txt")
    metadata = Parser().parsestr(metadata_file(wheel, "METADATA"))
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "embedded",
        "test",
        "delta",
        "duckdb",
        "mysql",
        "nats",
        "webhook",
    }
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
