#!/usr/bin/env python3
"""Measures what checkpoints cost, always in turn with a peer that does the same on this machine at that moment.

    make bench-checkpoint
    make bench-checkpoint BENCH="--rows write,verify --rounds 9 --dir /scratch/bench"

In each round ours and the peers run one after the other on the same file system, in an order that is reversed every other
round; a ratio is the median of the rounds' own ratios, so that a neighbour's load meets both sides. Everything dirty is
synced before each program starts. Reads are warm (the files were just written) unless --cold drops these files, and only
these, from the page cache. The exit status says whether every program ran; with --strict also whether every aim was met.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import kit
from kit import GIB, Measured, Row

ROOT = Path(__file__).resolve().parents[1]
RELEASE = ROOT / "target" / "release"
CONFIG = ROOT / "bench" / "state.json"
RANKS = "2"

ROWS = {
    "stall": ("stall per save, 1 GiB of state on the rank", "memcpy into touched memory", 1 / 1.3, "ours ≤ 1.3×"),
    "write": ("save, 2 ranks", "dd conv=fsync", 0.8, "≥ 80 %"),
    "save": ("save, 2 ranks", "DCP of PyTorch 2.13", 2.0, "≥ 2× faster"),
    "load": ("load, 2 ranks, each the whole", "DCP of PyTorch 2.13", 2.0, "≥ 2× faster"),
    "verify": ("verify", "b3sum", 0.8, "≥ 80 %"),
}
EXPORT_GB = (1, 4, 8)
EXPORT_LIMIT = GIB
EXPORT_SPREAD = 0.10


def measure_stall(row: Row, rounds: int) -> None:
    """The program alternates the two itself: both need the same warm memory."""
    answer = kit.answer_of([RELEASE / "examples" / "bench_snapshot", "--bytes", GIB, "--rounds", rounds])
    for ours, peer in zip(answer["snapshot_seconds"], answer["memcpy_seconds"], strict=True):
        row.add(Measured(answer["bytes"], ours), Measured(answer["bytes"], peer))
    digest = statistics.median(answer["digest_seconds"])
    print(f"digest of the replica, beside the next step: {digest:.3f} s, {answer['bytes'] / digest / 1e9:.1f} GB/s")


class Disk:
    """The rows that write and read files."""

    def __init__(self, args: argparse.Namespace, work: Path, source: Path) -> None:
        self.args, self.source = args, source
        self.ours, self.dcp, self.copy = work / "ours", work / "dcp", work / "dd"

    def shards(self, what: str) -> Measured:
        program = RELEASE / "examples" / "bench_shards"
        return kit.measured([program, what, "--dir", self.ours, "--ranks", RANKS, "--config", CONFIG])

    def torch(self, what: str) -> Measured:
        program = [self.args.python, ROOT / "bench" / "peers" / "dcp.py"]
        return kit.measured([*program, what, "--dir", self.dcp, "--ranks", RANKS, "--config", CONFIG])

    def dd(self) -> Measured:
        command = ["dd", f"if={self.source}", f"of={self.copy}", "bs=8M", "conv=fsync", "status=none"]
        return kit.timed(command, self.source.stat().st_size)

    def b3sum(self) -> Measured:
        files = kit.files_of(self.ours, ".safetensors")
        return kit.timed([self.args.b3sum, *files], sum(path.stat().st_size for path in files))

    def round(self, turn: int, rows: dict[str, Row]) -> None:
        """One round of every row in `rows`."""
        writes = {"ours": lambda: self.shards("save")}
        if "write" in rows:
            writes["dd"] = self.dd
        if rows.keys() & {"save", "load"}:
            writes["dcp"] = lambda: self.torch("save")
        saved = kit.in_turn(turn, writes, os.sync)

        reads = {}
        if "load" in rows:
            reads |= {"load": lambda: self.shards("load"), "dcp": lambda: self.torch("load")}
        if "verify" in rows:
            reads |= {"verify": lambda: self.shards("verify"), "b3sum": self.b3sum}
        read = kit.in_turn(turn, reads, self.before_reading)

        for row, ours, peer in [
            ("write", saved.get("ours"), saved.get("dd")),
            ("save", saved.get("ours"), saved.get("dcp")),
            ("load", read.get("load"), read.get("dcp")),
            ("verify", read.get("verify"), read.get("b3sum")),
        ]:
            if row in rows:
                rows[row].add(ours, peer)
        self.clean()

    def before_reading(self) -> None:
        os.sync()
        if self.args.cold:
            kit.forget(self.ours)
            kit.forget(self.dcp)

    def clean(self) -> None:
        for directory in (self.ours, self.dcp):
            shutil.rmtree(directory, ignore_errors=True)
        self.copy.unlink(missing_ok=True)


def measure_disk(rows: dict[str, Row], args: argparse.Namespace, work: Path) -> None:
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else work) as source:
        source = Path(source) / "bytes"
        if "write" in rows:
            kit.random_file(source, GIB)
        disk = Disk(args, work, source)
        for turn in range(args.rounds):
            disk.round(turn, rows)
            print(f"round {turn + 1} of {args.rounds}, load {kit.load()}", file=sys.stderr)


def measure_export(args: argparse.Namespace, work: Path) -> bool:
    """Peak memory of `trainctl export` for models of several sizes; is it the same for all, and within the limit?"""
    peaks = {}
    base = json.loads(CONFIG.read_text()) | {"n_embd": 1024, "n_head": 16}
    for size in EXPORT_GB:
        width, run, target = base["n_embd"], work / f"run-{size}", work / f"export-{size}"
        fixed = (base["vocab_size"] + base["n_positions"]) * width * 4
        config = work / f"config-{size}.json"
        config.write_text(json.dumps(base | {"n_layer": max(1, round((size * 10**9 - fixed) / (12 * width**2 * 4)))}))
        kit.answer_of([RELEASE / "examples" / "bench_export_input", "--dir", run, "--config", config])
        peaks[size] = kit.peak_memory([RELEASE / "trainctl", "export", "--from", run, "--to", target])
        written = sum(path.stat().st_size for path in kit.files_of(target, ".safetensors"))
        print(f"export of {written / 1e9:.2f} GB: peak memory {peaks[size] / 2**20:.0f} MiB")
        for directory in (run, target):
            shutil.rmtree(directory)
    spread = max(peaks.values()) / min(peaks.values()) - 1
    met = spread <= EXPORT_SPREAD and max(peaks.values()) <= EXPORT_LIMIT
    print(f"export: peaks differ by {spread:.1%} (aim: ≤ 10 %, each ≤ 1024 MiB): {'met' if met else 'MISSED'}")
    return met


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*ROWS, "export"]
    parser.add_argument("--rows", default=",".join(names), help="comma-separated; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=ROOT / "target" / "bench", help="where files are written")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each read")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if an aim is missed")
    parser.add_argument("--python", type=Path, required=True, help="a Python with PyTorch; see scripts/oracle-venv.sh")
    parser.add_argument("--b3sum", type=Path, required=True, help="see scripts/b3sum.sh")
    args = parser.parse_args()
    args.rows = args.rows.split(",")
    if unknown := set(args.rows) - set(names):
        parser.error(f"--rows {','.join(sorted(unknown))}: choose from {','.join(names)}")
    return args


def main() -> int:
    args = parse()
    args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="checkpoint-") as work:
        work = Path(work)
        print(f"{kit.machine(work)}; load before {kit.load()}; reads are {'cold' if args.cold else 'warm'}")
        rows = {name: Row(*ROWS[name]) for name in ROWS if name in args.rows}
        if "stall" in rows:
            measure_stall(rows["stall"], args.rounds)
        disk = {name: row for name, row in rows.items() if name != "stall"}
        if disk:
            measure_disk(disk, args, work)
        kit.print_table(list(rows.values()))
        met = all(row.met for row in rows.values())
        if "export" in args.rows:
            met &= measure_export(args, work)
        print(f"load after {kit.load()}")
    return 1 if args.strict and not met else 0


if __name__ == "__main__":
    sys.exit(main())
