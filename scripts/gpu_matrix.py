"""Run a shard of the whole matrix of both engines on a GPU, and keep what came of it.

    python scripts/gpu_matrix.py 0/2 [--output benchmarks/results/gpu_matrix.json]

The shards of ``i/n`` are rows of ``tests/matrix.py`` in every way that this machine can
run them; ``triples`` is a cover of all triples instead. Each is run by pytest in a
process for each core, and what it says is put beside the shards in the file, each with
the commit that it is of, and the largest error of each class that was let pass, in
roundoffs, with its row. Shards of another ``n`` are no parts of the same matrix: they
are refused before anything runs. Of ``--select`` the file tells, since a shard is then
complete with the rows so named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lockstep.verify.certificate import find_commit  # noqa: E402
from tests.tolerances import read_measured  # noqa: E402

OUTPUT = ROOT / "benchmarks/results/gpu_matrix.json"
TESTS = "tests/equivalence/test_engine.py"
VERSIONS = ("torch", "triton", "transformers")
#: Seconds in which pytest, once stopped, may still write its report.
LAST_WORDS = 40
#: Names of failed rows that are kept; their number is kept in any case.
MOST_NAMES = 200


def check(found: dict[str, Any], shard: str, select: str = "") -> None:
    """Refuse a shard that is none, or that does not go with those already found."""
    if shard == "triples":
        return
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or int(match[1]) >= int(match[2]):
        raise SystemExit(f'{shard!r} is neither i/n, with i from 0, nor "triples"')
    known = found.get("shards", {})
    others = {name.partition("/")[2] for name in known} - {match[2]}
    if others:
        raise SystemExit(
            f"the file has shards of {', '.join(sorted(others))}, so {shard} is no "
            "part of the same matrix; use another file"
        )
    if any(each.get("select", "") != select for each in known.values()):
        raise SystemExit("the file has other rows of its shards; use another file")


def merge(found: dict[str, Any], shard: str, result: dict[str, Any]) -> dict[str, Any]:
    """Put a result beside those already found, in place of an older one of its own."""
    check(found, shard, result.get("select", ""))
    merged = {"shards": {}, **found}
    if shard == "triples":
        return merged | {"triples": result}
    shards = {**merged["shards"], shard: result}
    return merged | {"shards": dict(sorted(shards.items()))}


def read(report: Path) -> dict[str, Any]:
    """Sum up what pytest wrote of the rows that it ran."""
    counts, properties = Counter[str](), Counter[str]()
    failed: list[str] = []
    seconds = 0.0
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [each for each in case if each.tag in ("failure", "error")]
        noted = list(case.iter("property"))
        # A row notes its steps at the end; one without was still running.
        outcome = "failed" if problems else "passed" if noted else "unfinished"
        counts[outcome] += 1
        seconds += float(case.get("time", 0))
        for entry in noted:
            properties[str(entry.get("name"))] += int(str(entry.get("value")))
        if problems:
            text = " ".join(str(problems[0].get("message")).split())
            failed.append(f"{case.get('name')}: {text[:300]}")
    return {
        "rows": {
            "run": counts["passed"] + counts["failed"],
            "passed": counts["passed"],
            "failed": counts["failed"],
            "unfinished": counts["unfinished"],
        },
        "failed": failed[:MOST_NAMES],
        "tokens": _named(properties, "tokens of "),
        "ties": _named(properties, "ties of "),
        "steps": _named(properties, "steps of "),
        "core_seconds": round(seconds, 1),
    }


def _named(properties: Counter[str], start: str) -> dict[str, int]:
    """Take the counts whose names begin so."""
    return {
        name.removeprefix(start): count
        for name, count in sorted(properties.items())
        if name.startswith(start)
    }


def describe(device: str) -> dict[str, str]:
    """Say on what and with what the rows were run, and of which commit they are."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS},
    }


def run(
    shard: str, device: str, jobs: int, limit: float, select: str
) -> dict[str, Any]:
    """Run the rows of a shard, all that come in time, and sum up what came of them."""
    environment = {
        **os.environ,
        "SHARD": shard,
        "LOCKSTEP_MATRIX_DEVICE": device,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
    }
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, measured = Path(folder, "report.xml"), Path(folder, "measured")
        environment["LOCKSTEP_MEASURED"] = str(measured)
        # Each process begins with neighbours, which have an engine in common.
        spread = ["-n", str(jobs), "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", TESTS, *spread]
        command += ["-k", f"test_row and ({select})" if select else "test_row"]
        command += ["--tb=short", f"--junit-xml={report}", "-p", "no:cacheprovider"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        is_complete = True
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            is_complete = False
            print(f"stopped after {limit:.0f} s", flush=True)
            # Pytest then writes its report of the rows that were run.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS)
            status = process.poll()
        finally:
            process.kill()
        seconds = time.monotonic() - begin
        if not report.exists():
            raise SystemExit(f"pytest ended with {status} and left no report")
        found = read(report) | {"largest": read_measured(measured)}
    is_whole = is_complete and status in (0, 1)
    found["is_complete"] = is_whole and not found["rows"]["unfinished"]
    chosen = {"select": select} if select else {}
    return chosen | found | {"seconds": round(seconds, 1), "processes": jobs}


def main(arguments: list[str] | None = None) -> int:
    """Run a shard and write the file; return 0 if all its rows were run and passed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("shard", help="i/n, with i from 0, or triples")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--commit", help="what the rows are of; asks git by default")
    parser.add_argument("--device", default="cuda")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores)
    parser.add_argument("--limit", type=float, default=480, help="seconds")
    parser.add_argument("--select", default="", help="rows by name, as pytest's -k")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    if given.output.exists():
        found = json.loads(given.output.read_text())
    check(found, given.shard, given.select)
    commit = given.commit or find_commit() or "unknown"
    about = {"commit": commit, **describe(given.device)}
    result = run(given.shard, given.device, given.jobs, given.limit, given.select)
    merged = merge(found, given.shard, about | result)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(merged, indent=2) + "\n")
    print(json.dumps({given.shard: about | result}, indent=2), flush=True)
    return int(bool(result["rows"]["failed"]) or not result["is_complete"])


if __name__ == "__main__":
    sys.exit(main())
