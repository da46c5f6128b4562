// The line of weights' bit patterns (weights/code.py), and the two sums of a shard (weights/sums.py).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace VARIANT {
namespace {

constexpr int64_t PIECE = 2048;  // weights of a tile of weights/sums.py

// Returns the place of a bit pattern on the line, on which -0 is next to +0; the function is its own inverse.
inline uint16_t line(uint16_t bits) { return bits ^ (static_cast<int16_t>(bits) >> 15 & 0x7fff); }

// The keys of a piece's words for both sums.
struct Keys {
  alignas(64) uint32_t of[2][PIECE / 2] = {};
  constexpr Keys() {
    for (uint32_t j = 0; j < PIECE / 2; ++j) {
      uint32_t key = (j + 1) * 0x9e3779b1u;
      key = (key ^ key >> 15) * 0x85ebca6bu;
      key = (key ^ key >> 13) * 0xc2b2ae35u;
      key ^= key >> 16;
      of[0][j] = key;
      of[1][j] = key >> 16 | key << 16;
    }
  }
};
constexpr Keys keys;

// Computes both sums of products of a piece's words, two by two, each plus its key. They are exact in any order.
inline void products(const uint16_t *piece, uint64_t *sums) {
#if defined(__AVX512F__)
  __m512i a = _mm512_setzero_si512(), b = a;
  for (int64_t j = 0; j < PIECE / 2; j += 16) {
    const __m512i words = _mm512_loadu_si512(piece + 2 * j);
    const __m512i x = _mm512_add_epi32(words, _mm512_load_si512(keys.of[0] + j));
    const __m512i y = _mm512_add_epi32(words, _mm512_load_si512(keys.of[1] + j));
    a = _mm512_add_epi64(a, _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)));
    b = _mm512_add_epi64(b, _mm512_mul_epu32(y, _mm512_srli_epi64(y, 32)));
  }
  sums[0] = static_cast<uint64_t>(_mm512_reduce_add_epi64(a));
  sums[1] = static_cast<uint64_t>(_mm512_reduce_add_epi64(b));
#elif defined(__AVX2__)
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t j = 0; j < PIECE / 2; j += 8) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(piece + 2 * j));
    const __m256i x = _mm256_add_epi32(words, _mm256_load_si256(reinterpret_cast<const __m256i *>(keys.of[0] + j)));
    const __m256i y = _mm256_add_epi32(words, _mm256_load_si256(reinterpret_cast<const __m256i *>(keys.of[1] + j)));
    a = _mm256_add_epi64(a, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
    b = _mm256_add_epi64(b, _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
  }
  alignas(32) uint64_t lanes[2][4];
  _mm256_store_si256(reinterpret_cast<__m256i *>(lanes[0]), a);
  _mm256_store_si256(reinterpret_cast<__m256i *>(lanes[1]), b);
  for (int k = 0; k < 2; ++k) sums[k] = lanes[k][0] + lanes[k][1] + lanes[k][2] + lanes[k][3];
#elif defined(__SSE2__)
  __m128i a = _mm_setzero_si128(), b = a;
  for (int64_t j = 0; j < PIECE / 2; j += 4) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i *>(piece + 2 * j));
    const __m128i x = _mm_add_epi32(words, _mm_load_si128(reinterpret_cast<const __m128i *>(keys.of[0] + j)));
    const __m128i y = _mm_add_epi32(words, _mm_load_si128(reinterpret_cast<const __m128i *>(keys.of[1] + j)));
    a = _mm_add_epi64(a, _mm_mul_epu32(x, _mm_srli_epi64(x, 32)));
    b = _mm_add_epi64(b, _mm_mul_epu32(y, _mm_srli_epi64(y, 32)));
  }
  alignas(16) uint64_t lanes[2][2];
  _mm_store_si128(reinterpret_cast<__m128i *>(lanes[0]), a);
  _mm_store_si128(reinterpret_cast<__m128i *>(lanes[1]), b);
  for (int k = 0; k < 2; ++k) sums[k] = lanes[k][0] + lanes[k][1];
#else
  sums[0] = sums[1] = 0;
  for (int64_t j = 0; j < PIECE / 2; j += 2) {
    uint32_t words[2];
    std::memcpy(words, piece + 2 * j, 8);
    for (int k = 0; k < 2; ++k) {
      const uint32_t even = words[0] + keys.of[k][j], odd = words[1] + keys.of[k][j + 1];
      sums[k] += static_cast<uint64_t>(even) * odd;
    }
  }
#endif
}

// The two sums of a shard, piece by piece.
struct Sums {
  uint64_t of[2] = {0, 0};

  // Adds the n weights of piece number `place`.
  void add(const uint16_t *weights, int64_t n, int64_t place) {
    uint64_t found[2];
    if (n == PIECE) {
      products(weights, found);
    } else {
      uint16_t filled[PIECE] = {};
      std::memcpy(filled, weights, 2 * n);
      products(filled, found);
    }
    for (int k = 0; k < 2; ++k) {
      uint64_t z = found[k] + (static_cast<uint64_t>(place) + 1) * 0x9e3779b97f4a7c15u;
      z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
      z = (z ^ z >> 27) * 0x94d049bb133111ebu;
      of[k] += z ^ z >> 31;
    }
  }

  void add_all(const uint16_t *weights, int64_t n) {
    for (int64_t start = 0; start < n; start += PIECE) add(weights + start, std::min(PIECE, n - start), start / PIECE);
  }
};

}  // namespace
}  // namespace VARIANT
