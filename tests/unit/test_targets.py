"""From a target's URL to its Batcher, and what stands before any Batcher: other names, fewer columns."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from recording import RecordingBatcher

from dbsync import LSN, EchoBatcher, Settings
from dbsync.batcher import BatchInfo
from dbsync.batcher.duckdb import DuckDBBatcher
from dbsync.batcher.shaped import shaped
from dbsync.batcher.urls import KINDS, Kind, open_target
from dbsync.errors import ConfigError
from dbsync.relation import Column, Relation

USERS = Relation(
    1,
    "public",
    "users",
    "d",
    tuple(Column(name, 25, -1, "text") for name in ("id", "name", "password", "city")),
    (0,),
)
ROW = {"id": "1", "name": "Ada", "password": "geheim", "city": "London"}


def shape(**settings: Any) -> tuple[RecordingBatcher, Any]:
    batcher = RecordingBatcher()
    return batcher, shaped(batcher, Settings(**settings))


def info(*relations: Relation) -> BatchInfo:
    return BatchInfo(1, LSN(1), LSN(2), {relation.doctype: relation for relation in relations})


def test_without_a_url_it_echoes() -> None:
    assert type(open_target(Settings())) is EchoBatcher
    assert type(open_target(Settings(to="echo:"))) is EchoBatcher


def test_the_scheme_names_the_class_and_a_driver_may_stand_behind_it() -> None:
    assert isinstance(open_target(Settings(to="duckdb:///shop.duckdb")), DuckDBBatcher)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.form)
def test_every_kind_has_its_class(kind: Kind) -> None:
    module, _, name = kind.target.partition(":")
    found = getattr(__import__(f"dbsync.batcher.{module}", fromlist=[name]), name)
    assert callable(found.from_url)


def test_a_kind_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"The target redis:… is of a kind that dbsync does not know\..*echo:.*--batcher"
    ):
        open_target(Settings(to="redis://user:geheim@localhost"))


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="DBSYNC_TO='shop' cannot be used: it takes the URL of a target"):
        Settings.from_env({"DBSYNC_TO": "shop"})


def test_a_package_that_is_missing_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(
        ConfigError, match=r"the package duckdb, which is not installed\. pip install 'dbsync\[duckdb\]'"
    ):
        open_target(Settings(to="duckdb:///shop.duckdb"))


@pytest.mark.parametrize("name", ["soft_delete", "drop_columns"])
def test_what_only_tables_have_is_refused_for_others(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} was asked for, but a target like echo: has no tables"):
        open_target(Settings(**{name: True}))


def test_a_password_in_the_url_is_never_shown() -> None:
    settings = Settings(to="postgresql://user:ge%21heim@localhost/lake", webhook_secret="psst")
    assert "heim" not in repr(settings)
    assert "psst" not in repr(settings)
    assert (
        settings.mask("could not log in with ge!heim or ge%21heim or psst") == "could not log in with *** or *** or ***"
    )


def test_nothing_stands_before_a_batcher_that_is_asked_nothing() -> None:
    batcher, target = shape()
    assert target is batcher


def test_names_get_a_schema_and_a_prefix() -> None:
    batcher, target = shape(target_schema="lake", target_prefix="pg_")
    target.begin(info(USERS))
    target.batch_truncate("public.users")
    target.batch_delete("public.users", ["2"])
    target.batch_upsert("public.users", {"1": ROW})
    target.batch_upsert("order", {"7": {"total": 1}})
    assert [(kind, doctype) for kind, doctype, _ in batcher.calls] == [
        ("truncate", "lake.pg_users"),
        ("delete", "lake.pg_users"),
        ("upsert", "lake.pg_users"),
        ("upsert", "lake.pg_order"),
    ]


def test_a_prefix_alone_leaves_the_schema() -> None:
    batcher, target = shape(target_prefix="pg_")
    target.batch_upsert("sales.orders", {"1": {}})
    target.batch_upsert("order", {"1": {}})
    assert [doctype for _, doctype, _ in batcher.calls] == ["sales.pg_orders", "pg_order"]


def test_two_tables_of_one_name_are_not_thrown_together() -> None:
    _, target = shape(target_schema="lake")
    target.batch_upsert("public.users", {"1": ROW})
    with pytest.raises(ConfigError, match=r"Both public\.users and sales\.users would be lake\.users in the target"):
        target.batch_upsert("sales.users", {"1": ROW})


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"exclude_columns": ("public.users.password",)}, {"id", "name", "city"}),
        ({"exclude_columns": ("*.password", "*.city")}, {"id", "name"}),
        ({"include_columns": ("public.users.name",)}, {"id", "name"}),
        ({"include_columns": ("public.*.name", "public.users.c*")}, {"id", "name", "city"}),
        ({"include_columns": ("public.orders.name",)}, {"id", "name", "password", "city"}),
        ({"include_columns": ("*.users.*",), "exclude_columns": ("*.password",)}, {"id", "name", "city"}),
    ],
)
def test_columns_are_kept_and_left_out(settings: dict[str, Any], kept: set[str]) -> None:
    batcher, target = shape(**settings)
    begun: list[BatchInfo] = []
    batcher.begin = begun.append  # type: ignore[method-assign]
    target.begin(info(USERS))
    target.batch_upsert("public.users", {"1": ROW})
    assert batcher.upserts("public.users") == {"1": {name: ROW[name] for name in kept}}
    relation = begun[0].relations["public.users"]
    assert set(relation.column_names) == kept
    assert relation.key_names == ("id",)


def test_the_key_cannot_be_left_out() -> None:
    _, target = shape(exclude_columns=("*.id",))
    with pytest.raises(ConfigError, match=r"The column id of public\.users belongs to its key"):
        target.begin(info(USERS))


def test_a_column_without_its_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"The column 'password' cannot be told from others\..*\*\.password"):
        shape(exclude_columns=("password",))


def test_it_hands_on_what_a_batcher_is_told_and_asked() -> None:
    batcher, target = shape(target_prefix="x_")
    batcher.position = lambda: LSN(7)  # type: ignore[method-assign]
    target.log_name = "system/shop/slot"
    assert batcher.log_name == target.log_name == "system/shop/slot"
    assert target.position() == LSN(7)
    target.commit(info())
    assert len(batcher.batches) == 1


def test_it_can_be_sent_to_an_executor() -> None:
    target = shaped(EchoBatcher(), Settings(target_prefix="x_", exclude_columns=("*.password",)))
    target.begin(info(USERS))
    assert pickle.loads(pickle.dumps(target))._renamed("a.b") == "a.x_b"
