// Range ANS with interleaved states, a tile at a time, as in weights/rans.py.
//
// The tables' entries, uint32, from the lowest bits on:
//   encoder [context][min(|d|, FAR + 1)]   f - 1 (10 bits), start (10), b (3), escape (1)
//   decoder [context][slot]                f - 1 (10 bits), slot - start (10), the lowest |d| or ESCAPED (9), b (3)
#pragma once
#include "tables.h"
#include "weights.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace VARIANT {
namespace {

constexpr uint32_t FIRST_STATE = 1 << 15, ESCAPED = 511;
constexpr int64_t MARGIN = 96;  // more words than a row may have, or its loads and stores touch

struct Context {
  int mantissa, base;
  uint32_t of(uint16_t weight) const {
    return static_cast<uint32_t>(std::min(std::max(((weight & 0x7fff) >> mantissa) - base, 0), CONTEXTS - 1));
  }
};

using Table = uint32_t[CONTEXTS][TOTAL];

inline void fill_encoder(const Frequencies &f, Table &table) {
  for (int c = 0; c < CONTEXTS; ++c) {
    uint32_t entries[SYMBOLS], start = 0;
    for (int s = 0; s < SYMBOLS; start += static_cast<uint32_t>(f[c][s]), ++s)
      entries[s] = (static_cast<uint32_t>(f[c][s] - 1) & 1023) | start << 10 |
                   static_cast<uint32_t>(symbols.bits[s]) << 20 | static_cast<uint32_t>(s == ESCAPE) << 23;
    for (int s = 0; s < ESCAPE; ++s)
      if (f[c][s] == 0) entries[s] = entries[ESCAPE];
    for (int size = 0; size < FAR + 2; ++size) table[c][size] = entries[symbols.of[size]];
  }
}

inline void fill_decoder(const Frequencies &f, Table &table) {
  for (int c = 0; c < CONTEXTS; ++c) {
    uint32_t *at = table[c];
    for (int s = 0; s < SYMBOLS; ++s) {
      const uint32_t low = s == ESCAPE ? ESCAPED : symbols.lowest[s];
      const uint32_t entry = static_cast<uint32_t>(f[c][s] - 1) | low << 20 | static_cast<uint32_t>(symbols.bits[s]) << 29;
      for (int k = 0; k < f[c][s]; ++k) *at++ = entry | static_cast<uint32_t>(k) << 10;
    }
  }
}

#ifdef __AVX2__
// For each subset of 8 lanes: the shuffles that move 16-bit words from the first places to the lanes of the set
// (`apart`), and from these lanes, in order, to the last places (`together`); and for each lane how many lanes of the
// set are before it.
struct Lanes8 {
  alignas(16) uint8_t apart[256][16] = {}, together[256][16] = {};
  alignas(8) uint8_t before[256][8] = {};
  constexpr Lanes8() {
    for (int set = 0; set < 256; ++set) {
      int found = 0;
      for (int byte = 0; byte < 16; ++byte) apart[set][byte] = together[set][byte] = 0x80;
      for (int lane = 0; lane < 8; ++lane) {
        before[set][lane] = static_cast<uint8_t>(found);
        for (int byte = 0; byte < 2 && set >> lane & 1; ++byte)
          apart[set][2 * lane + byte] = static_cast<uint8_t>(2 * found + byte);
        found += set >> lane & 1;
      }
      int place = 8 - found;
      for (int lane = 0; lane < 8; ++lane)
        for (int byte = 0; byte < 2 && set >> lane & 1; ++byte, place += byte == 2)
          together[set][2 * place + byte] = static_cast<uint8_t>(2 * lane + byte);
    }
  }
};
constexpr Lanes8 lanes8;

inline __m128i load(const void *from) { return _mm_loadu_si128(static_cast<const __m128i *>(from)); }
inline __m256i number(int64_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
inline unsigned set_of(__m256i mask) { return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(mask))); }
inline __m128i line(__m128i bits) {
  return _mm_xor_si128(bits, _mm_and_si128(_mm_srai_epi16(bits, 15), _mm_set1_epi16(0x7fff)));
}
// Narrows int32, each of which fits 16 bits, to int16.
inline __m128i narrow(__m256i wide) {
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
// Returns 2^b - 1 for b from 0 to 5.
inline __m256i mask_of(__m256i bits) {
  const __m256i masks = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  return _mm256_shuffle_epi8(masks, bits);
}

// Returns table[places]. The gather instruction is slower on AMD, and with mitigations of Gather Data Sampling.
inline __m256i gather(const uint32_t *table, __m256i places) {
  const auto four = [table](__m128i of) {
    const auto low = static_cast<uint64_t>(_mm_cvtsi128_si64(of)), high = static_cast<uint64_t>(_mm_extract_epi64(of, 1));
    __m128i found = _mm_cvtsi32_si128(static_cast<int>(table[static_cast<uint32_t>(low)]));
    found = _mm_insert_epi32(found, static_cast<int>(table[low >> 32]), 1);
    found = _mm_insert_epi32(found, static_cast<int>(table[static_cast<uint32_t>(high)]), 2);
    return _mm_insert_epi32(found, static_cast<int>(table[high >> 32]), 3);
  };
  const __m128i upper = four(_mm256_extracti128_si256(places, 1));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(four(_mm256_castsi256_si128(places))), upper, 1);
}

