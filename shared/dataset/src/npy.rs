//! Arrays of integers in numpy's `.npy` format, version 1.0, as `numpy.save` writes them byte for byte (D1).

use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::durable;
use crate::error::{Error, Result};
use crate::map::{Map, bytes_at};

const MAGIC: &[u8; 8] = b"\x93NUMPY\x01\x00";
/// numpy leaves room for the first dimension to grow to this many digits (since 1.23).
const GROWTH_DIGITS: usize = 21;
const ALIGN: usize = 64;

/// An array of integers, in memory or mapped from a `.npy` file.
#[derive(Debug)]
pub enum Ints {
    /// `<i2`
    I16(Vec<i16>),
    /// `<i4`
    I32(Vec<i32>),
    /// `<u4`
    U32(Vec<u32>),
    /// `<i8`
    I64(Vec<i64>),
    /// A file.
    Mapped(Mapped),
}

/// Values that lie in a mapped file.
#[derive(Debug)]
pub struct Mapped {
    map: Map,
    offset: usize,
    len: usize,
    descr: Descr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Descr {
    I16,
    I32,
    U32,
    I64,
}

impl Descr {
    const ALL: [Self; 4] = [Self::I16, Self::I32, Self::U32, Self::I64];

    fn text(self) -> &'static str {
        match self {
            Self::I16 => "<i2",
            Self::I32 => "<i4",
            Self::U32 => "<u4",
            Self::I64 => "<i8",
        }
    }

    fn size(self) -> usize {
        match self {
            Self::I16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
        }
    }
}

