//! S1–S4 and P5. Kills of the real daemon are in `tests/`.

use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;

use trainctl_proto::v1::{Fence, Finished, SaveFailed, SaveKind, SaveSkipped, ShardsDurable, TrainRow, TrainerExit};

use super::*;

const BOOT: &str = "boot-1";

fn at(ms: u64) -> Now {
    Now { monotonic: Duration::from_millis(ms), wall_ms: 1_000_000 + ms }
}

fn of(report: Report) -> RankReport {
    let fence = Fence { job: "j".to_owned(), generation: 7, term: 5 };
    RankReport { fence: Some(fence), rank: 3, report: Some(report) }
}

fn row(step: u64) -> RankReport {
    let timestamp = "2026-11-29T22:31:14.123Z".to_owned();
    of(Report::TrainRow(TrainRow { step, timestamp, loss: 3.25, ..TrainRow::default() }))
}

struct Place {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("spool");
    Place { _dir: dir, path }
}

fn open(place: &Place) -> Spool {
    Spool::open(&place.path, "id-1", BOOT, at(0)).unwrap()
}

fn all(spool: &mut Spool) -> Vec<(u64, RankReport)> {
    let records = spool.read(0, usize::MAX, usize::MAX, at(0)).unwrap();
    records.into_iter().map(|record| (record.seq, record.report)).collect()
}

#[test]
fn records_survive_a_reopening_in_order_and_keep_their_numbers() {
    let place = place();
    let mut spool = open(&place);
    for step in 0..10 {
        assert_eq!(spool.append(&row(step), at(step)).unwrap(), step + 1);
    }
    spool.ack("id-1", 4, at(20)).unwrap();
    drop(spool);
    let mut spool = Spool::open(&place.path, "id-2", BOOT, at(0)).unwrap();
    assert_eq!(spool.id(), "id-1", "the id belongs to the file");
    assert_eq!((spool.acked(), spool.len()), (0, 10), "a small acknowledgement is not worth a write");
    spool.ack("id-1", 10, at(20)).unwrap();
    drop(spool);
    let mut spool = open(&place);
    assert_eq!((spool.acked(), spool.len()), (10, 0));
    assert_eq!(spool.append(&row(10), at(0)).unwrap(), 11);
    assert_eq!(all(&mut spool), [(11, row(10))]);
}

#[test]
fn the_age_counts_from_the_append() {
    let place = place();
    let mut spool = open(&place);
    spool.append(&row(0), at(1_000)).unwrap();
    let age = |spool: &mut Spool, now| spool.read(0, 1, 1, now).unwrap()[0].age;
    assert_eq!(age(&mut spool, at(3_500)), Duration::from_millis(2_500));
    drop(spool);
    // A successor's monotonic clock has another origin: the wall clock bridges the two.
    let mut spool = open(&place);
    assert_eq!(age(&mut spool, Now { monotonic: Duration::ZERO, wall_ms: 1_009_000 }), Duration::from_secs(8));
}

/// S2, every possible tear of the last record.
#[test]
fn a_torn_tail_is_cut_at_any_byte_and_its_number_given_again() {
    let place = place();
    let mut spool = open(&place);
    spool.append(&row(0), at(0)).unwrap();
    let whole = std::fs::metadata(&place.path).unwrap().len();
    spool.append(&row(1), at(0)).unwrap();
    drop(spool);
    let bytes = std::fs::read(&place.path).unwrap();
    for length in whole..bytes.len() as u64 {
        std::fs::write(&place.path, &bytes[..usize::try_from(length).unwrap()]).unwrap();
        let mut spool = open(&place);
        assert_eq!(all(&mut spool), [(1, row(0))], "{length} bytes");
        assert_eq!(spool.append(&row(9), at(0)).unwrap(), 2, "the torn record was never sent");
        drop(spool);
        assert_eq!(all(&mut open(&place)), [(1, row(0)), (2, row(9))], "{length} bytes");
    }
}

/// S1, S2: what was lost may have been sent, so its numbers are not given again.
#[test]
fn numbers_jump_after_damage_and_after_a_reboot() {
    let place = place();
    let mut spool = open(&place);
    for step in 0..3 {
        spool.append(&row(step), at(0)).unwrap();
    }
    let damaged_at = spool.pending[1].offset + 20;
    drop(spool);
    let mut file = std::fs::OpenOptions::new().write(true).open(&place.path).unwrap();
    file.seek(SeekFrom::Start(damaged_at)).unwrap();
    file.write_all(&[0xff]).unwrap();
    let mut spool = open(&place);
    assert_eq!(all(&mut spool), [(1, row(0))]);
    assert_eq!(spool.last_seq(), 1, "nobody waits for a number in the gap");
    let after_damage = spool.append(&row(5), at(0)).unwrap();
    assert!(after_damage > GAP, "{after_damage}");
    drop(spool);
    let mut spool = Spool::open(&place.path, "id-2", "boot-2", at(0)).unwrap();
    let after_boot = spool.append(&row(6), at(0)).unwrap();
    assert!(after_boot > after_damage + GAP, "{after_boot}");
    spool.ack("id-1", after_boot, at(0)).unwrap();
    assert!(spool.is_empty());
}

#[test]
fn a_spool_with_a_damaged_header_is_set_aside_and_a_new_id_begins() {
    let place = place();
    std::fs::write(&place.path, b"something else").unwrap();
    let spool = Spool::open(&place.path, "id-9", BOOT, at(0)).unwrap();
    assert_eq!((spool.id(), spool.last_seq()), ("id-9", 0));
    assert_eq!(std::fs::read(place.path.with_extension("damaged")).unwrap(), b"something else");
}

