//! The loss does not depend on the world size, with dropout on (D2, D3): the proof 5.

use trainctl_tests::job::Job;
use trainctl_tests::programs;
use trainctl_tests::run::{Row, Run};
use trainctl_tests::scratch::Scratch;

/// Global batches of 8 sequences in micro-batches of 2: three ranks get 2, 1 and 1 of the four.
const STEPS: u64 = 10;
const TOLERANCE: f64 = 1e-5;

fn job(scratch: &Scratch, workers: u32) -> Job {
    Job {
        workers,
        steps: STEPS,
        ckpt_every: STEPS,
        val_every: STEPS,
        dropout: 0.2,
        ..Job::new(scratch.join(&format!("run{workers}")))
    }
}

fn rows(scratch: &Scratch, workers: u32) -> Vec<Row> {
    let job = job(scratch, workers);
    let spec = job.write(scratch.join(&format!("job{workers}.yaml")));
    scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(0);
    let rows = Run::new(job.run_dir).rows();
    assert_eq!(rows.len() as u64, STEPS);
    rows
}

#[test]
fn d2_d3_losses_agree_at_world_sizes_1_2_and_3() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("world-sizes");
    let alone = rows(&scratch, 1);
    assert!(alone[0].loss > alone.last().unwrap().loss, "it learns: {alone:?}");
    for workers in [2, 3] {
        assert_agree(&rows(&scratch, workers), &alone, &format!("{workers} workers"));
    }
    c8_a_resume_at_another_world_size(&scratch, &alone);
}

fn assert_agree(got: &[Row], want: &[Row], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        let difference = (got.loss - want.loss).abs() / want.loss;
        assert!(difference <= TOLERANCE, "{what}: {difference:e}\n{got:?}\n{want:?}");
        let norms = (got.grad_norm - want.grad_norm).abs() / want.grad_norm;
        assert!(norms <= 10.0 * TOLERANCE, "{what}: gradient norm {norms:e}\n{got:?}\n{want:?}");
    }
}

/// C8: the checkpoint of two ranks loads at three.
fn c8_a_resume_at_another_world_size(scratch: &Scratch, alone: &[Row]) {
    let job = Job { run_dir: scratch.join("resized"), ..job(scratch, 2) };
    let spec = job.write(scratch.join("resized.yaml"));
    scratch.trainctl(["run", spec.to_str().unwrap(), "--until-step", "5"]).wait().expect_code(0);
    let dir = job.run_dir.to_str().unwrap();
    scratch.trainctl(["resume", dir, "--workers", "3"]).wait().expect_code(0);
    let run = Run::new(&job.run_dir);
    assert_eq!(run.latest().world_size, 3);
    assert_agree(&run.rows(), alone, "two workers, then three");
}
