"""How close dbsync comes to what PostgreSQL itself can deliver: `python tests/bench/bench.py NAME`.

Each benchmark starts its own PostgreSQL from the wheel, runs ours and the yardstick in turns, and prints medians, the
spread and the ratio. Seconds depend on the machine; the ratio is what can be compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import pyspark
import scenarios
from pyspark import cloudpickle
from scenarios import SCENARIOS, Comparison, Figures, Options, Result

from dbsync.spark import session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "\n".join(f"  {name:12}{scenario.__doc__}" for name, scenario in SCENARIOS.items())
    parser.epilog = f"names:\n{names}"
    parser.add_argument("name", choices=SCENARIOS, metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw what sweeps a size (needs matplotlib)")
    parser.add_argument("--runs", type=int, default=3, help="how often each side runs (default 3)")
    parser.add_argument("--size", type=int, help="changes or rows, in place of the benchmark's own")
    given = parser.parse_args()
    if given.runs < 1 or (given.size is not None and given.size < 1):
        parser.error("--runs and --size take a number from 1 on")
    if given.plot:
        _plotter(parser)
    logging.basicConfig(level=logging.ERROR)
    # The executors cannot import what lies beside this file.
    cloudpickle.register_pickle_by_value(scenarios)
    spark = session("local[*]", app_name="dbsync-bench")
    spark.range(1).count()
    results: list[Result] = []
    for result in SCENARIOS[given.name](spark, Options(given.runs, given.size)):
        results.append(result)
        if not given.json:
            print(_shown(result), flush=True)
    if given.json:
        print(json.dumps({"machine": _machine(), "results": [result.as_dict() for result in results]}, indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in _machine().items()))
    if given.plot:
        _plot([result for result in results if isinstance(result, Figures) and result.series], given.plot, parser)


def _shown(result: Result) -> str:
    if isinstance(result, Comparison):
        limit = f" (at most {result.limit:.2f})" if result.limit else ""
        return (
            f"{result.name}\n"
            f"  dbsync          {_spread(result.ours)} {result.unit}\n"
            f"  {result.yardstick:15} {_spread(result.theirs)} {result.unit}\n"
            f"  ratio           {result.ratio:.2f}{limit}"
        )
    lines = [
        f"  {name:38} {value:10.2f}{f' (at most {limit:g})' if limit else ''}"
        for name, (value, limit) in result.values.items()
    ]
    return "\n".join([f"{result.name}, {result.unit}", *lines])


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "Python": platform.python_version(),
        "Spark": pyspark.__version__,
        "PostgreSQL": 18,
    }


def _plotter(parser: argparse.ArgumentParser) -> Any:
    try:
        import matplotlib
    except ImportError:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plot(figures: list[Figures], file: Path, parser: argparse.ArgumentParser) -> None:
    if not figures:
        print("Nothing here sweeps a size; no plot was made.", file=sys.stderr)
        return
    pyplot = _plotter(parser)
    _, axes = pyplot.subplots()
    for figure in figures:
        for name, points in figure.series.items():
            axes.loglog([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xlabel("changes")
    axes.set_ylabel("seconds")
    axes.legend()
    pyplot.savefig(file)


if __name__ == "__main__":
    main()
