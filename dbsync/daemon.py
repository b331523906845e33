"""Where Spark's Python workers come from, for a Spark that dbsync starts itself.

It is PySpark's own daemon, with what dbsync's tasks need already imported, so that a new worker can begin at once. The
daemon's collector is told to leave that alone: PySpark has it look through everything after every task.
"""

from __future__ import annotations

import gc
from typing import Any

from pyspark import daemon

_work = daemon.worker


def work(sock: Any, authenticated: bool) -> int:
    """A worker's life. When the JVM is gone there is nobody to tell, and nothing to say on standard error."""
    try:
        return int(_work(sock, authenticated))
    except BrokenPipeError:
        return 1


def main() -> None:
    import dbsync.fewevents
    import dbsync.ranges  # noqa: F401  (both for the workers)

    daemon.worker = work
    gc.collect()
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
