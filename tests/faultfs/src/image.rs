//! What is in the file system, twice: as processes see it, and as it would be after a power cut.
//!
//! The rules are POSIX's least, with what every journaling file system adds to it:
//! - fsync of a file makes its bytes and its size durable, not its name.
//! - fsync of a directory makes the names in it durable. A file behind such a name that was never synced itself is empty
//!   after a cut, a directory has no entries, a symlink is whole (nobody can sync one).
//! - A rename is one transaction: after a sync of either directory it has happened in both.
//!
//! Both images share the bytes of files until one of them changes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

/// Number of an inode.
pub type Ino = u64;

/// The root directory.
pub const ROOT: Ino = 1;

type Result<T> = std::result::Result<T, Errno>;

/// What an inode holds.
#[derive(Clone, Debug)]
pub enum Body {
    /// Bytes.
    File(Arc<Vec<u8>>),
    /// Names.
    Directory(BTreeMap<String, Ino>),
    /// Its target.
    Symlink(String),
}

impl Body {
    /// An empty file.
    pub fn file() -> Self {
        Self::File(Arc::default())
    }

    /// An empty directory.
    pub fn directory() -> Self {
        Self::Directory(BTreeMap::new())
    }
}

/// An inode.
#[derive(Clone, Debug)]
pub struct Node {
    /// What it holds.
    pub body: Body,
    /// Permissions.
    pub mode: u32,
    /// Names that it has.
    pub links: u32,
    /// Number of the change that it had last: stands for a time.
    pub changed: u64,
}

/// When a name got its present meaning, and what it meant before.
#[derive(Debug)]
struct Named {
    since: Instant,
    before: Option<Ino>,
    /// Who made it, and sees it at once.
    by: usize,
}

/// A rename between two directories of which neither is synced yet.
#[derive(Debug)]
struct Move {
    ino: Ino,
    from: (Ino, String),
    to: (Ino, String),
}

/// The file system. Unlinked inodes stay until the next cut: handles may be open.
#[derive(Debug)]
pub struct Image {
    live: HashMap<Ino, Node>,
    durable: HashMap<Ino, Node>,
    moves: Vec<Move>,
    named: HashMap<(Ino, String), Named>,
    /// Where an inode was named last, for messages and rules.
    places: HashMap<Ino, (Ino, String)>,
    next: Ino,
    changes: u64,
    /// The mount through which calls come.
    pub actor: usize,
}

impl Default for Image {
    fn default() -> Self {
        let root = Node { body: Body::directory(), mode: 0o755, links: 2, changed: 0 };
        Self {
            live: HashMap::from([(ROOT, root.clone())]),
            durable: HashMap::from([(ROOT, root)]),
            moves: Vec::new(),
            named: HashMap::new(),
            places: HashMap::new(),
            next: ROOT + 1,
            changes: 0,
            actor: 0,
        }
    }
}

impl Image {
    /// An inode; those from before a power cut are stale.
    pub fn node(&self, ino: Ino) -> Result<&Node> {
        self.live.get(&ino).ok_or(Errno::ESTALE)
    }

    fn node_mut(&mut self, ino: Ino) -> Result<&mut Node> {
        self.changes += 1;
        let node = self.live.get_mut(&ino).ok_or(Errno::ESTALE)?;
        node.changed = self.changes;
        Ok(node)
    }

