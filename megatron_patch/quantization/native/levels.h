// The level nearest to each number of a block: quantization/levels.py defines it.
#pragma once
#include "codes.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace VARIANT {
namespace {

// s*q of the positive levels, and the middles between them: `middle[k]` is below level k.
template <class Codec>
struct Scaled {
  static constexpr int count = Codec::count;
  float middle[count], value[count];
  explicit Scaled(float scale) {
    for (int k = 0; k < count; ++k) value[k] = scale * static_cast<float>(Codec::level(k));
    for (int k = 1; k < count; ++k)
      middle[k] = scale * (static_cast<float>(Codec::level(k - 1) + Codec::level(k)) / 2);
  }

  // What is sent of h; its code is left in `code`.
  float nearest(float h, int32_t &code) const {
    float magnitude = std::fabs(h), sent = value[0];
    int32_t found = 0;
    for (int k = 1; k < count; ++k) {
      found = magnitude > middle[k] ? k : found;
      sent = magnitude > middle[k] ? value[k] : sent;
    }
    code = h < 0 ? found + count : found;
    return h < 0 ? -sent : sent;
  }
};

#if defined(__AVX2__)
// The same for a vector: the middles are looked up in a register, by halves of what is left of them.
template <class Codec>
class Lookup {
  static constexpr int count = Codec::count;

 public:
#if defined(__AVX512F__)
  static constexpr int64_t width = 16;
  using Floats = __m512;
  explicit Lookup(const Scaled<Codec> &scaled) : first(_mm512_set1_ps(scaled.middle[count / 2])) {
    alignas(64) float by2[16] = {}, by1[16] = {}, sent[16] = {};
    fill(scaled, by2, by1, sent);
    for (int k = 0; k < count; ++k) sent[count + k] = -sent[k];
    ahead2 = _mm512_load_ps(by2), ahead1 = _mm512_load_ps(by1), values = _mm512_load_ps(sent);
  }

  // Codes and h - s*q of `width` numbers; returns the squares of the latter.
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
  static __mmask16 above(__m512 magnitude, __m512 middle) {
    return _mm512_cmp_ps_mask(magnitude, middle, _CMP_GT_OQ);
  }
  static __m512i advanced(__m512i code, __mmask16 where, int by) {
    return _mm512_mask_add_epi32(code, where, code, _mm512_set1_epi32(by));
  }
#else
  static constexpr int64_t width = 8;
  using Floats = __m256;
  explicit Lookup(const Scaled<Codec> &scaled) : first(_mm256_set1_ps(scaled.middle[count / 2])) {
    alignas(32) float by2[8] = {}, by1[8] = {}, sent[8] = {};
    fill(scaled, by2, by1, sent);
    ahead2 = _mm256_load_ps(by2), ahead1 = _mm256_load_ps(by1), values = _mm256_load_ps(sent);
  }

  // Codes and h - s*q of `width` numbers; returns the squares of the latter.
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
  static __m256 above(__m256 magnitude, __m256 middle) { return _mm256_cmp_ps(magnitude, middle, _CMP_GT_OQ); }
  static __m256i where(__m256 mask, int value) {
    return _mm256_and_si256(_mm256_castps_si256(mask), _mm256_set1_epi32(value));
  }
#endif
  static void fill(const Scaled<Codec> &scaled, float *by2, float *by1, float *sent) {
    for (int k = 0; k < count; ++k) sent[k] = scaled.value[k];
    for (int k = 0; k + 1 < count; ++k) by1[k] = scaled.middle[k + 1];
    for (int k = 0; k + 2 < count; ++k) by2[k] = scaled.middle[k + 2];
  }
};
#endif

// Codes and r = h - s*q of n numbers; returns the sum of r^2, in fp32.
template <class Codec>
float to_levels(const float *__restrict h, const Scaled<Codec> &scaled, int64_t n, int32_t *__restrict codes,
                float *__restrict r) {
  float energy = 0;
  int64_t done = 0;
#if defined(__AVX2__)
  const Lookup<Codec> lookup(scaled);
  alignas(64) float lanes[Lookup<Codec>::width] = {};
  typename Lookup<Codec>::Floats sums = {};
  for (; done + lookup.width <= n; done += lookup.width)
    sums = sums + lookup.quantize(h + done, codes + done, r + done);
  std::memcpy(lanes, &sums, sizeof lanes);
  for (float lane : lanes) energy += lane;
#endif
#pragma omp simd reduction(+ : energy)
  for (int64_t i = done; i < n; ++i) {
    r[i] = h[i] - scaled.nearest(h[i], codes[i]);
    energy += r[i] * r[i];
  }
  return energy;
}

}  // namespace
}  // namespace VARIANT
