use std::io::Write;

use serde_json::json;

use super::*;

fn training(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("training.jsonl")
}

fn steps(path: &Path) -> Vec<u64> {
    parse_rows::<Step>(path).unwrap().into_iter().map(|row| row.step).collect()
}

fn foreign(path: &Path, text: &str) {
    let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

#[test]
fn rows_come_once_and_in_step_order() {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = RowFile::open(training(&dir), Order::ByStep).unwrap();
    assert_eq!(rows.last_step(), None);
    for step in [0, 1, 1, 0, 4] {
        rows.append(&json!({"step": step, "loss": 0.5})).unwrap();
    }
    assert_eq!(rows.append(&json!({"step": 4})).unwrap(), Appended::Ignored);
    assert_eq!(steps(&training(&dir)), [0, 1, 4]);
    assert_eq!(RowFile::open(training(&dir), Order::ByStep).unwrap().last_step(), Some(4));
    assert!(rows.append(&json!({"loss": 1})).unwrap_err().to_string().contains("step"));
}

#[test]
fn every_torn_tail_is_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let whole = "{\"step\":0}\n{\"step\":1}\n";
    let next = "{\"step\":2,\"loss\":1.5}\n";
    for cut in 0..=next.len() {
        std::fs::write(training(&dir), format!("{whole}{}", &next[..cut])).unwrap();
        let mut rows = RowFile::open(training(&dir), Order::ByStep).unwrap();
        let complete = cut == next.len();
        assert_eq!(rows.last_step(), Some(if complete { 2 } else { 1 }), "cut at {cut}");
        assert_eq!(rows.repaired_bytes(), if complete { 0 } else { cut as u64 });
        rows.append(&json!({"step": 2})).unwrap();
        assert_eq!(steps(&training(&dir)), [0, 1, 2]);
    }
}

#[test]
fn events_are_all_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("events.jsonl");
    let mut events = RowFile::open(&path, Order::AsAppended).unwrap();
    for _ in 0..2 {
        events.append(&json!({"kind": "job_submitted", "step": 1})).unwrap();
    }
    assert_eq!(read_rows(&path, 0).unwrap().lines.len(), 2);
}

#[test]
fn later_rows_move_away_and_may_come_again() {
    let dir = tempfile::tempdir().unwrap();
    let abandoned = dir.path().join("abandoned/g3/training.jsonl");
    let mut rows = RowFile::open(training(&dir), Order::ByStep).unwrap();
    for step in 0..6 {
        rows.append(&json!({"step": step})).unwrap();
    }
    assert_eq!(rows.cut_after(Some(3), &abandoned).unwrap(), 2);
    assert_eq!((steps(&training(&dir)), steps(&abandoned)), (vec![0, 1, 2, 3], vec![4, 5]));
    assert_eq!(rows.cut_after(Some(3), &abandoned).unwrap(), 0);
    assert_eq!(rows.append(&json!({"step": 4})).unwrap(), Appended::Written);
    assert_eq!(rows.cut_after(None, &abandoned).unwrap(), 5);
    assert_eq!((rows.last_step(), steps(&training(&dir))), (None, vec![]));
    assert_eq!(rows.append(&json!({"step": 0})).unwrap(), Appended::Written);
}

#[derive(Debug)]
struct Gate(std::sync::atomic::AtomicBool);

#[async_trait::async_trait]
impl Fence for Gate {
    async fn pass(&self) -> Result<()> {
        self.pass_blocking()
    }

    fn pass_blocking(&self) -> Result<()> {
        match self.0.load(std::sync::atomic::Ordering::SeqCst) {
            true => Ok(()),
            false => Err(Error::Superseded { mine: 1, theirs: 2 }),
        }
    }
}

#[test]
fn a_holder_that_wakes_up_late_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate(true.into()));
    let mut frozen = RowFile::open_fenced(training(&dir), Order::ByStep, Arc::clone(&gate) as _).unwrap();
    frozen.append(&json!({"step": 0})).unwrap();
    let mut rows = RowFile::open(training(&dir), Order::ByStep).unwrap();
    gate.0.store(false, std::sync::atomic::Ordering::SeqCst);
    for step in 1..4 {
        rows.append(&json!({"step": step, "generation": 2})).unwrap();
    }
    assert!(matches!(frozen.append(&json!({"step": 1})), Err(Error::Superseded { .. })), "J2");
    assert!(frozen.cut_after(None, dir.path().join("abandoned/late.jsonl")).is_err());
    assert!(RowFile::open_fenced(training(&dir), Order::ByStep, gate).is_err());
    rows.append(&json!({"step": 4, "generation": 2})).unwrap();
    assert_eq!(steps(&training(&dir)), [0, 1, 2, 3, 4]);
}

#[test]
fn a_holder_whose_file_was_replaced_takes_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = RowFile::open(training(&dir), Order::ByStep).unwrap();
    rows.append(&json!({"step": 0})).unwrap();
    RowFile::open(training(&dir), Order::ByStep).unwrap();
    rows.append(&json!({"step": 1})).unwrap();
    assert_eq!(steps(&training(&dir)), [0, 1]);
    std::fs::remove_file(training(&dir)).unwrap();
    rows.append(&json!({"step": 2})).unwrap();
    assert_eq!(steps(&training(&dir)), [0, 1, 2], "a deleted file is made again");
}

#[test]
fn a_file_that_was_replaced_between_the_look_and_the_change_stays() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::with_faults(dir.path(), Arc::default());
    std::fs::write(training(&dir), "old").unwrap();
    let seen = disk.open_read("training.jsonl").unwrap().unwrap();
    assert!(disk.replace_durable("training.jsonl", &seen, b"mine", FailPoint::ROW_OPEN).unwrap());
    assert!(!disk.replace_durable("training.jsonl", &seen, b"late", FailPoint::ROW_OPEN).unwrap());
    assert_eq!(std::fs::read(training(&dir)).unwrap(), b"mine");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");
}

#[test]
fn a_row_written_in_part_is_cut_before_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = RowFile::open(training(&dir), Order::ByStep).unwrap();
    rows.append(&json!({"step": 0})).unwrap();
    foreign(&training(&dir), "{\"st");
    rows.append(&json!({"step": 1})).unwrap();
    assert_eq!(steps(&training(&dir)), [0, 1]);
}

#[test]
fn tailing_goes_on_where_it_ended_and_notices_a_cut() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(read_rows(training(&dir), 0).unwrap(), Rows::default());
    let mut rows = RowFile::open(training(&dir), Order::ByStep).unwrap();
    rows.append(&json!({"step": 0})).unwrap();
    foreign(&training(&dir), "{\"step\":1");
    let first = read_rows(training(&dir), 0).unwrap();
    assert_eq!((first.lines.len(), first.next_offset), (1, 11));
    foreign(&training(&dir), "}\n");
    let second = read_rows(training(&dir), first.next_offset).unwrap();
    assert_eq!((second.lines, second.next_offset), (vec!["{\"step\":1}".to_owned()], 22));
    rows.settle().unwrap();
    assert_eq!(read_rows(training(&dir), 22).unwrap(), Rows { lines: vec![], next_offset: 11, cut: true });
}
