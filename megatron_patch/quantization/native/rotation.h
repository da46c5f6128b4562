// The rotation of a block and its inverse, which quantization/rotation.py defines. Every addition has the same two
// operands as there, stage by stage from neighbours on, so that it rounds alike.
#pragma once
#include "vectors.h"

#include <memory>

namespace VARIANT {
namespace {

// One stage of the butterflies: adds to each number the one `distance` places on, or subtracts it from the one
// `distance` places back. It is written with intrinsics because gcc 12 makes fused multiply-adds with alternating
// signs from plain loops, whatever -ffp-contract says. The fused multiply-adds here round as the sums do, since a
// product with +-1 is exact.
template <int distance>
inline Vector paired(Vector x) {
#if defined(__AVX512F__)
  Vector other = distance == 1   ? _mm512_permute_ps(x, 0xb1)
                 : distance == 2 ? _mm512_permute_ps(x, 0x4e)
                 : distance == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1)
                                 : _mm512_shuffle_f32x4(x, x, 0x4e);
  const __mmask16 back = distance == 1 ? 0xaaaa : distance == 2 ? 0xcccc : distance == 4 ? 0xf0f0 : 0xff00;
  return _mm512_fmadd_ps(x, _mm512_mask_blend_ps(back, _mm512_set1_ps(1), _mm512_set1_ps(-1)), other);
#elif defined(__AVX2__)
  Vector other = distance == 1   ? _mm256_permute_ps(x, 0xb1)
                 : distance == 2 ? _mm256_permute_ps(x, 0x4e)
                                 : _mm256_permute2f128_ps(x, x, 0x01);
  constexpr int back = distance == 1 ? 0xaa : distance == 2 ? 0xcc : 0xf0;
  return _mm256_fmadd_ps(x, _mm256_blend_ps(_mm256_set1_ps(1), _mm256_set1_ps(-1), back), other);
#elif defined(__SSE2__)
  Vector other = distance == 1 ? _mm_shuffle_ps(x, x, 0xb1) : _mm_shuffle_ps(x, x, 0x4e);
  Vector sign = distance == 1 ? _mm_setr_ps(0.0f, -0.0f, 0.0f, -0.0f) : _mm_setr_ps(0.0f, 0.0f, -0.0f, -0.0f);
  return _mm_add_ps(_mm_xor_ps(x, sign), other);
#else
  return x;
#endif
}

// Runs the stages between `count` vectors, a power of two.
inline void across(Vector *x, int64_t count) {
  for (int64_t distance = 1; distance < count; distance *= 2)
    for (int64_t i = 0; i < count; ++i)
      if (!(i & distance)) {
        Vector a = x[i], b = x[i + distance];
        x[i] = a + b, x[i + distance] = a - b;
      }
}

// The longest part whose stages are all done in registers.
constexpr int64_t PART = 128;
enum Multiplied { BEFORE, AFTER, NOT };

// Multiplies by d if `multiplied` is BEFORE, and runs the stages within a vector, for a part of n elements.
template <int64_t n, Multiplied multiplied>
inline Vector stages(Vector x, const float *d) {
  if constexpr (multiplied == BEFORE) x = x * vector_at(d);
  if constexpr (WIDTH > 1 && n > 1) x = paired<1>(x);
  if constexpr (WIDTH > 2 && n > 2) x = paired<2>(x);
  if constexpr (WIDTH > 4 && n > 4) x = paired<4>(x);
  if constexpr (WIDTH > 8 && n > 8) x = paired<8>(x);
  return x;
}

// Computes H (d * x), d * (H x) or H x of n elements, a power of two up to PART. `from` and `to` may be the same.
template <int64_t n, Multiplied multiplied>
inline void butterflies(const float *from, const float *d, float *to) {
  if constexpr (n < WIDTH) {  // the part fills a register's first lanes
    const Vector some = vector_at(d, n);
    float factors[WIDTH];
    put(factors, some);
    Vector y = stages<n, multiplied>(vector_at(from, n), factors);
    if constexpr (multiplied == AFTER) y = y * some;
    put(to, y, n);
    return;
  }
  constexpr int64_t count = n / WIDTH;
  Vector x[count + (count == 0)];
  for (int64_t i = 0; i < count; ++i)
    x[i] = stages<n, multiplied>(vector_at(from + i * WIDTH), d + i * WIDTH);
  across(x, count);
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (multiplied == AFTER) x[i] = x[i] * vector_at(d + i * WIDTH);
    put(to + i * WIDTH, x[i]);
  }
}

