"""dbsync keeps anything in step with PostgreSQL."""

from typing import TYPE_CHECKING, Any

from dbsync.batcher import Batcher, EchoBatcher
from dbsync.config import Settings
from dbsync.errors import DbsyncError
from dbsync.handler import EchoMessageHandler, MessageHandler, MirrorHandler
from dbsync.lsn import LSN
from dbsync.requests import RefreshResult

if TYPE_CHECKING:
    from dbsync.syncer import Syncer

__all__ = [
    "LSN",
    "Batcher",
    "DbsyncError",
    "EchoBatcher",
    "EchoMessageHandler",
    "MessageHandler",
    "MirrorHandler",
    "RefreshResult",
    "Settings",
    "Syncer",
]


def __getattr__(name: str) -> Any:
    # The Syncer brings Spark along, which `dbsync --help` should not have to wait for.
    if name == "Syncer":
        from dbsync.syncer import Syncer

        return Syncer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
