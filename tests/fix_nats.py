"""A real nats-server from its wheel: JetStream in a folder of the test's own, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sysconfig
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import nats
import pytest
from commands import until
from nats.js import JetStreamContext

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """A message as the stream holds it."""

    subject: str
    id: str
    content: dict[str, Any]


@dataclass(slots=True)
class NatsServer:
    folder: Path
    config: str = ""
    login: str = ""  # of the test itself, `user:password@`
    jetstream: bool = True
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def url(self, stream: str, login: str | None = None, scheme: str = "nats") -> str:
        return f"{scheme}://{self.login if login is None else login}localhost:{self.port}/{stream}"

    def start(self) -> None:
        self.port = self.port or _free_port()
        store = f'jetstream {{ store_dir: "{self.folder}" }}\n' if self.jetstream else ""
        file = self.folder / "nats.conf"
        file.write_text(f'host: "localhost"\nport: {self.port}\n{store}{self.config}\n', encoding="utf-8")
        program = Path(sysconfig.get_path("scripts")) / "nats-server"
        with (self.folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen([program, "-c", file], stdout=log, stderr=log)
        until(self._answers)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def published(self, stream: str) -> list[Published]:
        """All that the stream holds, in its order."""

        async def read(js: JetStreamContext) -> list[Published]:
            state = (await js.stream_info(stream)).state
            if not state.messages:
                return []
            reader = await js.subscribe(">", stream=stream, ordered_consumer=True)
            found = []
            while len(found) < state.messages:
                message = await reader.next_msg(30)
                headers = message.headers or {}
                found.append(Published(message.subject, headers.get("Nats-Msg-Id", ""), json.loads(message.data)))
            await reader.unsubscribe()
            return found

        return self.run(read)

    def run(self, work: Any) -> Any:
        """Give the test's own JetStream to a coroutine."""

        async def connected() -> Any:
            client = await nats.connect(f"nats://{self.login}localhost:{self.port}")
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return _run(connected())

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "nats.log").read_text(encoding="utf-8")
        try:
            with socket.create_connection(("localhost", self.port), 1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def nats_serving(folder: Path, config: str = "", **arguments: Any) -> Iterator[NatsServer]:
    server = NatsServer(folder, config, **arguments)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_serving(tmp_path) as server:
        yield server
