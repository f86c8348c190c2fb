#!/usr/bin/env python3
"""Shows that the simulation bites: plants bugs in decisions, one at a time, and expects the simulation to fail.

    scripts/planted-bugs.py [WORD …]

All bugs are written into the sources at once, each behind a switch that an environment variable sets, so that one build does for
all. Sources are put back afterwards, also after Ctrl-C. Needs LIBTORCH as every build of the workspace does. Words choose the bugs
whose names contain one of them. The exit status is 1 if a bug was not found, or if a patch does not fit its source any more.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = "coordinator/src/core"
DECIDE = "coordinator/src/decide"
MACHINE = "worker/daemon/src/session/machine/mod.rs"
COMMANDS = "worker/daemon/src/session/machine/commands.rs"
STORE = "shared/store/src"
SEEDS = "2000"
# So many must pass without a bug.
SEEDS_WITHOUT = "200"
SWITCH = "TRAINCTL_PLANTED"

# Name: file, what stands there once, what stands there instead, and so on; PLANTED is whether the bug is on.
BUGS = {
    "C2: a save is committed before the last shard": (
        f"{DECIDE}/commit.rs",
        "let missing: Vec<u32> = (0..world_size)",
        "let missing: Vec<u32> = (0..world_size - u32::from(PLANTED))",
    ),
    "C4: retention does not look at the pointers": (
        f"{STORE}/checkpoints/retention.rs",
        "_ if input.pointers.holds(name) || input.targets.holds(name) =>",
        "_ if !PLANTED && (input.pointers.holds(name) || input.targets.holds(name)) =>",
    ),
    "J2: a holder is superseded before its lease is over": (
        f"{STORE}/tenure/decide.rs",
        "if view.same_for >= policy.lease {",
        "if PLANTED || view.same_for >= policy.lease {",
    ),
    "J2: a worker obeys an older term": (
        COMMANDS,
        "        let old_term = known.as_ref().is_some_and(|known| fence.term < known.term);\n",
        "        let old_term = !PLANTED && known.as_ref().is_some_and(|known| fence.term < known.term);\n",
        "        let old_term = self.fences.get(&run).is_some_and(|known| fence.term < known.term);\n",
        "        let old_term = !PLANTED && self.fences.get(&run).is_some_and(|known| fence.term < known.term);\n",
    ),
    "J3: reports of an old generation count for the present one": (
        f"{CORE}/ranks.rs",
        "let live = job.live.as_mut().filter(|live| live.generation == generation)?;",
        "let live = job.live.as_mut().filter(|live| PLANTED || live.generation == generation)?;",
    ),
    "J3: late rows of an old generation are written": (
        f"{DECIDE}/rows.rs",
        "Some(begun) if generation < begun.0 =>",
        "Some(begun) if !PLANTED && generation < begun.0 =>",
    ),
    "J5: a restarted coordinator refills the budget": (
        f"{CORE}/mod.rs",
        "record.term = record.term.max(term);",
        "record.term = record.term.max(term);\n        if PLANTED {\n            record.budget = Default::default();\n        }",
    ),
    "J5: the same internal failure is tried again for ever": (
        f"{DECIDE}/restart.rs",
        "if before.is_some_and(|seen| seen.step == step) {",
        "if !PLANTED && before.is_some_and(|seen| seen.step == step) {",
    ),
    "J6: leases go by the wall clock": (
        f"{CORE}/mod.rs",
        "        let mut out = Vec::new();\n        match event {\n",
        "        let at = if PLANTED { Moment { now: Duration::from_millis(at.wall_ms), ..at } } else { at };\n"
        "        let mut out = Vec::new();\n        match event {\n",
    ),
    "J6: more than half of the leases lapse and all are lost at once": (
        f"{DECIDE}/liveness.rs",
        "_ if newly > 1 && newly * 2 > seen.len() && !doubted =>",
        "_ if !PLANTED && newly > 1 && newly * 2 > seen.len() && !doubted =>",
    ),
    "J6: a coordinator's own standstill is charged to the workers": (
        f"{DECIDE}/liveness.rs",
        "    since_last_tick.saturating_sub(policy.tick)",
        "    if PLANTED { Duration::ZERO } else { since_last_tick.saturating_sub(policy.tick) }",
    ),
    "J6: leases end in the grace after a takeover": (
        f"{DECIDE}/liveness.rs",
        "_ if adopted_at.is_some_and(",
        "_ if !PLANTED && adopted_at.is_some_and(",
    ),
    "J7: a start that was lost with a stream is not sent again": (
        f"{CORE}/workers.rs",
        "None => self.resend_starts(&id, session, out),",
        "None if PLANTED => {}\n            None => self.resend_starts(&id, session, out),",
    ),
    "J7: Formed is said once only": (
        MACHINE,
        "Trainer::Running { formed, .. } => formed.clone(),",
        "Trainer::Running { formed, .. } => formed.clone().filter(|_| !PLANTED),",
    ),
    "P5: a record is acknowledged before what it caused is durable": (
        f"{CORE}/workers.rs",
        "        self.pending.insert(seq);\n",
        "        if !PLANTED {\n            self.pending.insert(seq);\n        }\n",
    ),
    "a phase is not journaled before its effects": (
        f"{CORE}/mod.rs",
        "                    self.journal(id, out);\n                    self.publish(id, out);",
        "                    if !PLANTED {\n                        self.journal(id, out);\n                    }\n"
        "                    self.publish(id, out);",
    ),
    "a worker that has lost its trainer is not asked": (
        f"{CORE}/workers.rs",
        "if rank.worker == worker && rank.ended.is_none() && !carried && !starting {",
        "if !PLANTED && rank.worker == worker && rank.ended.is_none() && !carried && !starting {",
    ),
    "W1: a start is carried out again when it is repeated": (
        COMMANDS,
        "        self.repeat(&start.command_id).unwrap_or_else(|| self.admit(start))",
        "        if PLANTED {\n            return self.admit(start);\n        }\n"
        "        self.repeat(&start.command_id).unwrap_or_else(|| self.admit(start))",
    ),
    "W2: an old generation may start on a worker": (
        COMMANDS,
        "        if !raises {\n",
        "        if !raises && !PLANTED {\n",
    ),
    "W3: a fence is not stored before the start that raises it": (
        COMMANDS,
        "        vec![Effect::Remember, Effect::Start(Box::new(assignment))]",
        "        if PLANTED {\n            return vec![Effect::Start(Box::new(assignment))];\n        }\n"
        "        vec![Effect::Remember, Effect::Start(Box::new(assignment))]",
    ),
    "W4: a trainer starts before its predecessor is gone": (
        COMMANDS,
        "            if raises && self.trainer.is_ending() {",
        "            if PLANTED && raises && self.trainer.is_ending() {\n                self.trainer = Trainer::Idle;\n"
        "                return self.admit(start);\n            }\n            if raises && self.trainer.is_ending() {",
    ),
    "W5: a silent coordinator is never given up": (
        MACHINE,
        "Stream::Up { heard_at, lease, .. } if now > heard_at + lease =>",
        "Stream::Up { heard_at, lease, .. } if !PLANTED && now > heard_at + lease =>",
    ),
    # The order of a commit's steps is the store's: its own crash matrix has it.
    "C3: the pointer is moved before the manifest is made": (
        f"{STORE}/checkpoints/commit.rs",
        "        for _ in 0..COMMIT_TRIES {\n",
        "        if PLANTED {\n            let (pointer, point) = (crate::layout::LATEST, FailPoint::POINTER_LATEST);\n"
        "            self.io.swap_symlink(pointer, &name.to_string(), point).await?;\n        }\n"
        "        for _ in 0..COMMIT_TRIES {\n",
    ),
}
BY_THE_CRASH_MATRIX = {"C3: the pointer is moved before the manifest is made"}
CRASH_TEST = "a_kill_anywhere_leaves_a_run_that_loads_and_goes_on"


def switch(number: int) -> str:
    """An expression: whether bug `number` is on."""
    asks = f'std::env::var("{SWITCH}").is_ok_and(|on| on == "{number}")'
    return f"{{ static ON: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {asks}); *ON }}"


def planted(names: list[str]) -> dict[Path, str]:
    """The sources with these bugs in them."""
    texts: dict[Path, str] = {}
    for number, name in enumerate(names):
        path, *patches = BUGS[name]
        text = texts.get(ROOT / path) or (ROOT / path).read_text()
        for old, new in zip(patches[::2], patches[1::2], strict=True):
            if text.count(old) != 1:
                sys.exit(f"{path} has {text.count(old)} places for: {name}")
            text = text.replace(old, new.replace("PLANTED", switch(number)))
        texts[ROOT / path] = text
    return texts


def build(test: str) -> Path:
    command = ["cargo", "test", "--release", "--locked", "--workspace", "--test", test, "--no-run"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"Executable .*\((.*)\)", built.stderr)
    if built.returncode != 0 or not found:
        sys.exit(f"it does not build:\n{built.stderr[-3000:]}")
    return ROOT / found.group(1)


def run(command: list, directory: Path, number: int | None) -> tuple[str, str] | None:
    """What failed and with which seed; None if nothing did."""
    seeds = SEEDS_WITHOUT if number is None else SEEDS
    environment = os.environ | {"TRAINCTL_SIM_SEEDS": seeds, "RUST_BACKTRACE": "0"}
    environment |= {} if number is None else {SWITCH: str(number)}
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if ended.returncode == 0:
        return None
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if line and not line.startswith("note:")]
    panic = next((index for index, line in enumerate(said) if "panicked at" in line), 0)
    seed = next((line.split("=")[1].split()[0] for line in said if line.startswith("seed: ")), "-")
    return said[min(panic + 1, len(said) - 1)][:110], seed


def main() -> None:
    wanted = sys.argv[1:]
    names = [name for name in BUGS if not wanted or any(word in name for word in wanted)]
    if not names:
        sys.exit(f"no bug's name contains one of {wanted}")
    # A kill must not leave a bug behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    texts = planted(names)
    before = {path: path.read_text() for path in texts}
    try:
        for path, text in texts.items():
            path.write_text(text)
        simulation = build("sim")
        crash = build("crash") if BY_THE_CRASH_MATRIX.intersection(names) else None
    finally:
        for path, text in before.items():
            path.write_text(text)
    commands = {
        False: ([simulation, "--nocapture", "whatever"], ROOT / "tests/sim"),
        True: ([crash, "--nocapture", "--exact", CRASH_TEST], ROOT / "shared/store"),
    }
    if found := run(*commands[False], None):
        sys.exit(f"the simulation fails without a bug: {found[0]} (seed {found[1]})")
    missed = []
    print(f"{'':7} {'seed':>5} {'s':>4}  {'bug':66}  what failed")
    for number, name in enumerate(names):
        started = time.monotonic()
        found = run(*commands[name in BY_THE_CRASH_MATRIX], number)
        seconds = time.monotonic() - started
        message, seed = found or ("", "")
        print(f"{'found' if found else 'MISSED':7} {seed:>5} {seconds:4.0f}  {name:66}  {message}", flush=True)
        if not found:
            missed.append(name)
    print(f"{len(names) - len(missed)} of {len(names)} found")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
