//! Peak memory of this process, from Linux' `/proc/self`.

use std::fs;

/// Peak resident memory since the last call, GiB; 0 where `/proc` does not tell.
///
/// Writing `5` to `clear_refs` resets the peak (`proc(5)`); where that is refused the peak since the start is returned.
pub(crate) fn take_peak_gib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = parse_peak_gib(&status).unwrap_or(0.0);
    if let Err(error) = fs::write("/proc/self/clear_refs", "5") {
        tracing::trace!(%error, "the memory peak cannot be reset; rows show the peak since the start");
    }
    peak
}

fn parse_peak_gib(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    #[test]
    fn reads_the_high_water_mark() {
        assert_eq!(super::parse_peak_gib("Name:\tx\nVmHWM:\t 1048576 kB\nVmRSS:\t 5 kB\n"), Some(1.0));
        assert_eq!(super::parse_peak_gib("Name:\tx\n"), None);
        assert!(super::take_peak_gib() > 0.0);
    }
}
