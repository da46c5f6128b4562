// The level nearest to each number of a block: quantization/levels.py defines it.
#pragma once
#include "codes.h"
#include "vectors.h"

namespace VARIANT {
namespace {

// The levels and their middles, as tables for registers. Their products with s are exact.
template <class Codec>
struct Tables {
  static constexpr int count = Codec::count;
  // `number`: q of each code; `below`: the middle below each level; `ahead1`, `ahead2`: the middle below the level one
  // and two further.
  alignas(64) float number[16], below[16], ahead1[16], ahead2[16];
  constexpr Tables() : number{}, below{}, ahead1{}, ahead2{} {
    for (int k = 0; k < 2 * count; ++k) number[k] = static_cast<float>(Codec::number(k));
    for (int k = 1; k < count; ++k) below[k] = (number[k - 1] + number[k]) / 2;
    for (int k = 0; k + 1 < count; ++k) ahead1[k] = below[k + 1];
    for (int k = 0; k + 2 < count; ++k) ahead2[k] = below[k + 2];
  }
};

template <class Codec>
constexpr Tables<Codec> tables;

// Returns s*q for h, and writes its code to `code`.
template <class Codec>
inline float nearest(float h, float scale, int32_t &code) {
  constexpr int count = Codec::count;
  float magnitude = std::fabs(h), number = tables<Codec>.number[0];
  int32_t found = 0;
  for (int k = 1; k < count; ++k) {
    bool above = magnitude > tables<Codec>.below[k] * scale;
    found = above ? k : found;
    number = above ? tables<Codec>.number[k] : number;
  }
  code = h < 0 ? found + count : found;
  return h < 0 ? -number * scale : number * scale;
}

#if defined(__AVX2__)
// The same for a vector: a binary search, which looks up middles in registers.
template <class Codec>
class Lookup {
  static constexpr int count = Codec::count;
  static constexpr const Tables<Codec> &of = tables<Codec>;

 public:
#if defined(__AVX512F__)
  explicit Lookup(float scale)
      : first(_mm512_set1_ps(scale * of.below[count / 2])), ahead2(scaled(of.ahead2, scale)),
        ahead1(scaled(of.ahead1, scale)), values(scaled(of.number, scale)) {}

  // Writes the codes and h - s*q of a vector; returns the squares of h - s*q.
  __m512 quantize(const float *from, int32_t *codes, float *lost) const {
    const __m512 h = _mm512_loadu_ps(from), magnitude = _mm512_abs_ps(h);
    __m512i code = _mm512_maskz_set1_epi32(above(magnitude, first), count / 2);
    if constexpr (count > 4)
      code = advanced(code, above(magnitude, _mm512_permutexvar_ps(code, ahead2)), 2);
    if constexpr (count > 2)
      code = advanced(code, above(magnitude, _mm512_permutexvar_ps(code, ahead1)), 1);
    code = advanced(code, _mm512_cmp_ps_mask(h, _mm512_setzero_ps(), _CMP_LT_OQ), count);
    const __m512 left = _mm512_sub_ps(h, _mm512_permutexvar_ps(code, values));
    _mm512_storeu_si512(codes, code);
    _mm512_storeu_ps(lost, left);
    return _mm512_mul_ps(left, left);
  }

 private:
  __m512 first, ahead2, ahead1, values;
  static __m512 scaled(const float *table, float scale) { return _mm512_load_ps(table) * _mm512_set1_ps(scale); }
  static __mmask16 above(__m512 magnitude, __m512 middle) {
    return _mm512_cmp_ps_mask(magnitude, middle, _CMP_GT_OQ);
  }
  static __m512i advanced(__m512i code, __mmask16 where, int by) {
    return _mm512_mask_add_epi32(code, where, code, _mm512_set1_epi32(by));
  }
#else
  explicit Lookup(float scale)
      : first(_mm256_set1_ps(scale * of.below[count / 2])), ahead2(scaled(of.ahead2, scale)),
        ahead1(scaled(of.ahead1, scale)), values(scaled(of.number, scale)) {}

  // Writes the codes and h - s*q of a vector; returns the squares of h - s*q.
  __m256 quantize(const float *from, int32_t *codes, float *lost) const {
    const __m256 h = _mm256_loadu_ps(from), sign = _mm256_set1_ps(-0.0f);
    const __m256 magnitude = _mm256_andnot_ps(sign, h);
    __m256i code = where(above(magnitude, first), count / 2);
    if constexpr (count > 4)
      code = _mm256_or_si256(code, where(above(magnitude, _mm256_permutevar8x32_ps(ahead2, code)), 2));
    if constexpr (count > 2)
      code = _mm256_or_si256(code, where(above(magnitude, _mm256_permutevar8x32_ps(ahead1, code)), 1));
    const __m256 negative = _mm256_cmp_ps(h, _mm256_setzero_ps(), _CMP_LT_OQ);
    const __m256 sent = _mm256_xor_ps(_mm256_permutevar8x32_ps(values, code), _mm256_and_ps(negative, sign));
    const __m256 left = _mm256_sub_ps(h, sent);
    code = _mm256_or_si256(code, where(negative, count));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(codes), code);
    _mm256_storeu_ps(lost, left);
    return _mm256_mul_ps(left, left);
  }

 private:
  __m256 first, ahead2, ahead1, values;
  static __m256 scaled(const float *table, float scale) { return _mm256_load_ps(table) * _mm256_set1_ps(scale); }
  static __m256 above(__m256 magnitude, __m256 middle) { return _mm256_cmp_ps(magnitude, middle, _CMP_GT_OQ); }
  static __m256i where(__m256 mask, int value) {
    return _mm256_and_si256(_mm256_castps_si256(mask), _mm256_set1_epi32(value));
  }
#endif
};
#endif

// Writes the codes and r = h - s*q of n numbers; returns the sum of r^2, in fp32.
template <class Codec>
float to_levels(const float *__restrict h, float scale, int64_t n, int32_t *__restrict codes,
                float *__restrict r) {
  float energy = 0;
  int64_t done = 0;
#if defined(__AVX2__)
  const Lookup<Codec> lookup(scale);
  Vector sums = {};
  for (; done + WIDTH <= n; done += WIDTH) sums = sums + lookup.quantize(h + done, codes + done, r + done);
  energy = total(sums);
  for (int64_t i = done; i < n; ++i) {
#else
#pragma omp simd reduction(+ : energy)
  for (int64_t i = done; i < n; ++i) {
#endif
    r[i] = h[i] - nearest<Codec>(h[i], scale, codes[i]);
    energy += r[i] * r[i];
  }
  return energy;
}

}  // namespace
}  // namespace VARIANT
