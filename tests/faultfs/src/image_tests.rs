use super::*;

const NOW: Duration = Duration::ZERO;

fn file(image: &mut Image, dir: Ino, name: &str, bytes: &[u8]) -> Ino {
    let ino = image.create(dir, name, Body::file(), 0o644).unwrap();
    image.write(ino, 0, bytes).unwrap();
    ino
}

fn directory(image: &mut Image, dir: Ino, name: &str) -> Ino {
    image.create(dir, name, Body::directory(), 0o755).unwrap()
}

/// Every path with its bytes or target; a directory ends in a slash.
fn paths(image: &Image) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut waiting = vec![(ROOT, String::new())];
    while let Some((dir, prefix)) = waiting.pop() {
        for (name, ino) in image.list(dir, NOW).unwrap() {
            match &image.node(ino).unwrap().body {
                Body::Directory(_) => {
                    found.push((format!("{prefix}{name}/"), String::new()));
                    waiting.push((ino, format!("{prefix}{name}/")));
                }
                Body::File(bytes) => {
                    found.push((format!("{prefix}{name}"), String::from_utf8_lossy(bytes).into_owned()))
                }
                Body::Symlink(target) => found.push((format!("{prefix}{name}"), format!("-> {target}"))),
            }
        }
    }
    found.sort();
    found
}

fn after_cut(mut image: Image) -> Vec<(String, String)> {
    image.cut();
    paths(&image)
}

fn named(paths: &[(&str, &str)]) -> Vec<(String, String)> {
    paths.iter().map(|(path, what)| ((*path).to_owned(), (*what).to_owned())).collect()
}

#[test]
fn a_file_needs_its_own_sync_and_its_directorys() {
    let mut image = Image::default();
    let both = file(&mut image, ROOT, "both", b"x");
    file(&mut image, ROOT, "name only", b"x");
    image.sync(both).unwrap();
    image.sync(ROOT).unwrap();
    let bytes_only = file(&mut image, ROOT, "bytes only", b"x");
    image.sync(bytes_only).unwrap();
    image.write(both, 1, b"yz").unwrap();
    assert_eq!(after_cut(image), named(&[("both", "x"), ("name only", "")]));
}

#[test]
fn a_removed_name_is_back_unless_the_directory_was_synced() {
    let mut image = Image::default();
    for name in ["a", "b"] {
        let ino = file(&mut image, ROOT, name, b"x");
        image.sync(ino).unwrap();
    }
    image.sync(ROOT).unwrap();
    image.unlink(ROOT, "a").unwrap();
    image.sync(ROOT).unwrap();
    image.unlink(ROOT, "b").unwrap();
    assert_eq!(paths(&image), []);
    assert_eq!(after_cut(image), named(&[("b", "x")]));
}

#[test]
fn a_directory_is_there_when_its_parent_was_synced_and_its_names_when_it_was_itself() {
    let mut image = Image::default();
    let outer = directory(&mut image, ROOT, "outer");
    let inner = directory(&mut image, outer, "inner");
    let ino = file(&mut image, inner, "f", b"x");
    image.sync(ino).unwrap();
    image.sync(inner).unwrap();
    image.sync(ROOT).unwrap();
    assert_eq!(paths(&image), named(&[("outer/", ""), ("outer/inner/", ""), ("outer/inner/f", "x")]));
    assert_eq!(after_cut(image), named(&[("outer/", "")]));
}

#[test]
fn a_swapped_symlink_is_the_old_one_or_the_new_one() {
    let mut image = Image::default();
    image.create(ROOT, "LATEST", Body::Symlink("a".into()), 0o777).unwrap();
    image.sync(ROOT).unwrap();
    image.create(ROOT, "temp", Body::Symlink("b".into()), 0o777).unwrap();
    image.rename((ROOT, "temp"), (ROOT, "LATEST")).unwrap();
    assert_eq!(paths(&image), named(&[("LATEST", "-> b")]));
    let mut synced = Image::default();
    std::mem::swap(&mut synced, &mut image);
    synced.cut();
    assert_eq!(paths(&synced), named(&[("LATEST", "-> a")]));
    synced.create(ROOT, "temp", Body::Symlink("b".into()), 0o777).unwrap();
    synced.rename((ROOT, "temp"), (ROOT, "LATEST")).unwrap();
    synced.sync(ROOT).unwrap();
    assert_eq!(after_cut(synced), named(&[("LATEST", "-> b")]));
}

