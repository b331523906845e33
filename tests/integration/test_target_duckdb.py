"""DuckDB as `--to`: see `fix_target` for what it has to stand."""

from __future__ import annotations

from pathlib import Path

import duckdb
from fix_postgres import Database
from fix_target import Rows, Target, survives

QUERIES = {
    "customers": "SELECT id, name, email, note FROM public.customers ORDER BY id",
    "orders": "SELECT customer, number, total::varchar FROM public.orders ORDER BY customer, number",
}


def test_duckdb_survives(database: Database, tmp_path: Path) -> None:
    file = tmp_path / "target.duckdb"

    def read(table: str) -> Rows:
        with duckdb.connect(str(file), read_only=True) as db:
            return db.execute(QUERIES[table]).fetchall()

    survives(database, Target(f"duckdb:///{file}", read))
