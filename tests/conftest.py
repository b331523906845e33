"""The fixtures are plugins: one file for each real thing (PostgreSQL, Spark, NATS, MySQL) and for its tables."""

import os
import signal

pytest_plugins = [
    "fix_postgres",
    "fix_mysql",
    "fix_nats",
    "fix_refresh",
    "fix_spark",
]  # the first is imported by others

# A shell starts what runs in its background with SIGINT ignored; the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A Java that lives for seconds spends most of them on making its code fast, and on two cores everybody waits for that.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