// The states of a row of a tile, V registers of 8 states. Each loop runs over the registers, so that they wait for
// table entries and products together.
template <int V>
struct Row {
  const uint32_t *table;
  __m128i mantissa, base;
  __m256i x[V];

  Row(const Table &of, Context context, const uint32_t *states)
      : table(of[0]), mantissa(_mm_cvtsi32_si128(context.mantissa)), base(_mm_set1_epi16(static_cast<int16_t>(context.base))) {
    std::memcpy(x, states, sizeof x);
  }

  // Returns where the tables of 8 weights' contexts begin.
  __m128i places(__m128i weights) const {
    const __m128i exponent = _mm_srl_epi16(_mm_and_si128(weights, _mm_set1_epi16(0x7fff)), mantissa);
    return _mm_slli_epi16(_mm_min_epu16(_mm_subs_epu16(exponent, base), _mm_set1_epi16(CONTEXTS - 1)), PRECISION);
  }

  // Decodes the row's weights in place and moves `words` on. It may read up to MARGIN words.
  void decode(const uint16_t *&words, uint16_t *weights) {
    __m256i entry[V], needs[V], escaped[V], any = _mm256_setzero_si256();
    __m128i d[V];
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      const __m256i slot = _mm256_and_si256(x[k], number(TOTAL - 1));
      entry[k] = gather(table, _mm256_or_si256(_mm256_cvtepu16_epi32(places(load(weights + 8 * k))), slot));
    }
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      const __m256i bits = _mm256_srli_epi32(entry[k], 29), high = _mm256_srli_epi32(x[k], PRECISION);
      const __m256i low = _mm256_and_si256(_mm256_srli_epi32(entry[k], 19), number(2 * ESCAPED));
      const __m256i q = _mm256_srlv_epi32(high, bits);
      x[k] = _mm256_add_epi32(_mm256_mullo_epi32(_mm256_and_si256(entry[k], number(1023)), q),
                              _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(entry[k], 10), number(1023)), q));
      escaped[k] = _mm256_cmpeq_epi32(low, number(2 * ESCAPED));
      any = _mm256_or_si256(any, escaped[k]);
      const __m128i twice = narrow(_mm256_add_epi32(low, _mm256_and_si256(high, mask_of(bits))));  // + 1 where d < 0
      const __m128i sign = _mm_sub_epi16(_mm_setzero_si128(), _mm_and_si128(twice, _mm_set1_epi16(1)));
      d[k] = _mm_sub_epi16(_mm_xor_si128(_mm_srli_epi16(twice, 1), sign), sign);
      needs[k] = _mm256_cmpgt_epi32(number(FIRST_STATE), x[k]);
    }
    if (_mm256_testz_si256(any, any)) {
#pragma GCC unroll 4
      for (int k = 0; k < V; ++k) {
        const unsigned set = set_of(needs[k]);
        const __m128i said = _mm_shuffle_epi8(load(words), load(lanes8.apart[set]));
        const __m256i more = _mm256_or_si256(_mm256_slli_epi32(x[k], 16), _mm256_cvtepu16_epi32(said));
        x[k] = _mm256_blendv_epi8(x[k], more, needs[k]);
        words += __builtin_popcount(set);
      }
    } else {
      for (int k = 0; k < V; ++k) read_escapes(set_of(escaped[k]), set_of(needs[k]), words, x[k], d[k]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      const __m128i now = line(_mm_add_epi16(line(load(weights + 8 * k)), d[k]));
      _mm_storeu_si128(reinterpret_cast<__m128i *>(weights + 8 * k), now);
    }
  }

  static void read_escapes(unsigned escaped, unsigned needs, const uint16_t *&words, __m256i &x, __m128i &d) {
    alignas(32) uint32_t states[8];
    alignas(16) uint16_t moves[8];
    std::memcpy(states, &x, sizeof x);
    std::memcpy(moves, &d, sizeof d);
    for (unsigned rest = escaped | needs; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      if (escaped >> lane & 1) moves[lane] = *words++;
      if (needs >> lane & 1) states[lane] = states[lane] << 16 | *words++;
    }
    std::memcpy(&x, states, sizeof x);
    std::memcpy(&d, moves, sizeof d);
  }

  // Codes the row's weights and moves `words` back. It may write up to 8 words before the new `words`.
  void encode(uint16_t *&words, const uint16_t *before, const uint16_t *after) {
    __m256i entry[V], raw[V], full[V];
    __m128i d[V];
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      const __m128i old = load(before + 8 * k);
      d[k] = _mm_sub_epi16(line(load(after + 8 * k)), line(old));
      const __m128i size = _mm_min_epu16(_mm_abs_epi16(d[k]), _mm_set1_epi16(FAR + 1));
      entry[k] = gather(table, _mm256_cvtepu16_epi32(_mm_or_si128(places(old), size)));
      const __m128i above = _mm_slli_epi16(_mm_sub_epi16(size, _mm_set1_epi16(1)), 1);
      raw[k] = _mm256_cvtepu16_epi32(_mm_or_si128(above, _mm_srli_epi16(d[k], 15)));
    }
    __m256i any = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(entry[k], 20), number(7));
      const __m256i most = _mm256_srlv_epi32(x[k], _mm256_sub_epi32(number(21), bits));
      full[k] = _mm256_cmpgt_epi32(most, _mm256_and_si256(entry[k], number(1023)));
      any = _mm256_or_si256(any, entry[k]);
    }
    if (!(set_of(_mm256_slli_epi32(any, 8)))) {
#pragma GCC unroll 4
      for (int k = V - 1; k >= 0; --k) {
        const unsigned set = set_of(full[k]);
        const __m128i low = narrow(_mm256_and_si256(x[k], number(0xffff)));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(words - 8), _mm_shuffle_epi8(low, load(lanes8.together[set])));
        words -= __builtin_popcount(set);
      }
    } else {
      for (int k = V - 1; k >= 0; --k) write_escapes(set_of(_mm256_slli_epi32(entry[k], 8)), set_of(full[k]), words, x[k], d[k]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < V; ++k) {
      const __m256i left = _mm256_blendv_epi8(x[k], _mm256_srli_epi32(x[k], 16), full[k]);
      const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(entry[k], 20), number(7));
      const __m256i f = _mm256_add_epi32(_mm256_and_si256(entry[k], number(1023)), number(1));
      // left < f << (21 - b), so that the quotient is below 2^21, and that of floats is off by at most 1.
      const __m256i q = _mm256_cvttps_epi32(_mm256_div_ps(_mm256_cvtepi32_ps(left), _mm256_cvtepi32_ps(f)));
      const __m256i rest = _mm256_sub_epi32(left, _mm256_mullo_epi32(q, f));
      const __m256i less = _mm256_srai_epi32(rest, 31), more = _mm256_cmpgt_epi32(rest, _mm256_and_si256(entry[k], number(1023)));
      const __m256i quotient = _mm256_sub_epi32(_mm256_add_epi32(q, less), more);
      const __m256i remainder =
          _mm256_sub_epi32(_mm256_add_epi32(rest, _mm256_and_si256(less, f)), _mm256_and_si256(more, f));
      const __m256i bottom = _mm256_and_si256(raw[k], mask_of(bits));
      const __m256i taken = _mm256_slli_epi32(_mm256_or_si256(_mm256_sllv_epi32(quotient, bits), bottom), PRECISION);
      const __m256i start = _mm256_and_si256(_mm256_srli_epi32(entry[k], 10), number(1023));
      x[k] = _mm256_add_epi32(taken, _mm256_add_epi32(start, remainder));
    }
  }

  static void write_escapes(unsigned escaped, unsigned full, uint16_t *&words, __m256i x, __m128i d) {
    alignas(32) uint32_t states[8];
    alignas(16) uint16_t moves[8];
    std::memcpy(states, &x, sizeof x);
    std::memcpy(moves, &d, sizeof d);
    for (int lane = 7; lane >= 0; --lane) {
      if (full >> lane & 1) *--words = static_cast<uint16_t>(states[lane]);
      if (escaped >> lane & 1) *--words = moves[lane];
    }
  }
};
#endif

