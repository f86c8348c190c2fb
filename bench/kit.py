"""What the benchmarks share: running programs, the page cache, the machine, paired rounds and their table."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True)
class Measured:
    """One run of one program."""

    size: int
    """Bytes of state that it handled."""
    seconds: float

    @property
    def per_gib(self) -> float:
        """Seconds for one GiB: programs that differ in a few bytes of header become comparable."""
        return self.seconds * GIB / self.size


@dataclass
class Row:
    """A line of the table: ours against a peer over all rounds."""

    what: str
    against: str
    aim: float
    """For the peer's time as a multiple of ours: at least this."""
    aim_text: str
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def add(self, ours: Measured, peer: Measured) -> None:
        self.ours.append(ours.per_gib)
        self.peer.append(peer.per_gib)

    @property
    def speed(self) -> float:
        """The peer's time as a multiple of ours: the median of the rounds' own ratios."""
        return statistics.median(peer / ours for ours, peer in zip(self.ours, self.peer, strict=True))

    @property
    def met(self) -> bool:
        return self.speed >= self.aim


def answer_of(command: list) -> dict:
    """Runs a program and reads the JSON object that is the last line of its output."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measured(command: list) -> Measured:
    """Runs a program that takes its own time: {"bytes": …, "seconds": …}."""
    answer = answer_of(command)
    return Measured(answer["bytes"], answer["seconds"])


def timed(command: list, size: int) -> Measured:
    """Runs a program and takes its time, its start included."""
    start = time.perf_counter()
    subprocess.run([str(word) for word in command], stdout=subprocess.DEVNULL, check=True)
    return Measured(size, time.perf_counter() - start)


def peak_memory(command: list) -> int:
    """Runs a program and returns its largest resident set in bytes, mapped files included."""
    child = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, child.args)
    return usage.ru_maxrss * 1024


def files_of(directory: Path, suffix: str = "") -> list[Path]:
    found = (path for path in directory.rglob(f"*{suffix}") if path.is_file() and not path.is_symlink())
    return sorted(found)


def forget(directory: Path) -> None:
    """Asks the kernel to drop these files' clean pages from its cache. Needs no root and touches nobody else's."""
    for path in files_of(directory):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_turn(turn: int, steps: dict[str, Callable[[], Measured]], before: Callable[[], None]) -> dict[str, Measured]:
    """Runs the steps, forwards in even rounds and backwards in odd ones, `before` each of them."""
    found = {}
    for name in reversed(steps) if turn % 2 else steps:
        before()
        found[name] = steps[name]()
    return found


def random_file(path: Path, size: int) -> None:
    """Bytes that no file system can compress."""
    with path.open("wb") as file:
        for start in range(0, size, 1 << 24):
            file.write(os.urandom(min(1 << 24, size - start)))


def machine(directory: Path) -> str:
    """What a reader must know of the machine and of the file system that was measured."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    df = ["df", "--output=source,fstype", str(directory)]
    disk = subprocess.run(df, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    cpu = f"{next(names, platform.machine())}, {os.cpu_count()} cores, {memory:.0f} GiB"
    return f"{cpu}; {directory} on {' '.join(disk)}; Linux {platform.release()}"


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def print_table(rows: list[Row]) -> None:
    """Medians with the extremes, in seconds for one GiB, and the ratios."""

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"

    lines = [("what", "against", "ours, s/GiB", "peer, s/GiB", "peer ÷ ours", "aim", "")]
    for row in rows:
        verdict = "met" if row.met else "MISSED"
        ratio = f"{row.speed:.2f}"
        lines.append((row.what, row.against, spread(row.ours), spread(row.peer), ratio, row.aim_text, verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
