//! Which calls fail, and how: the part of the file system that a test writes.

use std::fmt;
use std::str::FromStr;

use nix::errno::Errno;

/// A call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A new file.
    Create,
    /// A new directory.
    Mkdir,
    /// A new symlink.
    Symlink,
    /// A hard link.
    Link,
    /// A file's or symlink's end.
    Unlink,
    /// A directory's end.
    Rmdir,
    /// Another name; rules are held against the new one.
    Rename,
    /// Bytes.
    Write,
    /// Another size.
    Truncate,
    /// A sync of a file.
    Fsync,
    /// A sync of a directory.
    Fsyncdir,
    /// Reading bytes.
    Read,
}

const CALLS: [(Call, &str); 12] = [
    (Call::Create, "create"),
    (Call::Mkdir, "mkdir"),
    (Call::Symlink, "symlink"),
    (Call::Link, "link"),
    (Call::Unlink, "unlink"),
    (Call::Rmdir, "rmdir"),
    (Call::Rename, "rename"),
    (Call::Write, "write"),
    (Call::Truncate, "truncate"),
    (Call::Fsync, "fsync"),
    (Call::Fsyncdir, "fsyncdir"),
    (Call::Read, "read"),
];

/// Any call but reads.
const CHANGE: &str = "change";

/// The errors that a test can ask for.
const ERRORS: [(Errno, &str); 6] = [
    (Errno::EIO, "EIO"),
    (Errno::ENOSPC, "ENOSPC"),
    (Errno::EDQUOT, "EDQUOT"),
    (Errno::EROFS, "EROFS"),
    (Errno::EPERM, "EPERM"),
    (Errno::EOPNOTSUPP, "EOPNOTSUPP"),
];

/// From the `nth` matching call on, all fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// `None`: any that changes something.
    pub call: Option<Call>,
    /// What the path must contain.
    pub path: String,
    /// From which one on, counted from 1.
    pub nth: u64,
    /// How they fail.
    pub errno: Errno,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call =
            self.call.and_then(|call| CALLS.iter().find(|(found, _)| *found == call)).map_or(CHANGE, |(_, name)| name);
        let errno = ERRORS.iter().find(|(found, _)| *found == self.errno).map_or("EIO", |(_, name)| name);
        write!(f, "{call} {} {errno} {}", self.nth, self.path)
    }
}

impl FromStr for Rule {
    type Err = String;

    /// `<call> <nth> <errno> <part of the path>`; the last may be empty and may have blanks.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is not `<call> <nth> <errno> <part of the path>`");
        let mut words = text.splitn(4, ' ');
        let mut word = || words.next().ok_or_else(bad);
        let call = match word()? {
            CHANGE => None,
            name => Some(CALLS.iter().find(|(_, found)| *found == name).ok_or_else(bad)?.0),
        };
        let nth = word()?.parse().ok().filter(|nth| *nth > 0).ok_or_else(bad)?;
        let errno = word()?;
        let errno = ERRORS.iter().find(|(_, found)| *found == errno).ok_or_else(bad)?.0;
        Ok(Self { call, path: words.next().unwrap_or_default().to_owned(), nth, errno })
    }
}

/// All rules, and what they have seen.
#[derive(Debug, Default)]
pub struct Script {
    rules: Vec<(Rule, u64)>,
    changes: u64,
}

impl Script {
    /// One more rule.
    pub fn add(&mut self, rule: Rule) {
        self.rules.push((rule, 0));
    }

    /// Nothing fails any more.
    pub fn clear(&mut self) {
        self.rules.clear();
    }

    /// How many calls changed something, or tried to.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// A call comes.
    ///
    /// # Errors
    /// The error that it is to be answered with.
    pub fn pass(&mut self, call: Call, path: &str) -> Result<(), Errno> {
        let reads = call == Call::Read;
        self.changes += u64::from(!reads);
        let mut answer = Ok(());
        for (rule, seen) in &mut self.rules {
            let is_meant = rule.call.map_or(!reads, |meant| meant == call) && path.contains(&rule.path);
            *seen += u64::from(is_meant);
            if is_meant && *seen >= rule.nth && answer.is_ok() {
                answer = Err(rule.errno);
            }
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_fail_from_the_nth_matching_one_on() {
        let mut script = Script::default();
        script.add("write 2 ENOSPC model/".parse().unwrap());
        assert_eq!(script.pass(Call::Write, "a/model/x"), Ok(()));
        assert_eq!(script.pass(Call::Write, "other"), Ok(()));
        assert_eq!(script.pass(Call::Create, "a/model/x"), Ok(()));
        assert_eq!(script.pass(Call::Write, "a/model/y"), Err(Errno::ENOSPC));
        assert_eq!(script.pass(Call::Write, "a/model/y"), Err(Errno::ENOSPC));
        script.add("change 1 EROFS ".parse().unwrap());
        assert_eq!(script.pass(Call::Rename, "z"), Err(Errno::EROFS));
        assert_eq!(script.pass(Call::Read, "z"), Ok(()));
        assert_eq!(script.changes(), 6);
        script.clear();
        assert_eq!(script.pass(Call::Write, "a/model/y"), Ok(()));
    }

    #[test]
    fn rules_have_one_spelling() {
        for text in ["change 1 EROFS ", "fsync 12 EIO a b/c", "link 1 EPERM "] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
        for text in ["", "write", "write 0 EIO x", "dance 1 EIO x", "write 1 EFUN x"] {
            assert!(text.parse::<Rule>().is_err(), "{text}");
        }
    }
}