// Writes a tile's words so that they end at `end`, and its last states; returns where the words begin.
template <int LANES_>
uint16_t *encode_tile(const Table &table, Context context, const uint16_t *old, const uint16_t *now, int64_t n,
                      uint16_t *end, uint32_t *states) {
  uint16_t *words = end;
  std::fill_n(states, LANES_, FIRST_STATE);
  int64_t i = n;
  const auto one = [&](int64_t place) {
    uint32_t &x = states[place % LANES_];
    const int32_t d = static_cast<int16_t>(line(now[place]) - line(old[place]));
    const uint32_t size = static_cast<uint32_t>(d < 0 ? -d : d);
    const uint32_t entry = table[context.of(old[place])][std::min<uint32_t>(size, FAR + 1)];
    const uint32_t f = (entry & 1023) + 1, bits = entry >> 20 & 7, mask = (1u << bits) - 1;
    const uint32_t raw = (((size - 1) & mask >> 1) << 1 | static_cast<uint32_t>(d < 0)) & mask;
    if (x >> (21 - bits) >= f) {
      *--words = static_cast<uint16_t>(x);
      x >>= 16;
    }
    if (entry >> 23) *--words = static_cast<uint16_t>(d);
    x = ((x / f << bits | raw) << PRECISION) + (entry >> 10 & 1023) + x % f;
  };
#ifdef __AVX2__
  while (i % LANES_) one(--i);
  Row<LANES_ / 8> row(table, context, states);
  for (; i > 0; i -= LANES_) row.encode(words, old + i - LANES_, now + i - LANES_);
  std::memcpy(states, row.x, sizeof row.x);
#else
  while (i) one(--i);
#endif
  return words;
}

