// The sum of several senders' codes of one block. With vectors every lane loads the codes of 8 neighbouring elements
// as one word, and looks up s*q of each in a register that has s*q of every code.
#pragma once
#include "codes.h"
#include "rotation.h"

namespace VARIANT {
namespace {

// One sender's codes of a block, and their scale.
struct Coded {
  const uint8_t *code;
  float scale;
};

inline Coded coded(const DecompressArguments &a, const Block &here, int64_t block, int64_t sender) {
  const uint8_t *payload = a.payloads + sender * a.layout.payload_bytes;
  uint16_t stored;
  std::memcpy(&stored, payload + a.layout.code_bytes + 2 * block, 2);
  return {payload + here.code, Bf16::load(stored)};
}

// sum (+)= s*q
inline void add(const int8_t *__restrict q, float scale, int64_t n, bool first, float *__restrict sum) {
  if (first)
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<float>(q[i]) * scale;
  else
    for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<float>(q[i]) * scale;
}

#if defined(__AVX2__)
#if defined(__AVX512F__)
using Words = __m512i;
inline Words words_of4(const uint8_t *bytes) { return _mm512_loadu_si512(bytes); }
inline Words words_of2(const uint8_t *bytes) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes)));
}
inline Words words_of1(const uint8_t *bytes) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
}
inline Words shifted(Words x, int right) { return _mm512_srli_epi32(x, static_cast<unsigned>(right)); }

// s*q of 16 codes. With fewer bits the values repeat, so that the next code's bits above a code do not matter.
struct Values {
  Vector all;
  Values(const float *numbers, float scale) : all(_mm512_mul_ps(_mm512_load_ps(numbers), _mm512_set1_ps(scale))) {}
  template <int bits>
  Vector of(Words codes, int right) const {
    return _mm512_permutexvar_ps(shifted(codes, right), all);
  }
};

// From element 8*l + j in lane l of vector j, to the order of memory.
inline void put_in_order(Vector *x) {
  __m512 a[8];  // for lanes 4L + t, in order: their first four elements (a[t]) and their last four (a[4 + t])
  for (int half = 0; half < 8; half += 4) {
    __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(x[half], x[half + 1]));
    __m512d low2 = _mm512_castps_pd(_mm512_unpacklo_ps(x[half + 2], x[half + 3]));
    __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(x[half], x[half + 1]));
    __m512d high2 = _mm512_castps_pd(_mm512_unpackhi_ps(x[half + 2], x[half + 3]));
    a[half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, low2));
    a[half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, low2));
    a[half + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, high2));
    a[half + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, high2));
  }
  for (int t = 0; t < 4; t += 2) {
    __m512 first = _mm512_shuffle_f32x4(a[t], a[4 + t], 0x44), last = _mm512_shuffle_f32x4(a[t], a[4 + t], 0xee);
    __m512 first2 = _mm512_shuffle_f32x4(a[t + 1], a[5 + t], 0x44);
    __m512 last2 = _mm512_shuffle_f32x4(a[t + 1], a[5 + t], 0xee);
    x[t / 2] = _mm512_shuffle_f32x4(first, first2, 0x88);
    x[t / 2 + 2] = _mm512_shuffle_f32x4(first, first2, 0xdd);
    x[t / 2 + 4] = _mm512_shuffle_f32x4(last, last2, 0x88);
    x[t / 2 + 6] = _mm512_shuffle_f32x4(last, last2, 0xdd);
  }
}
#else
using Words = __m256i;
inline Words words_of4(const uint8_t *bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
}
inline Words words_of2(const uint8_t *bytes) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
}
inline Words words_of1(const uint8_t *bytes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes)));
}
inline Words shifted(Words x, int right) {
  return right < 0 ? _mm256_slli_epi32(x, -right) : _mm256_srli_epi32(x, right);
}

// s*q of 8 codes in each half. With fewer bits the values repeat, so that the next code's bits do not matter.
struct Values {
  Vector low, high;
  Values(const float *numbers, float scale)
      : low(_mm256_mul_ps(_mm256_load_ps(numbers), _mm256_set1_ps(scale))),
        high(_mm256_mul_ps(_mm256_load_ps(numbers + 8), _mm256_set1_ps(scale))) {}
  template <int bits>
  Vector of(Words codes, int right) const {
    Vector found = _mm256_permutevar8x32_ps(low, shifted(codes, right));
    if (bits < 4) return found;
    Vector other = _mm256_permutevar8x32_ps(high, shifted(codes, right));
    return _mm256_blendv_ps(found, other, _mm256_castsi256_ps(shifted(codes, right - 28)));
  }
};

// From element 8*l + j in lane l of vector j, to the order of memory.
inline void put_in_order(Vector *x) {
  __m256 a[8];  // for lanes 4L + t, in order: their first four elements (a[t]) and their last four (a[4 + t])
  for (int half = 0; half < 8; half += 4) {
    __m256d low = _mm256_castps_pd(_mm256_unpacklo_ps(x[half], x[half + 1]));
    __m256d low2 = _mm256_castps_pd(_mm256_unpacklo_ps(x[half + 2], x[half + 3]));
    __m256d high = _mm256_castps_pd(_mm256_unpackhi_ps(x[half], x[half + 1]));
    __m256d high2 = _mm256_castps_pd(_mm256_unpackhi_ps(x[half + 2], x[half + 3]));
    a[half] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, low2));
    a[half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, low2));
    a[half + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high, high2));
    a[half + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high, high2));
  }
  for (int t = 0; t < 4; ++t) {
    x[t] = _mm256_permute2f128_ps(a[t], a[4 + t], 0x20);
    x[t + 4] = _mm256_permute2f128_ps(a[t], a[4 + t], 0x31);
  }
}
#endif