/// J3 for the spool: an acknowledgement of another spool, or an old one, changes nothing.
#[test]
fn foreign_and_old_acknowledgements_change_nothing() {
    let place = place();
    let mut spool = open(&place);
    for step in 0..3 {
        spool.append(&row(step), at(0)).unwrap();
    }
    spool.ack("another", 3, at(0)).unwrap();
    assert_eq!(spool.len(), 3);
    spool.ack("id-1", 2, at(0)).unwrap();
    spool.ack("id-1", 1, at(0)).unwrap();
    assert_eq!((spool.acked(), spool.len()), (2, 1));
    spool.ack("id-1", 1_000, at(0)).unwrap();
    assert_eq!((spool.acked(), spool.len()), (3, 0), "more than there is");
}

/// P5: 100,000 rows are held; S3: an acknowledged spool gives its disk back; what stays is read in batches.
#[test]
fn a_hundred_thousand_rows_are_held_and_then_given_back() {
    let place = place();
    let mut spool = open(&place);
    for step in 0..100_000 {
        spool.append(&row(step), at(0)).unwrap();
    }
    drop(spool);
    let mut spool = open(&place);
    assert_eq!(spool.len(), 100_000);
    assert!(std::fs::metadata(&place.path).unwrap().len() > TRUNCATE_ABOVE);
    let mut after = 0;
    let mut step = 0;
    while after < spool.last_seq() {
        let batch = spool.read(after, 256, 1 << 20, at(0)).unwrap();
        assert!(!batch.is_empty() && batch.len() <= 256);
        for record in batch {
            assert_eq!(record.report, row(step));
            step += 1;
            after = record.seq;
        }
        spool.ack("id-1", after, at(0)).unwrap();
    }
    assert_eq!(step, 100_000);
    assert!(std::fs::metadata(&place.path).unwrap().len() < 1_000);
    drop(spool);
    let mut spool = open(&place);
    assert_eq!((spool.id(), spool.last_seq(), spool.acked()), ("id-1", 100_000, 100_000));
    assert_eq!(spool.append(&row(0), at(0)).unwrap(), 100_001);
}

#[test]
fn the_last_exit_is_known_after_a_reopening() {
    let place = place();
    let mut spool = open(&place);
    spool.append(&of(Report::Exited(TrainerExit::default())), at(0)).unwrap();
    spool.append(&row(1), at(0)).unwrap();
    drop(spool);
    let spool = open(&place);
    assert!(spool.knows_exit("j", 7, 3));
    assert!(!spool.knows_exit("j", 7, 2) && !spool.knows_exit("j", 8, 3) && !spool.knows_exit("k", 7, 3));
}

fn shards(step: u64) -> RankReport {
    of(Report::Shards(ShardsDurable { step, kind: SaveKind::Full.into(), ..ShardsDurable::default() }))
}

fn save(generation: u64, kind: SaveKind, step: u64) -> SaveOf {
    SaveOf { job: "j".to_owned(), generation, kind: kind.into(), step }
}

#[test]
fn s4_what_was_not_read_can_be_withdrawn_and_is_never_sent() {
    let place = place();
    let mut spool = open(&place);
    for report in [shards(9), row(10), shards(19), shards(29)] {
        spool.append(&report, at(0)).unwrap();
    }
    spool.read(0, 1, usize::MAX, at(0)).unwrap();
    let others = [save(7, SaveKind::Full, 9), save(6, SaveKind::Full, 19), save(7, SaveKind::Weights, 19)];
    assert_eq!(spool.withdraw(&others, at(0)).unwrap(), [], "it may have been sent; another generation; another kind");
    let wanted = save(7, SaveKind::Full, 19);
    assert_eq!(spool.withdraw(std::slice::from_ref(&wanted), at(0)).unwrap(), std::slice::from_ref(&wanted));
    assert_eq!(spool.withdraw(&[wanted], at(0)).unwrap(), [], "once");
    let left = [(1, shards(9)), (2, row(10)), (4, shards(29))];
    assert_eq!((all(&mut spool), spool.last_seq()), (left.to_vec(), 4));
    drop(spool);
    let mut spool = open(&place);
    assert_eq!(all(&mut spool), left, "a successor does not send it either");
    assert_eq!(spool.append(&row(30), at(0)).unwrap(), 5);
}

#[test]
fn s4_what_a_predecessor_may_have_sent_is_not_withdrawn() {
    let place = place();
    let mut spool = open(&place);
    spool.append(&shards(9), at(0)).unwrap();
    drop(spool);
    let mut spool = open(&place);
    assert_eq!(spool.withdraw(&[save(7, SaveKind::Full, 9)], at(0)).unwrap(), []);
    assert_eq!(all(&mut spool), [(1, shards(9))]);
}

#[test]
fn what_ends_or_commits_is_synced_and_rows_are_not() {
    assert!(must_sync(&of(Report::Finished(Finished::default()))));
    assert!(must_sync(&of(Report::Exited(TrainerExit::default()))));
    assert!(!is_spooled(&of(Report::Formed(trainctl_proto::v1::Formed {}))));
    assert!(!must_sync(&row(0)) && is_spooled(&row(0)));
    assert!(
        is_spooled(&of(Report::BurnIn(trainctl_proto::v1::BurnIn::default()))),
        "a device that is wrong is not forgotten"
    );
    assert!(is_spooled(&of(Report::SaveFailed(SaveFailed::default()))));
    assert!(is_spooled(&of(Report::SaveSkipped(SaveSkipped::default()))));
}
