//! numpy's legacy `RandomState`: the generator that fixes Megatron's sample order (D1).
//!
//! MT19937 (Matsumoto & Nishimura 1998, `init_genrand` seeding) with numpy's legacy `shuffle`: Fisher–Yates from the end, each
//! partner drawn by masked rejection. numpy promises never to change this stream (NEP 19).

const STATE_WORDS: usize = 624;
const SHIFT_WORDS: usize = 397;

/// `numpy.random.RandomState(seed)`.
#[derive(Clone, Debug)]
pub struct RandomState {
    state: Box<[u32; STATE_WORDS]>,
    next: usize,
}

impl RandomState {
    /// Seeds as `RandomState(seed)` does for an integer.
    #[must_use]
    pub fn new(seed: u32) -> Self {
        let mut state = Box::new([0u32; STATE_WORDS]);
        let mut word = seed;
        for (index, slot) in state.iter_mut().enumerate() {
            if index > 0 {
                word = 1_812_433_253u32.wrapping_mul(word ^ (word >> 30)).wrapping_add(index as u32);
            }
            *slot = word;
        }
        Self { state, next: STATE_WORDS }
    }

    /// Next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.next == STATE_WORDS {
            self.twist();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// Next 64 random bits: two draws, the high half first.
    pub fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        (high << 32) | u64::from(self.next_u32())
    }

    /// A number in \[0, max\], by rejection under the smallest mask of ones that covers `max`.
    pub fn interval(&mut self, max: u64) -> u64 {
        if max == 0 {
            return 0;
        }
        let mask = u64::MAX >> max.leading_zeros();
        loop {
            let bits = if max <= u64::from(u32::MAX) { u64::from(self.next_u32()) } else { self.next_u64() };
            if bits & mask <= max {
                return bits & mask;
            }
        }
    }

    /// `RandomState.shuffle` of a one-dimensional array.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let partner = self.interval(last as u64) as usize;
            items.swap(last, partner);
        }
    }

    fn twist(&mut self) {
        for index in 0..STATE_WORDS {
            let upper = self.state[index] & 0x8000_0000;
            let lower = self.state[(index + 1) % STATE_WORDS] & 0x7fff_ffff;
            let mixed = upper | lower;
            let twisted = (mixed >> 1) ^ if mixed & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[index] = self.state[(index + SHIFT_WORDS) % STATE_WORDS] ^ twisted;
        }
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use md5::{Digest as _, Md5};

    use super::RandomState;

    #[test]
    fn shuffle_equals_numpy() {
        let mut items: Vec<u32> = (0..10).collect();
        RandomState::new(1234).shuffle(&mut items);
        assert_eq!(items, [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]);
    }

    /// md5 of `RandomState(4321).shuffle(arange(1_000_003, dtype=uint32))` under numpy 2.4.6.
    #[test]
    fn long_shuffle_equals_numpy() {
        let mut items: Vec<u32> = (0..1_000_003).collect();
        RandomState::new(4321).shuffle(&mut items);
        assert_eq!(items[..5], [412_507, 113_675, 78_934, 608_698, 964_517]);
        let bytes: Vec<u8> = items.iter().flat_map(|item| item.to_le_bytes()).collect();
        assert_eq!(format!("{:x}", Md5::digest(&bytes)), "97d6b6b524e98b65ffacbfc27e8de55c");
    }

    /// The reference value of MT19937 seeded with 5489: the 10,000th output (C++ standard, [rand.predef]).
    #[test]
    fn ten_thousandth_output_is_the_standard_one() {
        let mut random = RandomState::new(5489);
        let last = (0..10_000).map(|_| random.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn wide_intervals_draw_two_words_high_first() {
        let (mut wide, mut narrow) = (RandomState::new(7), RandomState::new(7));
        let value = wide.interval(u64::MAX);
        let (high, low) = (u64::from(narrow.next_u32()), u64::from(narrow.next_u32()));
        assert_eq!(value, (high << 32) | low);
    }
}
