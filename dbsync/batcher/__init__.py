"""Where changes go: the Batcher that users subclass, and one file a target that dbsync brings along."""

from dbsync.batcher.base import Batcher, BatchInfo
from dbsync.batcher.echo import EchoBatcher

__all__ = ["BatchInfo", "Batcher", "EchoBatcher"]
