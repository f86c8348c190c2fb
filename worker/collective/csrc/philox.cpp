// Random numbers that depend on (seed, element index) alone: Philox4x32-10 of Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3" (SC 2011). Element i takes word i % 4 of the block whose counter is i / 4 and whose key is the seed, so
// neither the number of threads nor the way in which rows are batched changes a value. No libtorch in this file.
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

namespace {

constexpr int kBlocks = 16;            // blocks made at once, so that the compiler can use wide registers
constexpr int64_t kGroup = kBlocks * 4;  // elements of such a group
constexpr int64_t kGroupsPerTask = 256;

WIDE void fill_group(uint64_t seed, uint64_t first_block, uint32_t* out) {
  uint32_t a[kBlocks], b[kBlocks], c[kBlocks], d[kBlocks];
  for (int j = 0; j < kBlocks; ++j) {
    const uint64_t counter = first_block + static_cast<uint64_t>(j);
    a[j] = static_cast<uint32_t>(counter);
    b[j] = static_cast<uint32_t>(counter >> 32);
    c[j] = 0;
    d[j] = 0;
  }
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int j = 0; j < kBlocks; ++j) {
      const uint64_t x = uint64_t{0xD2511F53} * a[j];
      const uint64_t y = uint64_t{0xCD9E8D57} * c[j];
      const uint32_t next_a = static_cast<uint32_t>(y >> 32) ^ b[j] ^ key0;
      const uint32_t next_c = static_cast<uint32_t>(x >> 32) ^ d[j] ^ key1;
      b[j] = static_cast<uint32_t>(y);
      d[j] = static_cast<uint32_t>(x);
      a[j] = next_a;
      c[j] = next_c;
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  for (int j = 0; j < kBlocks; ++j) {
    out[4 * j] = a[j];
    out[4 * j + 1] = b[j];
    out[4 * j + 2] = c[j];
    out[4 * j + 3] = d[j];
  }
}

// Calls put(row, index within the row, words, count) for runs of elements that lie in one group; in parallel.
template <class Put>
void for_each_run(int64_t rows, int64_t row_len, const uint64_t* seeds, uint64_t first_element, const Put& put) {
  if (rows <= 0 || row_len <= 0) {
    return;
  }
  const uint64_t first_group = first_element / kGroup;
  const uint64_t last_group = (first_element + static_cast<uint64_t>(row_len) - 1) / kGroup;
  const int64_t groups = static_cast<int64_t>(last_group - first_group + 1);
  const int64_t tasks_per_row = (groups + kGroupsPerTask - 1) / kGroupsPerTask;
#pragma omp parallel for schedule(static) if (rows * tasks_per_row > 1)
  for (int64_t task = 0; task < rows * tasks_per_row; ++task) {
    const int64_t row = task / tasks_per_row;
    const int64_t from = (task % tasks_per_row) * kGroupsPerTask;
    const int64_t to = from + kGroupsPerTask < groups ? from + kGroupsPerTask : groups;
    uint32_t words[kGroup];
    for (int64_t group = from; group < to; ++group) {
      const uint64_t number = first_group + static_cast<uint64_t>(group);
      fill_group(seeds[row], number * kBlocks, words);
      const int64_t begin = static_cast<int64_t>(number * kGroup - first_element);  // may lie before the row's first element
      const int64_t skip = begin < 0 ? -begin : 0;
      const int64_t end = begin + kGroup < row_len ? begin + kGroup : row_len;
      put(row, begin + skip, words + skip, end - begin - skip);
    }
  }
}

template <class Element>
void mask(Element* out, int64_t rows, int64_t row_len, const uint64_t* seeds, uint64_t first_element, uint32_t threshold,
          Element kept) {
  for_each_run(rows, row_len, seeds, first_element, [=](int64_t row, int64_t at, const uint32_t* words, int64_t count) {
    Element* to = out + row * row_len + at;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = words[i] < threshold ? Element{0} : kept;
    }
  });
}

}  // namespace

extern "C" {

// Each element: 0 with probability threshold / 2^32, else the bit pattern `kept`. Returns 0, or 1 for an unknown size.
int32_t tc_philox_mask(
    void* out, int32_t element_size, int64_t rows, int64_t row_len, const uint64_t* seeds, uint64_t first_element,
    uint32_t threshold, uint64_t kept) {
  switch (element_size) {
    case 1:
      mask(static_cast<uint8_t*>(out), rows, row_len, seeds, first_element, threshold, static_cast<uint8_t>(kept));
      return 0;
    case 2:
      mask(static_cast<uint16_t*>(out), rows, row_len, seeds, first_element, threshold, static_cast<uint16_t>(kept));
      return 0;
    case 4:
      mask(static_cast<uint32_t*>(out), rows, row_len, seeds, first_element, threshold, static_cast<uint32_t>(kept));
      return 0;
    case 8:
      mask(static_cast<uint64_t*>(out), rows, row_len, seeds, first_element, threshold, kept);
      return 0;
    default:
      return 1;
  }
}

// Uniform in [0, 1) with 24 bits.
void tc_philox_uniform(float* out, int64_t len, uint64_t seed, uint64_t first_element) {
  for_each_run(1, len, &seed, first_element, [=](int64_t, int64_t at, const uint32_t* words, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      out[at + i] = static_cast<float>(words[i] >> 8) * 0x1p-24f;
    }
  });
}

// Normal by Box and Muller: the words of a block are two pairs, each gives two values. Computed in double.
void tc_philox_normal(float* out, int64_t len, uint64_t seed, double mean, double std) {
  constexpr double kTurn = 6.283185307179586;
  for_each_run(1, len, &seed, 0, [=](int64_t, int64_t at, const uint32_t* words, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {  // `at` is a multiple of the group, so pairs start at even i
      const uint32_t* pair = words + (i & ~int64_t{1});
      const double radius = std::sqrt(-2.0 * std::log((pair[0] + 0.5) * 0x1p-32));
      const double angle = kTurn * ((pair[1] + 0.5) * 0x1p-32);
      const double value = radius * ((i & 1) == 0 ? std::cos(angle) : std::sin(angle));
      out[at + i] = static_cast<float>(mean + std * value);
    }
  });
}

}  // extern "C"
