// The weight code's contexts, symbols and frequencies, which weights/tables.py defines.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace VARIANT {
namespace {

constexpr int CONTEXTS = 16, SYMBOLS = 42, ESCAPE = 41, FAR = 512, PRECISION = 10, TOTAL = 1 << PRECISION;
constexpr int SMALLEST_TILE = 12, LARGEST_TILE = 18, FEW_LANES = 8, LANES = 32, ROW = 32, LONG = 15;
constexpr int64_t SAMPLED_FROM = 1 << 21, FEW = 64, TILE_BITS = 1 << 16;

struct Symbols {
  uint8_t of[FAR + 2] = {};  // the symbol of min(|d|, FAR + 1)
  uint16_t lowest[SYMBOLS] = {};
  uint8_t bits[SYMBOLS] = {};
  constexpr Symbols() {
    int size = 1;
    for (int symbol = 1; symbol < ESCAPE; ++symbol) {
      const int log2_width = symbol <= 4 ? 0 : symbol <= 10 ? (symbol - 3) / 2 : 4;
      lowest[symbol] = static_cast<uint16_t>(size);
      bits[symbol] = static_cast<uint8_t>(log2_width + 1);
      for (int k = 0; k < 1 << log2_width; ++k) of[size++] = static_cast<uint8_t>(symbol);
    }
    of[FAR + 1] = ESCAPE;
  }
};
constexpr Symbols symbols;

using Frequencies = int32_t[CONTEXTS][SYMBOLS];

// The counts of symbols at each exponent.
struct Counts {
  uint32_t of[256][64] = {};
  int64_t weights = 0;

  // Returns the lowest exponent of the window of CONTEXTS exponents.
  int window() const {
    int64_t at[256], up_to = 0;
    int top = -1, bottom = -1;
    for (int e = 0; e < 256; ++e) {
      at[e] = 0;
      for (int s = 0; s < SYMBOLS; ++s) at[e] += of[e][s];
    }
    for (int e = 0; e < 256; ++e) {
      up_to += at[e];
      if (bottom < 0 && up_to > std::min(FEW, weights - 1)) bottom = e;
      if (top < 0 && TOTAL * (weights - up_to) <= weights) top = e;
    }
    return std::max(top - CONTEXTS + 1, bottom);
  }
};

struct Plan {
  int base, log2_tile, lanes;
  Frequencies f;

  Plan(const Counts &counted, int64_t n) : base(counted.window()) {
    int64_t counts[CONTEXTS][SYMBOLS] = {}, total = 0;
    for (int e = 0; e < 256; ++e) {
      const int context = std::min(std::max(e - base, 0), CONTEXTS - 1);
      for (int s = 0; s < SYMBOLS; ++s) counts[context][s] += counted.of[e][s];
    }
    for (int c = 0; c < CONTEXTS; ++c) {
      normalize(counts[c], n >= SAMPLED_FROM, f[c]);
      for (int s = 0; s < SYMBOLS; ++s) total += counts[c][s] * cost(f[c], s);
    }
    const int64_t mean = total / counted.weights;
    log2_tile = SMALLEST_TILE;
    while (log2_tile < LARGEST_TILE && mean << log2_tile < TILE_BITS << 8) ++log2_tile;
    lanes = mean * n < TILE_BITS << 8 ? FEW_LANES : LANES;
  }

  // Writes a message's tables into at least 1,024 bytes; returns their bytes, with zeros to a multiple of 4.
  int write(uint8_t *tables) const {
    uint8_t *at = tables + CONTEXTS / 2;
    int32_t listed[CONTEXTS * SYMBOLS];
    int count = 0;
    std::memset(tables, 0, 1024);
    for (int c = 0; c < CONTEXTS; ++c) {
      int last = ESCAPE - 1;
      while (last > 0 && f[c][last] == 0) --last;
      const bool escapes = f[c][ESCAPE] > 0, is_long = escapes || last >= LONG;
      tables[c / 2] |= static_cast<uint8_t>((is_long ? LONG : last) << c % 2 * 4);
      if (is_long) *at++ = static_cast<uint8_t>(last | escapes << 7);
      if (escapes) listed[count++] = f[c][ESCAPE];
      for (int s = 1; s <= last; ++s) listed[count++] = f[c][s];
    }
    for (int k = 0; k < count; ++k) {
      at[k] = static_cast<uint8_t>(listed[k]);
      at[count + k / 4] |= static_cast<uint8_t>(listed[k] >> 8 << k % 4 * 2);
    }
    const int64_t size = at + count + (count + 3) / 4 - tables;
    return static_cast<int>((size + 3) / 4 * 4);
  }

 private:
  static void normalize(const int64_t *counts, bool escapes, int32_t *f) {
    int64_t every = 0;
    for (int s = 0; s < SYMBOLS; ++s) every += counts[s];
    every = std::max<int64_t>(every, 1);
    int rest = TOTAL, most = 1;
    for (int s = 1; s < SYMBOLS; ++s) {
      const int64_t share = (2 * TOTAL * counts[s] + every) / (2 * every);
      f[s] = counts[s] ? static_cast<int32_t>(std::max<int64_t>(share, 1)) : 0;
      if (escapes && s == ESCAPE) f[s] = std::max(f[s], 1);
      rest -= f[s];
      if (f[s] > f[most]) most = s;
    }
    f[most] -= std::max(1 - rest, 0);
    f[0] = std::max(rest, 1);
  }

  // Returns about how many bits a symbol costs, in units of 1/256.
  static int64_t cost(const int32_t *f, int symbol) {
    const bool escaped = symbol == ESCAPE || f[symbol] == 0;
    const int32_t of = std::max(f[escaped ? ESCAPE : symbol], 1), raw = escaped ? 16 : symbols.bits[symbol];
    const int power = 31 - __builtin_clz(static_cast<unsigned>(of));
    return ((PRECISION + raw) << 8) - (power << 8) - ((of - (1 << power)) << 8 >> power);
  }
};

// Reads frequencies from a message's tables. Returns the tables' bytes, zeros included, or 0 if they are invalid.
inline int64_t read_tables(const uint8_t *tables, int64_t size, Frequencies &f) {
  if (size < CONTEXTS / 2) return 0;
  int last[CONTEXTS], escapes[CONTEXTS], count = 0;
  const uint8_t *at = tables + CONTEXTS / 2, *end = tables + size;
  for (int c = 0; c < CONTEXTS; ++c) {
    int head = tables[c / 2] >> c % 2 * 4 & 15;
    if (head == LONG) {
      if (at == end) return 0;
      head = *at++;
    }
    last[c] = head & 127, escapes[c] = head >> 7;
    if (last[c] >= ESCAPE) return 0;
    count += last[c] + escapes[c];
  }
  if (end - at < count + (count + 3) / 4) return 0;
  int k = 0;
  auto next = [&] {
    const int number = at[k] | (at[count + k / 4] >> k % 4 * 2 & 3) << 8;
    ++k;
    return number;
  };
  for (int c = 0; c < CONTEXTS; ++c) {
    std::fill_n(f[c], SYMBOLS, 0);
    if (escapes[c]) f[c][ESCAPE] = next();
    for (int s = 1; s <= last[c]; ++s) f[c][s] = next();
    f[c][0] = TOTAL;
    for (int s = 1; s < SYMBOLS; ++s) f[c][0] -= f[c][s];
    if (f[c][0] <= 0) return 0;
  }
  return (at + count + (count + 3) / 4 - tables + 3) / 4 * 4;
}

}  // namespace
}  // namespace VARIANT