#[test]
fn a_rename_between_directories_has_happened_in_both_or_in_neither() {
    for synced in [None, Some("from"), Some("to")] {
        let mut image = Image::default();
        let (from, to) = (directory(&mut image, ROOT, "from"), directory(&mut image, ROOT, "to"));
        let moved = directory(&mut image, from, "d");
        let ino = file(&mut image, moved, "f", b"x");
        for ino in [ino, moved, from, to, ROOT] {
            image.sync(ino).unwrap();
        }
        image.rename((from, "d"), (to, "d")).unwrap();
        match synced {
            Some("from") => image.sync(from).unwrap(),
            Some(_) => image.sync(to).unwrap(),
            None => {}
        }
        let place = if synced.is_some() { "to" } else { "from" };
        let wanted = [("from/", ""), (&format!("{place}/d/"), ""), (&format!("{place}/d/f"), "x"), ("to/", "")];
        let mut wanted = named(&wanted);
        wanted.sort();
        assert_eq!(after_cut(image), wanted, "{synced:?}");
    }
}

#[test]
fn what_was_open_before_a_cut_is_stale() {
    let mut image = Image::default();
    let ino = file(&mut image, ROOT, "f", b"x");
    image.sync(ino).unwrap();
    image.sync(ROOT).unwrap();
    image.cut();
    assert_eq!(image.write(ino, 0, b"y"), Err(Errno::ESTALE));
    let again = image.lookup(ROOT, "f", NOW).unwrap();
    assert_eq!((image.bytes(again).unwrap(), image.node(again).unwrap().links), (&b"x"[..], 1));
}

#[test]
fn a_late_process_sees_new_names_later_and_until_then_what_they_meant_before() {
    let mut image = Image::default();
    let late = Duration::from_secs(3600);
    let old = file(&mut image, ROOT, "old", b"x");
    image.sync(ROOT).unwrap();
    image.cut();
    file(&mut image, ROOT, "new", b"y");
    assert!(image.lookup(ROOT, "new", late).is_ok(), "whoever made it sees it");
    image.actor = 1;
    assert_eq!(image.lookup(ROOT, "new", late), Err(Errno::ENOENT));
    assert_eq!(image.list(ROOT, late).unwrap().len(), 1);
    assert_eq!(image.list(ROOT, NOW).unwrap().len(), 2);
    image.actor = 0;
    image.rename((ROOT, "new"), (ROOT, "old")).unwrap();
    image.actor = 1;
    let seen_late = image.lookup(ROOT, "old", late).unwrap();
    assert_ne!(seen_late, image.lookup(ROOT, "old", NOW).unwrap());
    assert_ne!(seen_late, old, "a cut gave it another number");
}

#[test]
fn the_kernel_may_write_back_anything_before_a_cut() {
    let survivors = |seed: u64| {
        let mut image = Image::default();
        let dir = directory(&mut image, ROOT, "d");
        file(&mut image, dir, "f", b"x");
        image.write_back(seed);
        after_cut(image)
    };
    let mut found: Vec<_> = (0..64).map(survivors).collect();
    assert_eq!(survivors(3), found[3], "the same seed does the same");
    found.sort();
    found.dedup();
    let (none, dir) = (named(&[]), named(&[("d/", "")]));
    let (empty, whole) = (named(&[("d/", ""), ("d/f", "")]), named(&[("d/", ""), ("d/f", "x")]));
    assert_eq!(found, [none, dir, empty, whole]);
}

#[test]
fn names_obey_posix() {
    let mut image = Image::default();
    let dir = directory(&mut image, ROOT, "d");
    let ino = file(&mut image, dir, "f", b"x");
    assert_eq!(image.create(dir, "f", Body::file(), 0), Err(Errno::EEXIST));
    assert_eq!(image.rmdir(ROOT, "d"), Err(Errno::ENOTEMPTY));
    assert_eq!(image.unlink(ROOT, "d"), Err(Errno::EISDIR));
    assert_eq!(image.link(dir, ROOT, "e"), Err(Errno::EPERM));
    assert_eq!(image.rename((dir, "f"), (ROOT, "d")), Err(Errno::EISDIR));
    image.link(ino, ROOT, "f").unwrap();
    assert_eq!(image.node(ino).unwrap().links, 2);
    image.unlink(dir, "f").unwrap();
    image.rmdir(ROOT, "d").unwrap();
    assert_eq!((image.node(ino).unwrap().links, image.used()), (1, 1));
}