// Decodes a tile of `count` words in place; the message ends at `end`. Returns whether words and states come out right.
template <int LANES_>
bool decode_tile(const Table &table, Context context, const uint32_t *from, const uint16_t *words, int64_t count,
                 const uint16_t *end, uint16_t *weights, int64_t n) {
  uint32_t states[LANES_];
  std::memcpy(states, from, sizeof states);
  const uint16_t *behind = words + count;
  int64_t i = 0;
#ifdef __AVX2__
  Row<LANES_ / 8> row(table, context, states);
  uint16_t last[3 * MARGIN];  // a copy of the message's last words, after which loads may read
  bool copied = false;
  for (; i + LANES_ <= n; i += LANES_) {
    if (end - words < MARGIN) {
      if (words > end) return false;
      if (!copied) {
        const int64_t rest = end - words;
        std::memset(last, 0, sizeof last);
        std::memcpy(last, words, static_cast<size_t>(2 * rest));
        behind = last + (behind - words), words = last, end = last + rest;
        copied = true;
      }
    }
    row.decode(words, weights + i);
  }
  std::memcpy(states, row.x, sizeof row.x);
#endif
  for (; i < n; ++i) {
    uint32_t &x = states[i % LANES_];
    const uint32_t entry = table[context.of(weights[i])][x & (TOTAL - 1)];
    const uint32_t bits = entry >> 29, low = entry >> 20 & ESCAPED, high = x >> PRECISION;
    const uint32_t raw = high & ((1u << bits) - 1);
    const uint32_t size = low + (raw >> 1);
    uint32_t d = raw & 1 ? 0 - size : size;
    x = ((entry & 1023) + 1) * (high >> bits) + (entry >> 10 & 1023);
    const bool escaped = low == ESCAPED, needs = static_cast<int32_t>(x) < static_cast<int32_t>(FIRST_STATE);
    if (words + escaped + needs > end) return false;
    if (escaped) d = *words++;
    if (needs) x = x << 16 | *words++;
    weights[i] = line(static_cast<uint16_t>(line(weights[i]) + d));
  }
  return words == behind && std::all_of(states, states + LANES_, [](uint32_t x) { return x == FIRST_STATE; });
}

}  // namespace
}  // namespace VARIANT
