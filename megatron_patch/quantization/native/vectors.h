// Vectors of WIDTH floats for each instruction set, with sums and maxima.
#pragma once
#include "floats.h"

#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace VARIANT {
namespace {

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;
using Vector = __m512;
inline Vector vector_at(const float *from) { return _mm512_loadu_ps(from); }
inline void put(float *to, Vector x) { _mm512_storeu_ps(to, x); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
inline float total(Vector x) { return _mm512_reduce_add_ps(x); }

// The bits of the largest magnitude so far. Magnitudes' bits compare like whole numbers, NaN and Inf above the rest.
struct Largest {
  __m512i bits = _mm512_setzero_si512();
  void meet(Vector x) {
    bits = _mm512_max_epi32(bits, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(MAGNITUDE)));
  }
  uint32_t found() const { return _mm512_reduce_max_epi32(bits); }
};
#elif defined(__SSE2__)
inline float total_of4(__m128 x) {
  x = x + _mm_movehl_ps(x, x);
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline __m128i larger(__m128i a, __m128i b) {
  const __m128i above = _mm_cmpgt_epi32(a, b);
  return _mm_or_si128(_mm_and_si128(above, a), _mm_andnot_si128(above, b));
}
inline uint32_t largest_of4(__m128i x) {
  x = larger(x, _mm_shuffle_epi32(x, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(larger(x, _mm_shuffle_epi32(x, 0xb1))));
}

#if defined(__AVX2__)
constexpr int64_t WIDTH = 8;
using Vector = __m256;
inline Vector vector_at(const float *from) { return _mm256_loadu_ps(from); }
inline void put(float *to, Vector x) { _mm256_storeu_ps(to, x); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline float total(Vector x) { return total_of4(_mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1)); }

struct Largest {
  __m256i bits = _mm256_setzero_si256();
  void meet(Vector x) {
    bits = _mm256_max_epi32(bits, _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(MAGNITUDE)));
  }
  uint32_t found() const {
    return largest_of4(larger(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
  }
};
#else
constexpr int64_t WIDTH = 4;
using Vector = __m128;
inline Vector vector_at(const float *from) { return _mm_loadu_ps(from); }
inline void put(float *to, Vector x) { _mm_storeu_ps(to, x); }
inline Vector all(float x) { return _mm_set1_ps(x); }
inline float total(Vector x) { return total_of4(x); }

struct Largest {
  __m128i bits = _mm_setzero_si128();
  void meet(Vector x) { bits = larger(bits, _mm_and_si128(_mm_castps_si128(x), _mm_set1_epi32(MAGNITUDE))); }
  uint32_t found() const { return largest_of4(bits); }
};
#endif
#else
constexpr int64_t WIDTH = 1;
using Vector = float;
inline Vector vector_at(const float *from) { return *from; }
inline void put(float *to, Vector x) { *to = x; }
inline Vector all(float x) { return x; }
inline float total(Vector x) { return x; }

struct Largest {
  uint32_t bits = 0;
  void meet(Vector x) { bits = std::max(bits, as_bits(x) & MAGNITUDE); }
  uint32_t found() const { return bits; }
};
#endif

// Loads the first `count` numbers of a vector, with zeros after them.
inline Vector vector_at(const float *from, int64_t count) {
  if (count == WIDTH) return vector_at(from);
  float some[WIDTH] = {};
  std::copy(from, from + count, some);
  return vector_at(some);
}

inline void put(float *to, Vector x, int64_t count) {
  if (count == WIDTH) return put(to, x);
  float some[WIDTH];
  put(some, x);
  std::copy(some, some + count, to);
}

// Calls work(i, count) for every vector of the elements `from` to `to` - 1; all but the last one have WIDTH.
template <class Work>
inline void by_vectors(int64_t from, int64_t to, Work work) {
  int64_t i = from;
  for (; i + WIDTH <= to; i += WIDTH) work(i, std::integral_constant<int64_t, WIDTH>());
  if (i < to) work(i, to - i);
}

}  // namespace
}  // namespace VARIANT
