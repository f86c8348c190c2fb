//! A copy that does not enter the processor's caches: no call into C++, but instructions that Rust offers as unsafe alone.

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{__m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128};

    /// A cache line.
    const LINE: usize = 64;
    /// Two pages are copied side by side: the memory's banks then work for both.
    const PAGE: usize = 4096;
    const PAIR: usize = 2 * PAGE;
    /// So many bytes before they are read, a line is asked for.
    const AHEAD: usize = 512;

    /// Copies all bytes; both have one length.
    pub(super) fn copy(to: &mut [u8], from: &[u8]) {
        let head = to.as_ptr().align_offset(LINE).min(to.len());
        let (to_head, to) = to.split_at_mut(head);
        let (from_head, from) = from.split_at(head);
        let (to_pairs, to_tail) = to.as_chunks_mut::<PAIR>();
        let (from_pairs, from_tail) = from.as_chunks::<PAIR>();
        for (to, from) in to_pairs.iter_mut().zip(from_pairs) {
            let (first, second) = to.as_chunks_mut::<LINE>().0.split_at_mut(PAGE / LINE);
            let (first_from, second_from) = from.as_chunks::<LINE>().0.split_at(PAGE / LINE);
            let sources = first_from.iter().zip(second_from);
            for ((first, second), (first_from, second_from)) in first.iter_mut().zip(second).zip(sources) {
                // SAFETY: lines of `to` begin at multiples of LINE from `head`, which is aligned to it.
                unsafe {
                    stream(first, first_from);
                    stream(second, second_from);
                }
            }
        }
        // SAFETY: SSE is part of every x86-64 processor. The fence orders the stores above, which are weakly ordered, before
        // all that follows, so whoever is handed the bytes sees them.
        unsafe { _mm_sfence() };
        to_head.copy_from_slice(from_head);
        to_tail.copy_from_slice(from_tail);
    }

    /// Copies one line. `to` must be aligned to 16 bytes.
    unsafe fn stream(to: &mut [u8; LINE], from: &[u8; LINE]) {
        let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
        debug_assert!(to.is_aligned());
        // SAFETY: SSE2 is part of every x86-64 processor. The four loads and stores lie within the two lines, the stores at
        // aligned addresses, as the caller promises. A prefetch may name any address.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(AHEAD));
            for part in 0..LINE / size_of::<__m128i>() {
                _mm_stream_si128(to.add(part), _mm_loadu_si128(from.add(part)));
            }
        }
    }
}

/// Copies all bytes; both have one length.
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    x86_64::copy(to, from);
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_at_every_length_and_alignment() {
        let source: Vec<u8> = (0..40_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for (at, from, len) in (0..70).flat_map(|shift| {
            [0, 1, 63, 64, 100, 8191, 8192, 8256, 16_384, 20_000, 24_640].map(|len| (shift, 69 - shift, len))
        }) {
            let mut target = vec![0xA5; 25_000];
            copy(&mut target[at..at + len], &source[from..from + len]);
            assert!(target[at..at + len] == source[from..from + len], "{len} bytes from {from} to {at}");
            let others = target[..at].iter().chain(&target[at + len..]);
            assert!(others.into_iter().all(|byte| *byte == 0xA5), "{len} bytes from {from} to {at}: wrote elsewhere");
        }
    }
}
