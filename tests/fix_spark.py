"""One Spark for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from dbsync.spark import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    running = session("local[2]", app_name="dbsync-tests")
    yield running
    running.stop()