impl Ints {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::I16(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::Mapped(mapped) => mapped.len,
        }
    }

    /// Whether there is no value.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One value; `None` beyond the end.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<i64> {
        match self {
            Self::I16(values) => values.get(index).map(|value| i64::from(*value)),
            Self::I32(values) => values.get(index).map(|value| i64::from(*value)),
            Self::U32(values) => values.get(index).map(|value| i64::from(*value)),
            Self::I64(values) => values.get(index).copied(),
            Self::Mapped(mapped) => mapped.get(index),
        }
    }

    /// All values.
    pub fn iter(&self) -> impl Iterator<Item = i64> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    fn descr(&self) -> Descr {
        match self {
            Self::I16(_) => Descr::I16,
            Self::I32(_) => Descr::I32,
            Self::U32(_) => Descr::U32,
            Self::I64(_) => Descr::I64,
            Self::Mapped(mapped) => mapped.descr,
        }
    }

    /// Writes a `.npy` file whole or not at all, as rows of `columns` values (1 = one dimension). The directory still needs a sync.
    ///
    /// # Errors
    /// A failed write.
    pub(crate) fn save(&self, path: &Path, columns: usize) -> Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, durable::temporary(path)?);
        self.write(&mut out, columns).map_err(Error::io("write", path))?;
        let file = out.into_inner().map_err(|error| Error::Io {
            action: "write",
            path: path.to_owned(),
            source: error.into_error(),
        })?;
        durable::publish(file, path)
    }

    fn write(&self, out: &mut impl Write, columns: usize) -> io::Result<()> {
        out.write_all(&header(self.descr(), self.len(), columns))?;
        match self {
            Self::I16(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
            Self::I32(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
            Self::U32(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
            Self::I64(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
            Self::Mapped(mapped) => out.write_all(&mapped.map[mapped.offset..]),
        }
    }

    /// Maps a `.npy` file of rows of `columns` integers.
    ///
    /// # Errors
    /// A file that is not such an array, or whose size is not what its header says.
    pub(crate) fn load(path: &Path, columns: usize) -> Result<Self> {
        let map = Map::open(path)?;
        if map.get(..8) != Some(MAGIC.as_slice()) {
            return Err(Error::format(path, 0, "not a .npy file of version 1.0"));
        }
        let header_len = usize::from(u16::from_le_bytes(bytes_at(&map, 8).unwrap_or_default()));
        let offset = 10 + header_len;
        let text = map.get(10..offset).and_then(|bytes| std::str::from_utf8(bytes).ok()).unwrap_or_default();
        let descr = Descr::ALL.into_iter().find(|descr| text.contains(&format!("'descr': '{}'", descr.text())));
        let rows = text
            .split("'shape': (")
            .nth(1)
            .and_then(|rest| rest.split([',', ')']).next())
            .and_then(|word| word.trim().parse::<usize>().ok());
        let (Some(descr), Some(len)) = (descr, rows.and_then(|rows| rows.checked_mul(columns))) else {
            return Err(Error::format(
                path,
                10,
                format!("header {text:?} is not that of an integer array of {columns} columns"),
            ));
        };
        // The header has one form for each type and shape, so comparing the whole of it checks order and dimensions too.
        if map.get(..offset) != Some(header(descr, len, columns).as_slice()) {
            return Err(Error::format(
                path,
                10,
                format!("header {text:?} is not that of an integer array of {columns} columns"),
            ));
        }
        if len.checked_mul(descr.size()).and_then(|bytes| bytes.checked_add(offset)) != Some(map.len()) {
            return Err(Error::format(
                path,
                offset as u64,
                format!("{len} values of {} bytes do not fill a file of {} bytes", descr.size(), map.len()),
            ));
        }
        Ok(Self::Mapped(Mapped { map, offset, len, descr }))
    }
}

impl Mapped {
    fn get(&self, index: usize) -> Option<i64> {
        if index >= self.len {
            return None;
        }
        let at = self.offset + index * self.descr.size();
        match self.descr {
            Descr::I16 => bytes_at(&self.map, at).map(|bytes| i64::from(i16::from_le_bytes(bytes))),
            Descr::I32 => bytes_at(&self.map, at).map(|bytes| i64::from(i32::from_le_bytes(bytes))),
            Descr::U32 => bytes_at(&self.map, at).map(|bytes| i64::from(u32::from_le_bytes(bytes))),
            Descr::I64 => bytes_at(&self.map, at).map(i64::from_le_bytes),
        }
    }
}

/// Magic, length and the dictionary, padded with spaces as numpy does.
fn header(descr: Descr, len: usize, columns: usize) -> Vec<u8> {
    let rows = len / columns.max(1);
    let shape = if columns == 1 { format!("({rows},)") } else { format!("({rows}, {columns})") };
    let mut text = format!("{{'descr': '{}', 'fortran_order': False, 'shape': {shape}, }}", descr.text());
    let growth = GROWTH_DIGITS.saturating_sub(rows.to_string().len());
    text.push_str(&" ".repeat(growth));
    let unpadded = MAGIC.len() + 2 + text.len() + 1;
    text.push_str(&" ".repeat(ALIGN - unpadded % ALIGN));
    text.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&(text.len() as u16).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `numpy.save` (2.x) writes for `arange(6, dtype="<i4").reshape(3, 2)`.
    #[test]
    fn file_equals_numpys() {
        let mut bytes = Vec::new();
        Ints::I32((0..6).collect()).write(&mut bytes, 2).unwrap();
        let mut expected =
            b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }".to_vec();
        expected.resize(127, b' ');
        expected.push(b'\n');
        expected.extend((0..6i32).flat_map(i32::to_le_bytes));
        assert_eq!(bytes, expected);
    }

    #[test]
    fn round_trip_and_every_cut_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.npy");
        Ints::I64(vec![1, -2, 3, 1 << 40]).save(&path, 2).unwrap();
        let loaded = Ints::load(&path, 2).unwrap();
        assert_eq!(loaded.iter().collect::<Vec<_>>(), [1, -2, 3, 1 << 40]);
        assert_eq!(loaded.get(4), None);
        assert!(Ints::load(&path, 1).is_err());
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(folder.path().join("cut.npy"), &whole[..len]).unwrap();
            assert!(Ints::load(&folder.path().join("cut.npy"), 2).is_err(), "cut to {len} bytes");
        }
    }
}
