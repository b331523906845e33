import os
import subprocess
import sys
from pathlib import Path

# A signal arrives at any moment, also while an import makes a dataclass out of a string.
INTERRUPTED_IN_A_STRING = """
import sys
from dbsync import cli

cli.app.main = lambda *_, **__: exec("raise KeyboardInterrupt")
sys.exit(cli.main())
"""


def test_an_interrupt_within_a_string_that_is_run_gives_the_exit_code_too(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_A_STRING)
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "dbsync: interrupted.\n")
