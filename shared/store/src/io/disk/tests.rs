use super::writer::STAGING_BYTES;
use super::*;

fn disk() -> (tempfile::TempDir, Disk) {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::with_faults(dir.path().join("run"), Arc::default());
    (dir, disk)
}

#[test]
fn keys_cannot_leave_the_directory() {
    let (_dir, disk) = disk();
    for key in ["/etc/passwd", "..", "a/../../b", "./a"] {
        assert!(matches!(disk.path(key), Err(Error::Key { .. })), "{key}");
    }
    assert_eq!(disk.path("").unwrap(), disk.root());
}

#[test]
fn a_view_has_the_bytes_of_a_file_and_there_is_none_beyond_its_end() {
    let (_dir, disk) = disk();
    let bytes: Vec<u8> = (0..50_000u32).map(|i| (i % 251) as u8).collect();
    disk.put_durable("a", &bytes, FailPoint::SHARD_WRITE).unwrap();
    let reader = disk.reader("a").unwrap();
    for (from, len) in [(0, 50_000), (4096, 1), (8192, 10_000), (5000, 45_000)] {
        assert_eq!(reader.view(from as u64, len).unwrap()[..], bytes[from..from + len], "{len} bytes from {from}");
    }
    assert!(reader.view(0, 80_000).is_none() && reader.view(65_536, 10).is_none());
    let error = reader.read_at(0, &mut vec![0; 80_000]).unwrap_err();
    assert!(error.to_string().contains("ends before byte 80000"), "{error}");
}

