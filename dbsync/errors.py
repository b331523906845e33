"""What can go wrong, said for the person who reads it.

    DbsyncError
    ├── ConfigError       a setting that cannot be used            exit 2
    ├── CheckError        `dbsync check` found something           exit 3
    ├── SetupError        the source is not ready for dbsync       exit 4
    ├── SlotError         the replication slot cannot be used      exit 4
    ├── StreamError       the connection to PostgreSQL broke       exit 4, may be tried again
    ├── DecodeError       bytes that are not pgoutput              exit 4
    ├── RefreshError      a SELECT that cannot be refreshed        exit 2
    ├── HandlerError      the user's handler raised                exit 5, may be tried again
    └── BatcherError      the user's Batcher raised                exit 5, may be tried again

Every error is one sentence that says what happened (`message`) and, where there is one, a sentence that says what to do
(`hint`). `retryable` tells whether trying the same thing again can help; `exit_code` is what the command ends with.
"""

from __future__ import annotations


class DbsyncError(Exception):
    """The root of everything dbsync raises on purpose."""

    exit_code = 1
    retryable = False

    def __init__(self, message: str, hint: str | None = None, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders when a Batcher runs on an executor; what a subclass adds is in __dict__.
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(kind: type[DbsyncError], message: str, state: dict[str, object]) -> DbsyncError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


class ConfigError(DbsyncError):
    exit_code = 2


class CheckError(DbsyncError):
    exit_code = 3


class SetupError(DbsyncError):
    exit_code = 4


class SlotError(DbsyncError):
    exit_code = 4


class StreamError(DbsyncError):
    exit_code = 4
    retryable = True


class DecodeError(DbsyncError):
    """Bytes that cannot be decoded; `offset` is where in the message the trouble is."""

    exit_code = 4

    def __init__(
        self, message: str, hint: str | None = None, *, offset: int = 0, retryable: bool | None = None
    ) -> None:
        super().__init__(message, hint, retryable=retryable)
        self.offset = offset


class RefreshError(DbsyncError):
    exit_code = 2


class HandlerError(DbsyncError):
    exit_code = 5
    retryable = True


class BatcherError(DbsyncError):
    exit_code = 5
    retryable = True
