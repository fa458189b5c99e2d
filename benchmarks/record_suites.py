"""Runs the test suite with several versions of torch, and records what passed and what was skipped.

    python benchmarks/record_suites.py .venv/bin/python .venv-oldest/bin/python

Writes results/suites.json. Like `make test-oldest`, it runs everything except the explorer, Ray and interop.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("tests/interop", "tests/app", "tests/experiments/test_ray.py")
ENVIRONMENT = """
import json
from rectgrad.bench.environment import commit, environment
found = environment("cpu")
print(json.dumps({"commit": commit(), **{name: found[name] for name in ("torch", "python", "cpu", "cores")}}))
"""


def counts(report: Path) -> dict[str, Any]:
    """The counts in a JUnit report, and how often each reason for skipping a test occurs."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    # A test whose body and teardown both fail has two entries in its case.
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    reasons = Counter(_reason(skip) for case in cases for skip in case.iter("skipped"))
    skipped = sum(reasons.values())
    passed = len(cases) - failed - skipped
    return {"passed": passed, "failed": failed, "skipped": skipped, "reasons": dict(reasons.most_common())}


def _reason(skip: ElementTree.Element) -> str:
    message = skip.get("message", "")
    if message != "collection skipped":
        return message
    return ast.literal_eval(skip.text or "")[2].removeprefix(
        "Skipped: "
    )  # a skipped file has (path, line, reason)


def run(python: Path) -> dict[str, Any]:
    """Runs the suite and returns its record. Exits if there is no report, for example if no test ran."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    line = [python, "-c", ENVIRONMENT]
    found = subprocess.run(line, env=environment, stdout=subprocess.PIPE, check=True).stdout
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        left_out = [f"--ignore={path}" for path in LEFT_OUT]
        started = time.perf_counter()
        line = [python, "-m", "pytest", "-n", "auto", *left_out, f"--junit-xml={report}"]
        status = subprocess.run(line, cwd=ROOT, env=environment).returncode
        seconds = round(time.perf_counter() - started, 1)
        if status not in (0, 1):  # passed, failed
            raise SystemExit(f"{python} -m pytest exited with status {status}")
        return {**json.loads(found), **counts(report), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", type=Path, nargs="+", help="Python executables, one for each version")
    parser.add_argument("--out", type=Path, default=ROOT / "results/suites.json")
    given = parser.parse_args()
    # The symbolic links of a virtual environment must not be resolved: they point outside it.
    suites = [run(python.absolute()) for python in given.pythons]
    given.out.write_text(json.dumps({"left_out": LEFT_OUT, "suites": suites}, indent=1) + "\n")
    for suite in suites:
        print(", ".join(f"{name} {suite[name]}" for name in ("torch", "passed", "failed", "skipped")))
    sys.exit(1 if any(suite["failed"] for suite in suites) else 0)


if __name__ == "__main__":
    main()
