#!/usr/bin/env python3
"""Shows that the simulation bites: plants one bug after the other in a decision, builds, and expects the simulation to fail.

    scripts/planted-bugs.py [NAME …]

Sources are put back afterwards, also after Ctrl-C. Needs LIBTORCH as every build of the workspace does. About half a minute
for each bug. The exit status is 1 if one was not found.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = "coordinator/src/core"
MACHINE = "worker/daemon/src/session/machine.rs"
SEEDS = "400"

# Name: file, what stands there once, what stands there instead.
BUGS = {
    "a save is committed before rank 0 has reported its shards (C2)": (
        "coordinator/src/decide/commit.rs",
        "let missing: Vec<u32> = (0..world_size)",
        "let missing: Vec<u32> = (1..world_size)",
    ),
    "reports of an old generation count for the present one (J3)": (
        f"{CORE}/ranks.rs",
        "let live = job.and_then(|job| job.live.as_mut()).filter(|live| live.generation == generation);",
        "let live = job.and_then(|job| job.live.as_mut());",
    ),
    "a restarted coordinator refills the budget (J5)": (
        f"{CORE}/mod.rs",
        "record.term = record.term.max(term);",
        "record.term = record.term.max(term);\n        record.budget = Default::default();",
    ),
    "a record is acknowledged before what it caused is durable (P5)": (
        f"{CORE}/workers.rs",
        "        self.pending.insert(seq);\n",
        "",
    ),
    "a phase is not journaled before its effects": (
        f"{CORE}/mod.rs",
        "                    self.journal(id, out);\n                    self.publish(id, out);",
        "                    self.publish(id, out);",
    ),
    "a fence is not stored before the start that raises it (W3)": (
        MACHINE,
        "vec![Effect::Remember, Effect::Start(Box::new(assignment))]",
        "vec![Effect::Start(Box::new(assignment))]",
    ),
    "a start is carried out again when it is repeated (W1)": (
        MACHINE,
        "self.repeat(&start.command_id).unwrap_or_else(|| self.admit(start))",
        "self.admit(start)",
    ),
    "an old generation may start on a worker (W2)": (
        MACHINE,
        "        if !raises {\n",
        "        if false {\n",
    ),
    "a trainer starts before its predecessor is gone (W4)": (
        MACHINE,
        "if raises && self.trainer.is_ending() {",
        "if raises && self.trainer.is_ending() {\n                self.trainer = Trainer::Idle;\n                return self.admit(start);\n            }\n            if false {",
    ),
    "Formed is said once only": (
        MACHINE,
        "Trainer::Running { formed, .. } => formed.clone(),",
        "Trainer::Running { .. } => None,",
    ),
    "a worker that has lost its trainer is not asked": (
        f"{CORE}/workers.rs",
        "if rank.worker == worker && rank.ended.is_none() && !carried && !starting {",
        "if false && rank.worker == worker && rank.ended.is_none() && !carried && !starting {",
    ),
    "a start that was lost with a stream is not sent again (J7)": (
        f"{CORE}/workers.rs",
        "None => self.resend_starts(&id, session, out),",
        "None => {}",
    ),
}


def simulate() -> str | None:
    """How the simulation failed; None if it passed."""
    build = ["cargo", "test", "--release", "--locked", "--workspace", "--test", "sim", "--no-run"]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    if built.returncode != 0:
        sys.exit(f"it does not build:\n{built.stderr[-3000:]}")
    program = ROOT / re.search(r"Executable .*\((.*)\)", built.stderr).group(1)
    environment = os.environ | {"TRAINCTL_SIM_SEEDS": SEEDS, "RUST_BACKTRACE": "0"}
    run = subprocess.run([program, "--nocapture"], cwd=ROOT / "tests/sim", env=environment, capture_output=True, text=True)
    if run.returncode == 0:
        return None
    said = [line for line in (run.stdout + run.stderr).splitlines() if line and not line.startswith("note:")]
    panic = next((index for index, line in enumerate(said) if "panicked at" in line), 0)
    seed = next((line for line in said if line.startswith("seed: ")), "")
    return f"{said[panic + 1][:150]}  ({seed})"


def main() -> None:
    wanted = sys.argv[1:]
    missed = []
    # A kill must not leave a bug behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if simulate() is not None:
        sys.exit("the simulation fails without a bug")
    for name, (path, old, new) in BUGS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        source = ROOT / path
        text = source.read_text()
        if text.count(old) != 1:
            sys.exit(f"{path} has {text.count(old)} places for: {name}")
        try:
            source.write_text(text.replace(old, new))
            found = simulate()
        finally:
            source.write_text(text)
        print(f"{'found ' if found else 'MISSED'}  {name}" + (f"\n        {found}" if found else ""), flush=True)
        if not found:
            missed.append(name)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
