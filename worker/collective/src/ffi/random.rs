//! Safe wrappers of csrc/philox.cpp.

unsafe extern "C" {
    fn tc_philox_mask(
        out: *mut u8,
        element_size: i32,
        rows: i64,
        row_len: i64,
        seeds: *const u64,
        first_element: u64,
        threshold: u32,
        kept: u64,
    ) -> i32;
    fn tc_philox_uniform(out: *mut f32, len: i64, seed: u64, first_element: u64);
    fn tc_philox_normal(out: *mut f32, len: i64, seed: u64, mean: f64, std: f64);
}

/// Fills `out`, which holds `seeds.len()` equal rows of elements of `element_size` bytes; false if it does not.
pub(crate) fn mask(
    out: &mut [u8],
    element_size: usize,
    seeds: &[u64],
    first_element: u64,
    threshold: u32,
    kept: u64,
) -> bool {
    if out.is_empty() {
        return true;
    }
    let row_bytes = out.len() / seeds.len().max(1);
    if !matches!(element_size, 1 | 2 | 4 | 8)
        || row_bytes * seeds.len() != out.len()
        || !row_bytes.is_multiple_of(element_size)
        || !out.as_ptr().addr().is_multiple_of(element_size)
    {
        return false;
    }
    let (rows, row_len) = (seeds.len() as i64, (row_bytes / element_size) as i64);
    // SAFETY: rows × row_len elements of element_size bytes are exactly `out`, which is aligned for them; there is a seed a row.
    unsafe {
        tc_philox_mask(
            out.as_mut_ptr(),
            element_size as i32,
            rows,
            row_len,
            seeds.as_ptr(),
            first_element,
            threshold,
            kept,
        ) == 0
    }
}

pub(crate) fn uniform(out: &mut [f32], seed: u64) {
    // SAFETY: writes exactly the slice.
    unsafe { tc_philox_uniform(out.as_mut_ptr(), out.len() as i64, seed, 0) }
}

pub(crate) fn normal(out: &mut [f32], seed: u64, mean: f64, std: f64) {
    // SAFETY: writes exactly the slice.
    unsafe { tc_philox_normal(out.as_mut_ptr(), out.len() as i64, seed, mean, std) }
}
