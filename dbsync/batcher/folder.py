"""A folder that one dbsync keeps its target in: its address, its lock, its position, and what the disk refuses.

What is the reader's lies in the folder itself; what is dbsync's own lies below `_dbsync`, a name that readers of data
folders pass over. A file gets its name only when all of it is on the disk, so a reader sees it whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qsl

from dbsync.config import parse_bytes
from dbsync.errors import BatcherError, ConfigError

OURS = "_dbsync"
_LONGEST_NAME = 200  # file systems take 255 bytes, and endings come behind


def folder_url(url: str, scheme: str, takes: Mapping[str, Callable[[str], Any]] | None = None) -> tuple[Path, Any]:
    """The folder of `scheme:DIR?name=value`, and its options by the names that `takes` knows."""
    takes = takes or {}
    form = f"{scheme}:DIR" + (f"?{'&'.join(f'{name}=…' for name in takes)}" if takes else "")
    path, asks, query = url.partition(":")[2].partition("?")
    if not path or (path.startswith("//") and not path.startswith("///")):
        raise ConfigError(
            f"The target {url} names no folder.",
            f"Write {form}; DIR is a path on this machine, relative or absolute, without slashes before it.",
        )
    options = {}
    for name, value in parse_qsl(query, keep_blank_values=True) if asks else []:
        if name not in takes:
            raise ConfigError(f"A target like {scheme}:DIR does not know the option {name!r}.", f"Write {form}.")
        try:
            options[name] = takes[name](value)
        except ValueError as error:
            raise ConfigError(f"The option {name} cannot be {value!r}.", f"Write {form}, as in {EXAMPLE}.") from error
    return checked_folder(Path(path)), options


EXAMPLE = "rotate_bytes=64MB&rotate_seconds=60"


def checked_folder(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"The target {path} is a file, not a folder.", "Name a folder; it is made if it is missing.")
    return path


def some_bytes(text: str) -> int:
    if (size := parse_bytes(text)) < 1:
        raise ValueError
    return size


def some_seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < 1e9:
        raise ValueError
    return seconds


@contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """What the disk refuses may pass, so it is tried again; nothing of the batch counts before that."""
    try:
        yield
    except OSError as error:
        raise BatcherError(
            f"The target folder {path} cannot be used: {error.strerror or error}.",
            "See that it is there, that dbsync may write to it, and that its disk has room.",
        ) from error


def file_name(text: str) -> str:
    """A name for a file or folder from any text: different texts get different names, an ordinary one stays itself."""
    name = _UNSAFE.sub(lambda found: "".join(f"~{byte:02X}" for byte in found[0].encode()), text) or "~"
    if name[0] in "._":  # readers pass such names over
        name = f"~{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}~~{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return name


_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


class TargetFolder:
    """The folder while this process writes to it. `open` takes the lock, `close` gives it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ours = path / OURS
        self._lock: IO[bytes] | None = None

    def open(self) -> None:
        if self._lock is not None:
            return
        with folder_errors(self.path):
            self.ours.mkdir(parents=True, exist_ok=True)
            lock = (self.ours / "lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.close()
                raise BatcherError(
                    f"Another dbsync is writing to the target folder {self.path}.",
                    "Stop it, or name another folder: each folder takes one dbsync at a time.",
                ) from error
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def load(self, name: str) -> dict[str, Any]:
        """What `store` stored last; nothing yet is an empty dict."""
        with folder_errors(self.path):
            try:
                content: dict[str, Any] = json.loads((self.ours / name).read_text(encoding="utf-8"))
            except FileNotFoundError:
                return {}
            except ValueError as error:
                raise BatcherError(
                    f"The file {self.ours / name} is damaged.",
                    "Remove the folder, and copy into it anew.",
                    retryable=False,
                ) from error
        return content

    def store(self, name: str, content: dict[str, Any]) -> None:
        """Replace the file in one step that outlasts a crash of the machine.

        Once the new file has its name, whether it stays is for the disk to say: what fails then is not tried again,
        because the next start finds out what counts by reading it.
        """
        with folder_errors(self.path):
            new = self.ours / f"{name}.new"
            with new.open("w", encoding="utf-8") as file:
                json.dump(content, file)
                sync(file)
            new.replace(self.ours / name)
        try:
            sync_folder(self.ours)
        except OSError as error:
            raise BatcherError(
                f"The target folder {self.path} does not keep what it is given: {error.strerror or error}.",
                "See to its disk, then start again: dbsync goes on with what is there.",
                retryable=False,
            ) from error


def sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """A new name in a folder outlasts a crash of the machine only when the folder is written too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
