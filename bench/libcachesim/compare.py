#!/usr/bin/env python3
"""Compares `undercroft-lab sim` with libCacheSim: misses and speed of CLOCK and LRU, same traces, same sizes.

    python3 bench/libcachesim/compare.py --out DIR [--fixture]

Makes a virtual environment in a temporary directory (or uses --venv DIR), installs the package `libcachesim`, builds
our example, and runs both programs in turn on the same traces. DIR gets results.json and results.md. --fixture writes
the miss counts that lab/sim/tests/agreement.rs checks without a network.

libCacheSim runs its own loop in C over a trace in its oracleGeneral format (24 bytes a reference, mapped, read once
beforehand so that it is in memory): `n_bit_counter=1`, `init_freq=0`, sizes 1, so that a byte is a page. Ours replays
4 bytes a reference; numbering the pages is shown beside it. Our side is built with --profile dist, and RUSTFLAGS as they are.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRACES = ["zipf", "loop", "scan"]
POLICIES = ["clock", "lru"]
PERCENT = [1, 5, 10, 25, 50, 75]
FIXTURE_REFERENCES, FIXTURE_PAGES = 300_000, 10_000


def random_bits(count):
    """SplitMix64 of seed 42, as undercroft_model::Random."""
    import numpy as np

    with np.errstate(over="ignore"):
        gamma = np.uint64(0x9E3779B97F4A7C15)
        z = np.uint64(42) + np.arange(1, count + 1, dtype=np.uint64) * gamma
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def pages(name, count, footprint):
    """The traces of lab/sim/tests/agreement.rs, page by page; the same arithmetic there."""
    import numpy as np

    at = np.arange(count, dtype=np.uint64)
    if name == "loop":
        return at % np.uint64(footprint)
    if name == "zipf":
        u = (random_bits(count) >> np.uint64(11)).astype(np.float64) / float(1 << 53)
        rank = (u * u * u * u * u * footprint).astype(np.uint64)
        return rank * np.uint64(7919) % np.uint64(footprint)
    if name == "scan":
        # One random number for each reference that is not the scan's.
        hot = at % np.uint64(4) != 0
        out = at // np.uint64(4) % np.uint64(footprint)
        out[hot] = random_bits(int(hot.sum())) % np.uint64(footprint // 10)
        return out
    raise ValueError(name)


def write_traces(name, count, footprint, directory):
    import numpy as np

    numbers = pages(name, count, footprint)
    ours = directory / f"{name}.u64"
    numbers.astype("<u8").tofile(ours)
    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    records = np.zeros(count, dtype=record)
    records["id"] = numbers + np.uint64(1)
    records["size"] = 1
    records["next"] = -2
    theirs = directory / f"{name}.oracleGeneral.bin"
    records.tofile(theirs)
    return ours, theirs


def run_theirs(path, policy, frames, count, footprint):
    import libcachesim as lcs

    hashpower = max(10, footprint.bit_length())
    arguments = dict(cache_size=frames, hashpower=hashpower)
    cache = lcs.Clock(init_freq=0, n_bit_counter=1, **arguments) if policy == "clock" else lcs.LRU(**arguments)
    kind = lcs.TraceType.ORACLE_GENERAL_TRACE
    path.read_bytes()  # in memory
    reader = lcs.TraceReader(str(path), kind, lcs.ReaderInitParam(ignore_obj_size=False))
    started = time.perf_counter()
    miss_ratio, _ = cache.process_trace(reader)
    return dict(misses=round(miss_ratio * count), seconds=time.perf_counter() - started)


def run_ours(binary, path, policy, frames):
    out = subprocess.run([binary, path, policy, str(frames)], check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def inside(arguments):
    """What runs in the virtual environment."""
    from importlib.metadata import version

    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    environment = dict(
        date=datetime.date.today().isoformat(),
        libcachesim=version("libcachesim"),
        python=platform.python_version(),
        kernel=platform.release(),
        commit=subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        command="python3 bench/libcachesim/compare.py " + ("--fixture" if arguments.fixture else ""),
        rustflags=os.environ.get("RUSTFLAGS", ""),
    )
    target = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--no-deps"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    binary = Path(json.loads(target)["target_directory"]) / "dist/examples/replay_pages"
    if not arguments.no_build:
        build = ["cargo", "build", "--profile", "dist", "-p", "undercroft-sim", "--example", "replay_pages"]
        subprocess.run(build, cwd=ROOT, check=True)
    if arguments.binary:
        binary = Path(arguments.binary)
    count = FIXTURE_REFERENCES if arguments.fixture else arguments.references
    footprint = FIXTURE_PAGES if arguments.fixture else arguments.pages
    rows = []
    of_rounds = min if arguments.best else statistics.median
    with tempfile.TemporaryDirectory() as name:
        for trace in arguments.traces.split(","):
            ours_path, theirs_path = write_traces(trace, count, footprint, Path(name))
            for policy in POLICIES:
                for percent in map(int, arguments.percent.split(",")):
                    frames = footprint * percent // 100
                    ours, theirs = [], []
                    for _ in range(1 if arguments.fixture else arguments.rounds):
                        ours.append(run_ours(binary, ours_path, policy, frames))
                        theirs.append(run_theirs(theirs_path, policy, frames, count, footprint))
                    row = dict(
                        trace=trace,
                        policy=policy,
                        frames=frames,
                        misses_ours=ours[0]["misses"],
                        misses_libcachesim=theirs[0]["misses"],
                        difference_points=100 * abs(ours[0]["misses"] - theirs[0]["misses"]) / count,
                        miss_ratio=ours[0]["misses"] / count,
                        ours_references_per_second=count / of_rounds([r["replay_seconds"] for r in ours]),
                        numbering_references_per_second=count / of_rounds([r["numbering_seconds"] for r in ours]),
                        libcachesim_references_per_second=count / of_rounds([r["seconds"] for r in theirs]),
                    )
                    row["speed_ratio"] = row["ours_references_per_second"] / row["libcachesim_references_per_second"]
                    rows.append(row)
                    print(
                        f"{trace:5} {policy:6} {percent:3} %  misses {row['misses_ours']} / {row['misses_libcachesim']}"
                        f"  {row['ours_references_per_second'] / 1e6:6.1f} / {row['libcachesim_references_per_second'] / 1e6:6.1f} M/s",
                        file=sys.stderr,
                    )
    results = dict(environment=environment, references=count, pages=footprint, rows=rows)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text(markdown(results))
    if arguments.fixture:
        lines = [f"# misses of libCacheSim {environment['libcachesim']}, {environment['date']}: {environment['command'].strip()}"]
        lines += [f"# {count} references, {footprint} pages; trace policy frames misses"]
        lines += [f"{r['trace']} {r['policy']} {r['frames']} {r['misses_libcachesim']}" for r in rows]
        (ROOT / "lab/sim/tests/data/libcachesim.txt").write_text("\n".join(lines) + "\n")
    return 0 if all(row["difference_points"] <= 0.1 for row in rows) else 1


def markdown(results):
    lines = [
        f"# undercroft-lab sim and libCacheSim {results['environment']['libcachesim']}",
        "",
        f"{results['references']} references to {results['pages']} pages, one core; {results['environment']['date']}, "
        f"commit {results['environment']['commit']}, Linux {results['environment']['kernel']}. M/s = million references a second.",
        "",
        "| trace | policy | pages of memory | miss % | difference, points | ours M/s | numbering M/s | libCacheSim M/s | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['trace']} | {row['policy']} | {row['frames']} | {100 * row['miss_ratio']:.2f} | {row['difference_points']:.4f} "
            f"| {row['ours_references_per_second'] / 1e6:.1f} | {row['numbering_references_per_second'] / 1e6:.1f} "
            f"| {row['libcachesim_references_per_second'] / 1e6:.1f} | {row['speed_ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="directory for results.json and results.md")
    parser.add_argument("--fixture", action="store_true", help="small traces; also write the test's miss counts")
    parser.add_argument("--references", type=int, default=20_000_000)
    parser.add_argument("--pages", type=int, default=1 << 18)
    parser.add_argument("--rounds", type=int, default=3, help="each program runs so often, in turn; the median counts")
    parser.add_argument("--best", action="store_true", help="the best round counts, for each program: on a noisy machine")
    parser.add_argument("--traces", default=",".join(TRACES), help="only these")
    parser.add_argument("--percent", default=",".join(map(str, PERCENT)), help="memory sizes, in percent of the pages")
    parser.add_argument("--venv", help="virtual environment to use or make; default: a temporary one")
    parser.add_argument("--binary", help="our example, already built")
    parser.add_argument("--no-build", action="store_true", help="our example is built")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        sys.exit(inside(arguments))
    with tempfile.TemporaryDirectory() as name:
        place = Path(arguments.venv or name)
        python = place / "bin/python"
        if not python.exists():
            venv.create(place, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "libcachesim", "numpy"], check=True)
        sys.exit(subprocess.run([python, __file__, "--inside", *sys.argv[1:]], env={**os.environ}).returncode)


if __name__ == "__main__":
    main()