#[test]
fn exactly_one_of_many_creators_wins() {
    let (_dir, disk) = disk();
    let wins: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u8)
            .map(|i| {
                scope.spawn({
                    let disk = &disk;
                    move || disk.create_if_absent("n/1", &[i], FailPoint::NUMBER_TAKE).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(wins.iter().filter(|won| **won == Created::New).count(), 1);
    let winner = wins.iter().position(|won| *won == Created::New).unwrap() as u8;
    assert_eq!(disk.read("n/1").unwrap(), Some(vec![winner]));
    assert_eq!(disk.list_all("n").unwrap().len(), 1, "no temporary file stays");
}

#[test]
fn symlinks_swap_and_are_relative() {
    let (_dir, disk) = disk();
    assert_eq!(disk.read_link("LATEST").unwrap(), None);
    disk.swap_symlink("LATEST", "a", FailPoint::POINTER_LATEST).unwrap();
    disk.swap_symlink("LATEST", "b", FailPoint::POINTER_LATEST).unwrap();
    assert_eq!(disk.read_link("LATEST").unwrap().as_deref(), Some("b"));
    assert!(disk.remove_file("LATEST", FailPoint::POINTER_LATEST).unwrap());
    assert!(!disk.remove_file("LATEST", FailPoint::POINTER_LATEST).unwrap());
}

#[test]
fn a_small_file_stands_for_a_symlink_and_is_swapped_for_one() {
    let (_dir, disk) = disk();
    disk.put_durable("LATEST", b"a\n", FailPoint::POINTER_LATEST).unwrap();
    assert_eq!(disk.read_link("LATEST").unwrap().as_deref(), Some("a"));
    disk.swap_symlink("LATEST", "b", FailPoint::POINTER_LATEST).unwrap();
    assert_eq!(disk.read_link("LATEST").unwrap().as_deref(), Some("b"));
    disk.make_dir("directory").unwrap();
    assert_eq!(disk.read_link("directory").unwrap(), None);
}

#[test]
fn automodels_text_files_are_read_and_go_with_the_pointer() {
    let (_dir, disk) = disk();
    for text in ["epoch_0_step_9", "/elsewhere/run/epoch_0_step_9/\n"] {
        disk.put_durable("LATEST.txt", text.as_bytes(), FailPoint::POINTER_LATEST).unwrap();
        assert_eq!(disk.read_link("LATEST").unwrap().as_deref(), Some("epoch_0_step_9"));
    }
    disk.swap_symlink("LATEST", "b", FailPoint::POINTER_LATEST).unwrap();
    assert_eq!(disk.list_all("").unwrap().len(), 1, "one form is enough");
    disk.put_durable("LATEST.txt", b"a", FailPoint::POINTER_LATEST).unwrap();
    assert!(disk.remove_pointer("LATEST", FailPoint::POINTER_LATEST).unwrap());
    assert_eq!(disk.read_link("LATEST").unwrap(), None);
    assert!(!disk.remove_pointer("LATEST", FailPoint::POINTER_LATEST).unwrap());
}

#[test]
fn where_hard_links_are_refused_the_first_creator_still_wins() {
    let (_dir, disk) = disk();
    disk.make_dir("").unwrap();
    let path = disk.path("1").unwrap();
    assert_eq!(disk.create_exclusive(&path, b"a", FailPoint::NUMBER_TAKE).unwrap(), Created::New);
    assert_eq!(disk.create_exclusive(&path, b"b", FailPoint::NUMBER_TAKE).unwrap(), Created::Exists);
    assert_eq!(disk.read("1").unwrap().as_deref(), Some(&b"a"[..]));
    assert!(links_refused(&io::Error::from_raw_os_error(nix::errno::Errno::EOPNOTSUPP as i32)));
    assert!(!links_refused(&io::Error::from_raw_os_error(nix::errno::Errno::EIO as i32)));
}

#[test]
fn a_failed_write_leaves_the_old_bytes_and_no_temporary_file() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::parse("holder.beat.temp:2:eio,numbers.take.temp:1:eio,pointer.latest.temp:1:eio").unwrap();
    let disk = Disk::with_faults(dir.path(), Arc::new(faults));
    disk.put_durable("h", b"old", FailPoint::HOLDER_BEAT).unwrap();
    assert!(disk.put_durable("h", b"new", FailPoint::HOLDER_BEAT).is_err());
    assert!(disk.create_if_absent("n", b"1", FailPoint::NUMBER_TAKE).is_err());
    assert!(disk.swap_symlink("LATEST", "h", FailPoint::POINTER_LATEST).is_err());
    assert_eq!(disk.read("h").unwrap().as_deref(), Some(&b"old"[..]));
    assert_eq!(disk.list_all("").unwrap().len(), 1);
}

#[test]
fn sweeping_removes_only_the_temporary_files_of_its_key() {
    let (_dir, disk) = disk();
    disk.make_dir("").unwrap();
    for name in [".tmp-LATEST-1-00000000-0", ".tmp-other-1-00000000-0", "LATEST"] {
        fs::write(disk.path(name).unwrap(), b"").unwrap();
    }
    disk.sweep("LATEST", FailPoint::POINTER_SWEEP).unwrap();
    let names: Vec<_> = disk.list_all("").unwrap().into_iter().map(|e| e.name).collect();
    assert_eq!(names, [".tmp-other-1-00000000-0", "LATEST"]);
}

/// Bytes of which no two blocks are alike.
fn bytes(size: usize) -> Vec<u8> {
    (0..size.div_ceil(8) as u64)
        .flat_map(|word| word.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes())
        .take(size)
        .collect()
}

#[test]
fn files_of_any_size_and_in_any_pieces_hold_what_was_written_past_the_cache_or_not() {
    let (_dir, disk) = disk();
    for size in [0, 1, STAGING_BYTES - 1, STAGING_BYTES, STAGING_BYTES + 1, 2 * STAGING_BYTES + 4097, 3 * STAGING_BYTES]
    {
        for piece in [4097, 3 << 20, 64 << 20] {
            let bytes = bytes(size);
            let mut writer = disk.writer("file", FailPoint::SHARD_WRITE).unwrap();
            bytes.chunks(piece).for_each(|piece| writer.write(piece).unwrap());
            writer.finish().unwrap();
            assert!(disk.read("file").unwrap().unwrap() == bytes, "{size} bytes in pieces of {piece}");
            disk.read_ahead("file").unwrap();
        }
    }
}

#[test]
fn large_files_bypass_the_cache_of_a_local_disk_and_their_ends_do_not() {
    let (_dir, disk) = disk();
    let mut writer = disk.writer("file", FailPoint::SHARD_WRITE).unwrap();
    writer.write(&bytes(STAGING_BYTES - 1)).unwrap();
    assert!(!writer.bypasses_cache());
    writer.write(&bytes(2)).unwrap();
    assert_eq!(writer.bypasses_cache(), writer.is_on_local_disk());
}

#[test]
fn where_a_disk_refuses_to_be_written_past_the_cache_the_file_is_written_through_it() {
    let (_dir, disk) = disk();
    let mut writer = disk.writer("file", FailPoint::SHARD_WRITE).unwrap();
    // What follows begins inside a block, which no disk takes.
    writer.write_unaligned(b"x");
    let bytes = bytes(2 * STAGING_BYTES + 1);
    writer.write(&bytes).unwrap();
    assert!(!writer.bypasses_cache());
    writer.finish().unwrap();
    let found = disk.read("file").unwrap().unwrap();
    assert!(found[0] == b'x' && found[1..] == bytes);
}