constexpr int64_t AT_ONCE = 8 * WIDTH;  // elements that are decoded at once

template <class Codec>
struct Numbers {  // q of every code, as floats, repeated up to 16
  alignas(64) float of[16];
  constexpr Numbers() : of{} {
    for (int code = 0; code < 16; ++code) of[code] = static_cast<float>(Codec::number(code % (1 << Codec::bits)));
  }
};

// Adds s*q of AT_ONCE codes to `sum`.
template <class Codec>
inline void add_at_once(const uint8_t *code, float scale, Vector *sum) {
  static constexpr Numbers<Codec> numbers;
  constexpr int bits = Codec::bits;
  const Values values(numbers.of, scale);
  Words words = bits == 4 ? words_of4(code) : bits == 1 ? words_of1(code) : words_of2(code);
  for (int j = 0; j < 8; ++j) sum[j] = sum[j] + values.template of<bits>(words, bits * j);
}

// Computes the sum of n elements; `sum` has room for AT_ONCE - 1 more. For whole groups of AT_ONCE among the first
// `rotated` elements it also runs the inverse rotation's stages between elements less than AT_ONCE apart: those between
// the 8 neighbours of a lane before the vectors are put in order. Returns the argument `done` of `rotate_back`.
template <class Codec>
int64_t sum_codes(const DecompressArguments &a, const Block &here, int64_t block, int64_t n, int64_t rotated,
                  float *sum) {
  constexpr int bits = Codec::bits;
  for (int64_t at = 0; at < n; at += AT_ONCE) {
    Vector sums[8];
    for (Vector &one : sums) one = all(-0.0f);  // its sum with any number, -0 too, is that number
    for (int64_t sender = 0; sender < a.senders; ++sender) {
      Coded one = coded(a, here, block, sender);
      const uint8_t *code = one.code + at * bits / 8;
      if (int64_t left = n - at; left >= AT_ONCE) {
        add_at_once<Codec>(code, one.scale, sums);
      } else {  // a copy, so that no byte after the codes is read
        uint8_t codes[AT_ONCE * bits / 8] = {};
        std::memcpy(codes, code, (left * bits + 7) / 8);
        add_at_once<Codec>(codes, one.scale, sums);
      }
    }
    const bool rotates = at + AT_ONCE <= rotated;
    if (rotates) across(sums, 8);
    put_in_order(sums);
    if (rotates) {
      if constexpr (WIDTH == 16)
        for (Vector &one : sums) one = paired<8>(one);
      across(sums, 8);
    }
    for (int64_t i = 0; i < 8; ++i) put(sum + at + i * WIDTH, sums[i]);
  }
  return AT_ONCE;
}
#else
constexpr int64_t AT_ONCE = 8;

// The numbers q of every byte of codes.
template <class Codec>
struct Numbers {
  static constexpr int per_byte = 8 / Codec::bits;
  int8_t of[256][per_byte];
  constexpr Numbers() : of{} {
    for (int byte = 0; byte < 256; ++byte)
      for (int k = 0; k < per_byte; ++k)
        of[byte][k] = static_cast<int8_t>(Codec::number(byte >> k * Codec::bits & ((1 << Codec::bits) - 1)));
  }
};

// Decodes n codes to numbers q; it writes up to 7 numbers more than n.
template <class Codec>
void unpack(const Coded &one, int64_t n, int8_t *q) {
  static constexpr Numbers<Codec> numbers;
  constexpr int per_byte = numbers.per_byte;
  if constexpr (Codec::bits == 4 && !is_levels<Codec>)
    for (int64_t k = 0; k < (n + 1) / 2; ++k) {  // the compiler vectorizes this loop
      q[2 * k] = static_cast<int8_t>(static_cast<int8_t>(static_cast<uint8_t>(one.code[k] << 4)) >> 4);
      q[2 * k + 1] = static_cast<int8_t>(static_cast<int8_t>(one.code[k]) >> 4);
    }
  else
    for (int64_t k = 0; k < (n + per_byte - 1) / per_byte; ++k)
      std::memcpy(q + k * per_byte, numbers.of[one.code[k]], per_byte);
}

// Computes the sum of n elements, without any stage of the rotation.
template <class Codec>
int64_t sum_codes(const DecompressArguments &a, const Block &here, int64_t block, int64_t n, int64_t, float *sum) {
  constexpr int64_t PIECE = 512;
  int8_t q[PIECE + 8];
  for (int64_t sender = 0; sender < a.senders; ++sender)
    for (int64_t at = 0; at < n; at += PIECE) {
      Coded one = coded(a, here, block, sender);
      one.code += at * Codec::bits / 8;
      int64_t count = std::min(PIECE, n - at);
      unpack<Codec>(one, count, q);
      add(q, one.scale, count, sender == 0, sum + at);
    }
  return 1;
}
#endif

// Codes of 8 bits are the numbers q themselves; no stage of the rotation is run.
template <>
int64_t sum_codes<Uniform<8>>(const DecompressArguments &a, const Block &here, int64_t block, int64_t n, int64_t,
                              float *sum) {
  for (int64_t sender = 0; sender < a.senders; ++sender) {
    Coded one = coded(a, here, block, sender);
    add(reinterpret_cast<const int8_t *>(one.code), one.scale, n, sender == 0, sum);
  }
  return 1;
}

}  // namespace
}  // namespace VARIANT