    fn names(&self, dir: Ino) -> Result<&BTreeMap<String, Ino>> {
        match &self.node(dir)?.body {
            Body::Directory(names) => Ok(names),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn names_mut(&mut self, dir: Ino) -> Result<&mut BTreeMap<String, Ino>> {
        match &mut self.node_mut(dir)?.body {
            Body::Directory(names) => Ok(names),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// Sets permissions.
    pub fn set_mode(&mut self, ino: Ino, mode: u32) -> Result<()> {
        self.node_mut(ino)?.mode = mode & 0o7777;
        Ok(())
    }

    /// What a name means. `late`: to an actor that hears of others' new names so much later.
    pub fn lookup(&self, dir: Ino, name: &str, late: Duration) -> Result<Ino> {
        let ino = *self.names(dir)?.get(name).ok_or(Errno::ENOENT)?;
        match self.named.get(&(dir, name.to_owned())) {
            Some(named) if named.by != self.actor && named.since.elapsed() < late => named.before.ok_or(Errno::ENOENT),
            _ => Ok(ino),
        }
    }

    /// The names in a directory, with the same delay.
    pub fn list(&self, dir: Ino, late: Duration) -> Result<Vec<(String, Ino)>> {
        let names = self.names(dir)?.keys();
        Ok(names.filter_map(|name| Some((name.clone(), self.lookup(dir, name, late).ok()?))).collect())
    }

    /// The directory that a directory is in.
    pub fn parent(&self, dir: Ino) -> Ino {
        self.places.get(&dir).map_or(ROOT, |(parent, _)| *parent)
    }

    /// The path of an inode from the root, without a leading slash, as it was named last.
    pub fn path(&self, ino: Ino) -> String {
        match self.places.get(&ino) {
            Some((parent, name)) if *parent == ROOT => name.clone(),
            Some((parent, name)) => format!("{}/{name}", self.path(*parent)),
            None => String::new(),
        }
    }

    /// The path of a name.
    pub fn path_in(&self, dir: Ino, name: &str) -> String {
        let parent = self.path(dir);
        if parent.is_empty() { name.to_owned() } else { format!("{parent}/{name}") }
    }

    fn put(&mut self, dir: Ino, name: &str, ino: Ino) -> Result<()> {
        let before = self.names_mut(dir)?.insert(name.to_owned(), ino);
        self.named.insert((dir, name.to_owned()), Named { since: Instant::now(), before, by: self.actor });
        self.places.insert(ino, (dir, name.to_owned()));
        Ok(())
    }

    fn must_be_free(&self, dir: Ino, name: &str) -> Result<()> {
        if self.names(dir)?.contains_key(name) { Err(Errno::EEXIST) } else { Ok(()) }
    }

    /// A new inode with a name.
    pub fn create(&mut self, dir: Ino, name: &str, body: Body, mode: u32) -> Result<Ino> {
        self.must_be_free(dir, name)?;
        let ino = self.next;
        self.next += 1;
        let links = if matches!(body, Body::Directory(_)) { 2 } else { 1 };
        self.live.insert(ino, Node { body, mode: mode & 0o7777, links, changed: self.changes });
        self.put(dir, name, ino)?;
        Ok(ino)
    }

    /// A second name for a file.
    pub fn link(&mut self, ino: Ino, dir: Ino, name: &str) -> Result<()> {
        self.must_be_free(dir, name)?;
        let node = self.node_mut(ino)?;
        if matches!(node.body, Body::Directory(_)) {
            return Err(Errno::EPERM);
        }
        node.links += 1;
        self.put(dir, name, ino)
    }

    /// Removes a name of a file or symlink.
    pub fn unlink(&mut self, dir: Ino, name: &str) -> Result<()> {
        let ino = *self.names(dir)?.get(name).ok_or(Errno::ENOENT)?;
        if matches!(self.node(ino)?.body, Body::Directory(_)) {
            return Err(Errno::EISDIR);
        }
        self.node_mut(ino)?.links -= 1;
        self.names_mut(dir)?.remove(name);
        Ok(())
    }

    /// Removes an empty directory.
    pub fn rmdir(&mut self, dir: Ino, name: &str) -> Result<()> {
        let ino = *self.names(dir)?.get(name).ok_or(Errno::ENOENT)?;
        if !self.names(ino)?.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.names_mut(dir)?.remove(name);
        Ok(())
    }

    /// Gives an inode another name, which may be taken.
    pub fn rename(&mut self, from: (Ino, &str), to: (Ino, &str)) -> Result<()> {
        let ino = *self.names(from.0)?.get(from.1).ok_or(Errno::ENOENT)?;
        let is_directory = |image: &Self, ino| Ok(matches!(image.node(ino)?.body, Body::Directory(_)));
        match self.names(to.0)?.get(to.1).copied() {
            Some(old) if old == ino => return Ok(()),
            Some(old) => match (is_directory(self, ino)?, is_directory(self, old)?) {
                (true, true) if self.names(old)?.is_empty() => {}
                (true, true) => return Err(Errno::ENOTEMPTY),
                (true, false) => return Err(Errno::ENOTDIR),
                (false, true) => return Err(Errno::EISDIR),
                (false, false) => self.node_mut(old)?.links -= 1,
            },
            None => {}
        }
        self.names_mut(from.0)?.remove(from.1);
        self.put(to.0, to.1, ino)?;
        if from.0 != to.0 {
            let place = |(dir, name): (Ino, &str)| (dir, name.to_owned());
            self.moves.push(Move { ino, from: place(from), to: place(to) });
        }
        Ok(())
    }

    /// Bytes of a file.
    pub fn bytes(&self, ino: Ino) -> Result<&[u8]> {
        match &self.node(ino)?.body {
            Body::File(bytes) => Ok(bytes),
            Body::Directory(_) => Err(Errno::EISDIR),
            Body::Symlink(_) => Err(Errno::EINVAL),
        }
    }

    fn bytes_mut(&mut self, ino: Ino) -> Result<&mut Vec<u8>> {
        match &mut self.node_mut(ino)?.body {
            Body::File(bytes) => Ok(Arc::make_mut(bytes)),
            _ => Err(Errno::EISDIR),
        }
    }

    /// Writes at an offset; a gap is filled with zeros.
    pub fn write(&mut self, ino: Ino, offset: usize, data: &[u8]) -> Result<()> {
        let bytes = self.bytes_mut(ino)?;
        if bytes.len() < offset + data.len() {
            bytes.resize(offset + data.len(), 0);
        }
        bytes[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }

    /// Cuts a file, or fills it up with zeros.
    pub fn truncate(&mut self, ino: Ino, size: usize) -> Result<()> {
        self.bytes_mut(ino)?.resize(size, 0);
        Ok(())
    }

    /// Bytes of all files that have a name.
    pub fn used(&self) -> u64 {
        let size = |node: &Node| match &node.body {
            Body::File(bytes) if node.links > 0 => bytes.len() as u64,
            _ => 0,
        };
        self.live.values().map(size).sum()
    }

    /// fsync of a file or a directory.
    pub fn sync(&mut self, ino: Ino) -> Result<()> {
        let node = self.node(ino)?.clone();
        if let Body::Directory(names) = &node.body {
            for behind in names.values() {
                if !self.durable.contains_key(behind) {
                    let never_synced = self.never_synced(*behind)?;
                    self.durable.insert(*behind, never_synced);
                }
            }
        }
        self.durable.insert(ino, node);
        let (now, later) = self.moves.drain(..).partition(|moved| moved.from.0 == ino || moved.to.0 == ino);
        self.moves = later;
        for moved in now {
            self.complete(moved)?;
        }
        Ok(())
    }

    /// Makes everything durable.
    pub fn sync_all(&mut self) {
        self.durable = self.live.clone();
        self.moves.clear();
    }

    /// Makes some things durable, as the kernel may at any time and in any order: about every other inode, by `seed`.
    pub fn write_back(&mut self, seed: u64) {
        let mut inos: Vec<Ino> = self.live.keys().copied().collect();
        inos.sort_unstable();
        for ino in inos {
            // The finalizer of splitmix64.
            let mut bits = seed.wrapping_add(ino.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            if (bits ^ (bits >> 31)) & 1 == 1 {
                // Every inode of the list is there.
                self.sync(ino).unwrap_or_default();
            }
        }
    }

    /// What a cut leaves of an inode whose name is durable and nothing else.
    fn never_synced(&self, ino: Ino) -> Result<Node> {
        let node = self.node(ino)?;
        let body = match &node.body {
            Body::File(_) => Body::file(),
            Body::Directory(_) => Body::directory(),
            Body::Symlink(target) => Body::Symlink(target.clone()),
        };
        Ok(Node { body, ..node.clone() })
    }

    /// Makes the other half of a rename durable too.
    fn complete(&mut self, moved: Move) -> Result<()> {
        let Move { ino, from, to } = moved;
        if let Some(Body::Directory(names)) = self.durable.get_mut(&from.0).map(|node| &mut node.body)
            && names.get(&from.1) == Some(&ino)
        {
            names.remove(&from.1);
        }
        let still_there = self.names(to.0).is_ok_and(|names| names.get(&to.1) == Some(&ino));
        if still_there {
            if !self.durable.contains_key(&ino) {
                let never_synced = self.never_synced(ino)?;
                self.durable.insert(ino, never_synced);
            }
            if let Some(Body::Directory(names)) = self.durable.get_mut(&to.0).map(|node| &mut node.body) {
                names.insert(to.1, ino);
            }
        }
        Ok(())
    }

    /// The power fails and comes back: what is not durable is gone. Inodes get new numbers, so that what was open is stale.
    pub fn cut(&mut self) {
        let old = std::mem::take(&mut self.durable);
        self.live.clear();
        self.moves.clear();
        self.named.clear();
        self.places.clear();
        let mut numbers = HashMap::from([(ROOT, ROOT)]);
        let mut waiting = vec![ROOT];
        while let Some(was) = waiting.pop() {
            let (Some(node), Some(&ino)) = (old.get(&was), numbers.get(&was)) else { continue };
            let mut node = node.clone();
            node.links = if matches!(node.body, Body::Directory(_)) { 2 } else { 0 };
            if let Body::Directory(names) = &mut node.body {
                for (name, behind) in names {
                    let number = *numbers.entry(*behind).or_insert_with(|| {
                        waiting.push(*behind);
                        self.next += 1;
                        self.next
                    });
                    self.places.insert(number, (ino, name.clone()));
                    *behind = number;
                }
            }
            self.live.insert(ino, node);
        }
        let linked: Vec<Ino> = self.live.values().flat_map(|node| node.behind()).collect();
        for ino in linked {
            if let Some(node) = self.live.get_mut(&ino).filter(|node| !matches!(node.body, Body::Directory(_))) {
                node.links += 1;
            }
        }
        self.next += 1;
        self.durable = self.live.clone();
    }
}

impl Node {
    /// The inodes that a directory names.
    fn behind(&self) -> Vec<Ino> {
        match &self.body {
            Body::Directory(names) => names.values().copied().collect(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
