//! Sizes as `transformers` writes them: decimal units.

/// Reads `5GB`, `500MB`, `1.5GiB` or a number of bytes. `KB`, `MB`, `GB`, `TB` are powers of 1000, as in `transformers`;
/// `KiB`, `MiB`, `GiB`, `TiB` powers of 1024.
///
/// # Errors
/// A sentence that says what is allowed.
pub fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 9] = [
        ("TIB", 1 << 40),
        ("GIB", 1 << 30),
        ("MIB", 1 << 20),
        ("KIB", 1 << 10),
        ("TB", 1_000_000_000_000),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("KB", 1_000),
        ("B", 1),
    ];
    let wrong = || format!("`{text}` is no size: write for example 5GB, 500MB, 2GiB or a number of bytes");
    let upper = text.trim().to_ascii_uppercase();
    let (number, unit) =
        UNITS.iter().find_map(|(name, unit)| Some((upper.strip_suffix(name)?, *unit))).unwrap_or((upper.as_str(), 1));
    let number = number.trim_end();
    let whole = number.parse::<u64>().ok().and_then(|count| count.checked_mul(unit));
    let bytes = match whole {
        Some(bytes) => bytes,
        None => {
            let scaled = number.parse::<f64>().map_err(|_| wrong())? * unit as f64;
            if !(scaled.is_finite() && (1.0..9e18).contains(&scaled)) {
                return Err(wrong());
            }
            scaled as u64
        }
    };
    if bytes == 0 { Err(wrong()) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes_are_decimal_unless_they_say_otherwise() {
        for (text, bytes) in [
            ("5GB", 5_000_000_000),
            ("500mb", 500_000_000),
            ("2 KB", 2_000),
            ("1.5GiB", 3 << 29),
            ("1TB", 1_000_000_000_000),
            ("7", 7),
            ("8B", 8),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "GB", "-1GB", "0", "0.0001KB", "5XB", "1e99GB", "NaN"] {
            assert!(parse_size(bad).unwrap_err().contains("5GB"), "{bad}");
        }
    }
}
