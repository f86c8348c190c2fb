//! The split string ("99,1,0"): which contiguous share of a corpus is train, validation and test data.
//!
//! Source: megatron-core `parse_and_normalize_split` and `convert_split_vector_to_split_matrix` (reference values in the golden tests).
//! The running sum starts at the integer 0, which shows in the cached description, hence in its md5.

use std::ops::Range;

use crate::error::{Error, Result};

/// One of the three shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// The first share.
    Train,
    /// The second share.
    Validation,
    /// The third share.
    Test,
}

impl Split {
    /// The word that Megatron puts in file names and descriptions: `train`, `valid` or `test`.
    #[must_use]
    pub fn megatron_name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "valid",
            Self::Test => "test",
        }
    }

    /// The word that people read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }
}

/// The three shares as fractions \[low, high) of the sequences; `None` for an empty share.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitMatrix([Option<(f64, f64)>; 3]);

impl SplitMatrix {
    /// Parses a split string.
    ///
    /// Stricter than Megatron, whose regular expression `[.0-9]+` skips everything else: a minus sign or a letter is an error here.
    ///
    /// # Errors
    /// Characters other than digits, dots and separators, more than three numbers, or a sum of zero.
    pub fn parse(text: &str) -> Result<Self> {
        let fail = |why: String| Error::Split { text: text.to_owned(), why };
        let separator = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | ':' | '/' | '[' | ']' | '(' | ')');
        if let Some(stray) = text.chars().find(|c| !separator(*c) && *c != '.' && !c.is_ascii_digit()) {
            return Err(fail(format!("'{stray}' is not part of a number without sign and exponent")));
        }
        let numbers: Vec<f64> = text
            .split(separator)
            .filter(|word| !word.is_empty())
            .map(|word| word.parse().map_err(|_| fail(format!("\"{word}\" is not a number"))))
            .collect::<Result<_>>()?;
        if numbers.len() > 3 {
            return Err(fail(format!("{} numbers, but there are three splits", numbers.len())));
        }
        let sum = numbers.iter().fold(0.0, |sum, number| sum + number);
        if sum <= 0.0 || !sum.is_finite() {
            return Err(fail(format!("the shares add up to {sum}")));
        }
        let (mut matrix, mut low) = ([None; 3], 0.0);
        for (entry, number) in matrix.iter_mut().zip(numbers) {
            let high = low + number / sum;
            *entry = (high > low).then_some((low, high));
            low = high;
        }
        Ok(Self(matrix))
    }

    /// The share of one split.
    #[must_use]
    pub fn share(&self, split: Split) -> Option<(f64, f64)> {
        self.0[split as usize]
    }

    /// The shares in the order train, validation, test.
    #[must_use]
    pub fn shares(&self) -> &[Option<(f64, f64)>; 3] {
        &self.0
    }

    /// The sequence ids of one split among `num_sequences`: both ends rounded half to even, as Python's `round` does.
    #[must_use]
    pub fn range(&self, split: Split, num_sequences: usize) -> Range<usize> {
        let Some((low, high)) = self.share(split) else { return 0..0 };
        let round = |share: f64| (share * num_sequences as f64).round_ties_even() as usize;
        round(low)..round(high).min(num_sequences)
    }
}
