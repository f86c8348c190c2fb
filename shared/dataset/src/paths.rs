//! From what a person writes under `paths` to prefixes of `.bin/.idx` pairs.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::indexed::{strip, with_suffix};

/// Files and directories that match a shell glob, sorted by name: byte order, so `_10_` comes before `_2_`.
///
/// # Errors
/// A pattern that is not a glob, or a directory that cannot be read.
pub fn glob(pattern: &str) -> Result<Vec<PathBuf>> {
    let fail = |why: String| Error::Pattern { pattern: pattern.to_owned(), why };
    let entries = glob::glob(pattern).map_err(|error| fail(format!("not a glob: {error}")))?;
    let mut found = Vec::new();
    for entry in entries {
        found.push(entry.map_err(|error| {
            let path = error.path().to_owned();
            Error::Io { action: "list", path, source: error.into() }
        })?);
    }
    found.sort();
    Ok(found)
}

/// Prefixes of the pairs that a path names: itself, or all that its glob matches, each once, sorted by name. A `.bin` or
/// `.idx` at the end is dropped. The original's glob order depends on the file system; this one does not.
///
/// # Errors
/// No match, half a pair, or a directory that cannot be read.
pub fn expand_paths(pattern: &str) -> Result<Vec<PathBuf>> {
    let fail = |why: String| Error::Pattern { pattern: pattern.to_owned(), why };
    let stem = strip(Path::new(pattern));
    let Some(text) = stem.to_str().filter(|text| !text.is_empty()) else {
        return Err(fail("is empty".to_owned()));
    };
    if !text.contains(['*', '?', '[']) {
        if !has(&stem, ".idx") && !has(&stem, ".bin") && stem.is_dir() {
            return Err(fail(
                "is a directory; give the prefix of a .bin/.idx pair in it, or a glob such as DIR/*_document"
                    .to_owned(),
            ));
        }
        whole(&stem)?;
        return Ok(vec![stem]);
    }
    let mut prefixes: Vec<PathBuf> = Vec::new();
    for suffix in [".idx", ".bin"] {
        prefixes.extend(glob(&format!("{text}{suffix}"))?.iter().map(|path| strip(path)));
    }
    prefixes.sort();
    prefixes.dedup();
    if prefixes.is_empty() {
        return Err(fail("matches no .bin/.idx pair; make one with `trainctl data preprocess`".to_owned()));
    }
    prefixes.iter().try_for_each(|prefix| whole(prefix))?;
    Ok(prefixes)
}

fn has(prefix: &Path, suffix: &str) -> bool {
    with_suffix(prefix, suffix).is_file()
}

fn whole(prefix: &Path) -> Result<()> {
    match [".idx", ".bin"].into_iter().find(|suffix| !has(prefix, suffix)) {
        None => Ok(()),
        Some(suffix) => {
            let missing = with_suffix(prefix, suffix).display().to_string();
            Err(Error::MissingPair { prefix: prefix.to_owned(), missing })
        }
    }
}
