//! The text whose md5 names cached indices: Python's `json.dumps(…, indent=4)` of an ordered map, character for character (D1).

use std::fmt::Write as _;

use md5::{Digest as _, Md5};

/// A JSON value that Python would have had.
#[derive(Clone, Debug)]
pub(crate) enum Json {
    Null,
    Int(u64),
    Float(f64),
    Text(String),
    List(Vec<Json>),
    Map(Vec<(&'static str, Json)>),
}

impl Json {
    pub(crate) fn optional(number: Option<u64>) -> Self {
        number.map_or(Self::Null, Self::Int)
    }

    /// `json.dumps(self, indent=4)`.
    pub(crate) fn dumps(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, 0);
        out
    }

    fn write(&self, out: &mut String, depth: usize) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Int(number) => out.push_str(&number.to_string()),
            Self::Float(number) => out.push_str(&python_float(*number)),
            Self::Text(text) => write_text(out, text),
            Self::List(items) => write_block(out, depth, ['[', ']'], items, |out, item| item.write(out, depth + 1)),
            Self::Map(entries) => write_block(out, depth, ['{', '}'], entries, |out, (key, value)| {
                write_text(out, key);
                out.push_str(": ");
                value.write(out, depth + 1);
            }),
        }
    }
}

fn write_block<T>(out: &mut String, depth: usize, brackets: [char; 2], items: &[T], item: impl Fn(&mut String, &T)) {
    out.push(brackets[0]);
    for (index, value) in items.iter().enumerate() {
        out.push_str(if index == 0 { "\n" } else { ",\n" });
        out.push_str(&" ".repeat(4 * (depth + 1)));
        item(out, value);
    }
    if !items.is_empty() {
        out.push('\n');
        out.push_str(&" ".repeat(4 * depth));
    }
    out.push(brackets[1]);
}

/// `ensure_ascii=True`, Python's default.
fn write_text(out: &mut String, text: &str) {
    out.push('"');
    for unit in text.encode_utf16() {
        match u8::try_from(unit) {
            Ok(b'"') => out.push_str("\\\""),
            Ok(b'\\') => out.push_str("\\\\"),
            Ok(b'\n') => out.push_str("\\n"),
            Ok(b'\r') => out.push_str("\\r"),
            Ok(b'\t') => out.push_str("\\t"),
            Ok(8) => out.push_str("\\b"),
            Ok(12) => out.push_str("\\f"),
            Ok(byte @ 0x20..0x80) => out.push(char::from(byte)),
            // Writing to a String cannot fail.
            _ => write!(out, "\\u{unit:04x}").unwrap_or_default(),
        }
    }
    out.push('"');
}

/// `repr(float)`: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn python_float(number: f64) -> String {
    let size = number.abs();
    if number == 0.0 || (1e-4..1e16).contains(&size) || !number.is_finite() {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
    format!("{digits}e{sign}{exponent:0>2}")
}

/// Lower-case hexadecimal md5 of a text.
pub(crate) fn md5_hex(text: &str) -> String {
    Md5::digest(text.as_bytes()).iter().fold(String::with_capacity(32), |mut out, byte| {
        write!(out, "{byte:02x}").unwrap_or_default();
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_does() {
        let cases = [
            (0.99, "0.99"),
            (1.0, "1.0"),
            (0.0, "0.0"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e-4, "0.0001"),
            (1e16, "1e+16"),
            (1e-100, "1e-100"),
        ];
        for (number, text) in cases {
            assert_eq!(python_float(number), text);
        }
    }

    #[test]
    fn text_is_ascii() {
        assert_eq!(Json::Text("a\"\\\n\u{1}ü😀".into()).dumps(), r#""a\"\\\n\u0001\u00fc\ud83d\ude00""#);
    }

    #[test]
    fn empty_blocks_stay_on_one_line() {
        assert_eq!(Json::List(vec![]).dumps(), "[]");
        assert_eq!(
            Json::Map(vec![("a", Json::List(vec![Json::Null]))]).dumps(),
            "{\n    \"a\": [\n        null\n    ]\n}"
        );
    }
}
