"""What becomes of tables without a key where rows are mirrored: DBSYNC_KEYLESS.

Nothing tells the records of such a table apart, so no document can be replaced or deleted. What can be kept of it is
that a change happened: appended, each is a document of its own. Otherwise the changes are left out, and the log says so
once a run for each table. One such table never stops the others.
"""

from __future__ import annotations

import logging
from typing import Any

from dbsync import pgoutput
from dbsync.batcher import Batcher
from dbsync.config import Settings
from dbsync.errors import ConfigError
from dbsync.relation import Relation, RowDecoder

logger = logging.getLogger(__name__)

OPERATION = "_op"  # where the document of an appended change says what happened


class Keyless:
    """The policy of one run, and the tables whose changes it was said of that they are left out."""

    def __init__(self, settings: Settings, batcher: Batcher) -> None:
        self._batcher = batcher
        self._policy = settings.keyless or ("append" if batcher.appends else "error")
        self._told: set[tuple[str, str]] = set()

    def check(self) -> None:
        """Refuse to append where the Batcher cannot."""
        if self._policy == "append" and not self._batcher.appends:
            raise ConfigError(
                f"DBSYNC_KEYLESS=append cannot be used with {type(self._batcher).__name__}: it cannot append.",
                "Leave DBSYNC_KEYLESS out or set it to skip, or take a Batcher whose appends is True.",
            )

    def takes(self, relation: Relation) -> bool:
        """Whether changes of this table without a key are appended."""
        if self._policy == "append":
            return True
        self._say(
            "has no key (one that is DEFERRABLE, or published only in part, is none), so its changes are left out",
            "add a primary key (or REPLICA IDENTITY USING INDEX) and refresh it, or set DBSYNC_KEYLESS=append with a"
            " Batcher that appends, or DBSYNC_KEYLESS=skip",
            relation.doctype,
        )
        return False

    def takes_row(self, relation: Relation) -> bool:
        """Whether a change is appended that does not tell the whole key of its table."""
        if self._policy == "append":
            return True
        self._say(
            "has changes that do not tell their key (it was NULL, or a partition has another replica identity than"
            " its root), so they are left out",
            "see what dbsync check says of it, and refresh it",
            relation.doctype,
        )
        return False

    def _say(self, what: str, hint: str, doctype: str) -> None:
        """Once a run for each table."""
        if (what, doctype) in self._told:
            return
        self._told.add((what, doctype))
        if self._policy == "skip":
            logger.warning("%s %s, as DBSYNC_KEYLESS=skip says.", doctype, what)
        else:
            logger.error("%s %s: %s.", doctype, what, hint)


def appended(decoder: RowDecoder, message: pgoutput.Message) -> dict[str, Any]:
    """The document of one change: the row as it is now, or for a delete as it was, and what happened."""
    match message:
        case pgoutput.Insert(new=new):
            return _document(decoder, new, "insert")
        case pgoutput.Update(new=new, old=old):
            return _document(decoder, pgoutput.filled(old or new, new), "update")
        case pgoutput.Delete(old=old):
            return _document(decoder, old, "delete")
        case other:
            raise AssertionError(other)


def _document(decoder: RowDecoder, row: tuple[Any, ...], operation: str) -> dict[str, Any]:
    doc, _ = decoder.document(row)
    return {**doc, OPERATION: operation}