// Runs the stages between elements `done` or more apart, and multiplies by d if `multiplied` is AFTER.
template <Multiplied multiplied>
void far_stages(const float *d, int64_t done, int64_t n, float *to) {
  for (int64_t distance = done; distance < n; distance *= 2)
    for (int64_t pair = 0; pair < n; pair += 2 * distance) {
      float *__restrict low = to + pair, *__restrict high = low + distance;
      for (int64_t i = 0; i < distance; ++i) {
        float a = low[i], b = high[i];
        low[i] = a + b, high[i] = a - b;
      }
    }
  if (multiplied == AFTER)
    for (int64_t i = 0; i < n; ++i) to[i] *= d[i];
}

// Computes what `butterflies` does, for n of any power of two.
template <Multiplied multiplied>
void hadamard(const float *from, const float *d, int64_t n, float *to) {
  switch (n) {
    case 1: return butterflies<1, multiplied>(from, d, to);
    case 2: return butterflies<2, multiplied>(from, d, to);
    case 4: return butterflies<4, multiplied>(from, d, to);
    case 8: return butterflies<8, multiplied>(from, d, to);
    case 16: return butterflies<16, multiplied>(from, d, to);
    case 32: return butterflies<32, multiplied>(from, d, to);
    case 64: return butterflies<64, multiplied>(from, d, to);
    case PART: return butterflies<PART, multiplied>(from, d, to);
    default: break;
  }
  constexpr Multiplied in_parts = multiplied == AFTER ? NOT : multiplied;
  for (int64_t at = 0; at < n; at += PART) butterflies<PART, in_parts>(from + at, d + at, to + at);
  far_stages<multiplied>(d, PART, n, to);
}

// Calls work(at, size) for every part of a block of n elements.
template <class Work>
void by_parts(int64_t n, Work work) {
  for (int64_t at = 0, size; at < n; at += size) {
    size = int64_t{1} << (63 - __builtin_clzll(static_cast<uint64_t>(n - at)));
    work(at, size);
  }
}

// The diagonal d: a block's signs, each times the root of 1 / the length of its part.
class Diagonal {
 public:
  Diagonal(const float *signs, int64_t block) : signs(signs), numbers(new float[signs ? block : 0]) {}

  // Returns d for a block of n elements; it is computed only if the last block had another length.
  const float *of(int64_t n) {
    if (n != length)
      by_parts(length = n, [this](int64_t at, int64_t size) {
        float root = 1;  // products with powers of two are exact
        for (int64_t left = size; left > 1; left /= 4) root *= left == 2 ? 0.70710678118654752f : 0.5f;
        for (int64_t i = at; i < at + size; ++i) numbers[i] = signs[i] * root;
      });
    return numbers.get();
  }

 private:
  const float *signs;
  std::unique_ptr<float[]> numbers;
  int64_t length = 0;
};

// Computes y = H (d * x) for a block of n elements.
inline void rotate(const float *x, const float *d, int64_t n, float *y) {
  by_parts(n, [=](int64_t at, int64_t size) { hadamard<BEFORE>(x + at, d + at, size, y + at); });
}

// Computes y <- d * (H y) for a block of n elements. In parts of `done` or more elements, the stages between elements
// less than `done` apart have been run before.
inline void rotate_back(float *y, const float *d, int64_t n, int64_t done) {
  by_parts(n, [=](int64_t at, int64_t size) {
    if (done > 1 && size >= done)
      far_stages<AFTER>(d + at, done, size, y + at);
    else
      hadamard<AFTER>(y + at, d + at, size, y + at);
  });
}

}  // namespace
}  // namespace VARIANT
