//! The file system through the kernel.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::time::Duration;

use trainctl_faultfs::FaultFs;

#[test]
fn faultfs_server() {
    trainctl_faultfs::serve_if_asked();
}

fn mounted() -> Option<(tempfile::TempDir, FaultFs)> {
    trainctl_faultfs::have_fuse().then(|| {
        let dir = tempfile::tempdir().unwrap();
        let fs = FaultFs::mount(dir.path(), "faultfs_server").unwrap();
        (dir, fs)
    })
}

fn is_mounted(dir: &Path) -> bool {
    fs::read_to_string("/proc/self/mounts").unwrap().contains(dir.to_str().unwrap())
}

fn write_synced(path: &Path, bytes: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
}

fn sync_dir(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
}

#[test]
fn files_behave_as_on_any_file_system_and_nothing_stays_mounted() {
    let Some((dir, mut fs)) = mounted() else { return };
    let root = dir.path();
    fs::create_dir_all(root.join("a/b")).unwrap();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7) as u8).collect();
    write_synced(&root.join("a/b/f"), &bytes);
    assert_eq!(fs::read(root.join("a/b/f")).unwrap(), bytes);
    assert_eq!(fs.used().unwrap(), 3_000_000);
    fs::hard_link(root.join("a/b/f"), root.join("g")).unwrap();
    assert_eq!(fs::metadata(root.join("g")).unwrap().nlink(), 2);
    symlink("a/b", root.join("l")).unwrap();
    assert_eq!(fs::read_link(root.join("l")).unwrap().to_str().unwrap(), "a/b");
    assert_eq!(fs::read_dir(root.join("l")).unwrap().count(), 1);
    File::options().write(true).open(root.join("g")).unwrap().set_len(5).unwrap();
    assert_eq!(fs::read(root.join("a/b/f")).unwrap(), &bytes[..5]);
    let mut appended = File::options().append(true).open(root.join("g")).unwrap();
    appended.write_all(b"x").unwrap();
    fs::remove_file(root.join("g")).unwrap();
    fs::remove_dir_all(root.join("a")).unwrap();
    assert_eq!(fs::read_dir(root).unwrap().count(), 1);
    assert!(is_mounted(root));
    // A file is still open.
    drop(fs);
    assert!(!is_mounted(root));
    drop(appended);
}

#[test]
fn a_power_cut_keeps_what_was_synced_and_is_seen_at_once() {
    let Some((dir, mut fs)) = mounted() else { return };
    let root = dir.path();
    write_synced(&root.join("kept"), b"old");
    sync_dir(root);
    write_synced(&root.join("no name"), b"x");
    fs::write(root.join("kept"), b"newer").unwrap();
    let mut open = File::open(root.join("kept")).unwrap();
    assert_eq!(fs::read_dir(root).unwrap().count(), 2);
    fs.cut().unwrap();
    assert_eq!(fs::read_dir(root).unwrap().count(), 1);
    assert_eq!(fs::read(root.join("kept")).unwrap(), b"old");
    assert!(!root.join("no name").exists());
    let mut bytes = Vec::new();
    assert!(open.read_to_end(&mut bytes).is_err(), "a handle from before the cut: {bytes:?}");
}

#[test]
fn calls_fail_by_script() {
    let Some((dir, mut fs)) = mounted() else { return };
    let root = dir.path();
    fs.fail("symlink 1 EPERM ").unwrap();
    fs.fail("write 2 ENOSPC full").unwrap();
    assert_eq!(symlink("a", root.join("l")).unwrap_err().kind(), ErrorKind::PermissionDenied);
    let mut file = File::create(root.join("full")).unwrap();
    file.write_all(b"x").unwrap();
    assert_eq!(file.write_all(b"x").unwrap_err().kind(), ErrorKind::StorageFull);
    fs.clear().unwrap();
    file.write_all(b"x").unwrap();
    fs.set_capacity(100).unwrap();
    assert_eq!(fs::write(root.join("big"), [0; 200]).unwrap_err().kind(), ErrorKind::StorageFull);
    fs.set_capacity(0).unwrap();
    fs.fail("change 1 EROFS ").unwrap();
    assert_eq!(fs::create_dir(root.join("d")).unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    assert_eq!(fs::read(root.join("full")).unwrap(), b"xx");
    assert!(fs.changes().unwrap() >= 8);
    assert!(fs.fail("dance").is_err());
}

#[test]
fn a_second_mount_sees_new_names_late() {
    let Some((dir, mut fs)) = mounted() else { return };
    let other = tempfile::tempdir().unwrap();
    fs.mount_again(other.path(), Duration::from_secs(3600)).unwrap();
    fs::write(dir.path().join("new"), b"x").unwrap();
    assert!(dir.path().join("new").exists());
    assert!(!other.path().join("new").exists());
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
    fs::write(other.path().join("own"), b"y").unwrap();
    assert_eq!(fs::read(other.path().join("own")).unwrap(), b"y");
    assert_eq!(fs::read(dir.path().join("own")).unwrap(), b"y");
}

#[test]
fn a_read_is_held_up_until_it_is_released() {
    let Some((dir, mut fs)) = mounted() else { return };
    let root = dir.path().to_owned();
    fs::write(root.join("dead"), b"x").unwrap();
    fs.hold_reads("dead").unwrap();
    let reader = std::thread::spawn({
        let root = root.clone();
        move || fs::read(root.join("dead")).unwrap()
    });
    while fs.held().unwrap() == 0 {
        std::thread::yield_now();
    }
    assert!(!reader.is_finished(), "the read must not end by itself");
    fs.release().unwrap();
    assert_eq!(reader.join().unwrap(), b"x");
}

#[test]
fn a_sync_is_held_up_until_it_is_released_and_holds_up_nothing_else() {
    let Some((dir, mut fs)) = mounted() else { return };
    let root = dir.path().to_owned();
    fs.hold("slow").unwrap();
    let (ended, end) = std::sync::mpsc::channel();
    let writer = std::thread::spawn({
        let root = root.clone();
        move || {
            write_synced(&root.join("slow"), b"x");
            ended.send(()).unwrap();
        }
    });
    while fs.held().unwrap() == 0 {
        std::thread::yield_now();
    }
    write_synced(&root.join("quick"), b"y");
    assert_eq!(fs::read(root.join("slow")).unwrap(), b"x");
    assert!(end.try_recv().is_err(), "the sync must not end by itself");
    fs.release().unwrap();
    end.recv_timeout(Duration::from_secs(10)).unwrap();
    writer.join().unwrap();
    write_synced(&root.join("slow too"), b"z");
    assert_eq!(fs.held().unwrap(), 0);
}
