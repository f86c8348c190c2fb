//! The loss does not depend on the world size, with dropout on (D2, D3): the proof 5.

use trainctl_tests::job::Job;
use trainctl_tests::programs;
use trainctl_tests::run::{Row, Run};
use trainctl_tests::scratch::Scratch;

/// Global batches of 8 sequences in micro-batches of 2: three ranks get 2, 1 and 1 of the four.
const STEPS: u64 = 10;
const TOLERANCE: f64 = 1e-5;

fn rows(scratch: &Scratch, workers: u32) -> Vec<Row> {
    let job = Job {
        workers,
        steps: STEPS,
        ckpt_every: STEPS,
        val_every: STEPS,
        dropout: 0.2,
        ..Job::new(scratch.join(&format!("run{workers}")))
    };
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
        for (got, want) in rows(&scratch, workers).iter().zip(&alone) {
            let difference = (got.loss - want.loss).abs() / want.loss;
            assert!(difference <= TOLERANCE, "{workers} workers: {difference:e}\n{got:?}\n{want:?}");
            let norms = (got.grad_norm - want.grad_norm).abs() / want.grad_norm;
            assert!(norms <= 10.0 * TOLERANCE, "{workers} workers: gradient norm {norms:e}\n{got:?}\n{want:?}");
        }
    }
}
