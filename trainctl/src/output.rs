//! Data goes to stdout, everything else to stderr. A reader that closed the pipe is not an error.

use std::io::Write;

use clap::{Args, ValueEnum};
use serde::Serialize;
pub(crate) use trainctl_store::admission::people;

use crate::exit::Failure;

/// How data is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs: one JSON document, or one object a line where rows are streamed.
    Json,
}

/// `--output`, on every command that reads.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OutputArgs {
    /// How to print data
    #[arg(long, value_enum, default_value_t)]
    pub(crate) output: Format,
}

impl OutputArgs {
    pub(crate) fn is_json(self) -> bool {
        self.output == Format::Json
    }
}

/// Prints one line of data.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    bytes(format!("{text}\n").as_bytes())
}

/// Prints bytes of data.
pub(crate) fn bytes(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Err(Failure { exit: crate::exit::Exit::Ok, message: String::new() })
        }
        Err(error) => Err(Failure::internal(format!("write to stdout: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// Prints one JSON document on one line.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::internal(format!("write JSON: {error}")))?;
    line(&text)
}

/// Tells the person something that is not data.
pub(crate) fn note(text: &str) {
    // stderr is gone only when nobody reads it any more.
    writeln!(std::io::stderr().lock(), "{text}").unwrap_or_default();
}

/// Columns padded to their widest cell.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header.get(column).map_or(0, |name| name.len())]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let format = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells.zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let head = format(&mut header.iter().copied());
    let body = rows.iter().map(|row| format(&mut row.iter().map(String::as_str)));
    std::iter::once(head).chain(body).collect::<Vec<_>>().join("\n")
}

/// "after 1 step", "after 1,000 steps".
pub(crate) fn steps(count: u64) -> String {
    if count == 1 { "1 step".to_owned() } else { format!("{} steps", people(count)) }
}

/// A size as people write it: 1.5 MiB.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut scaled = bytes;
    let mut rest = 0;
    while scaled >= 1024 && unit + 1 < UNITS.len() {
        (scaled, rest) = (scaled / 1024, scaled % 1024);
        unit += 1;
    }
    if unit == 0 { format!("{scaled} B") } else { format!("{scaled}.{} {}", rest * 10 / 1024, UNITS[unit]) }
}

/// A moment as people read it, in UTC.
pub(crate) fn moment(unix_ms: u64) -> String {
    let at = i64::try_from(unix_ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    at.map_or_else(|| "?".to_owned(), |at| at.strftime("%Y-%m-%d %H:%M:%SZ").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_sizes_read_as_people_write_them() {
        assert_eq!([0, 999, 1000, 1_234_567].map(people), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([steps(1), steps(1000)], ["1 step", "1,000 steps"]);
        assert_eq!([0, 1023, 1536, 5 << 30].map(size), ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]);
        assert_eq!(moment(0), "1970-01-01 00:00:00Z");
    }

    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["a".to_owned(), "1".to_owned()], vec!["longer".to_owned(), String::new()]];
        assert_eq!(table(&["JOB", "STEP"], &rows), "JOB     STEP\na       1\nlonger");
    }
}
