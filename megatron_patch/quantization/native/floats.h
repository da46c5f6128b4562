// Floats and their bits; loads and stores of the three float types of gradients and sums.
#pragma once
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace VARIANT {
namespace {

constexpr uint32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

struct Fp32 {
  using Stored = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};

struct Bf16 {
  using Stored = uint16_t;
  static float load(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
  static uint16_t store(float value) {  // to nearest, ties to even
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & MAGNITUDE) > INFINITE ? 0x7fc0 : rounded;
  }
};

struct Fp16 {
  using Stored = uint16_t;
  static float load(uint16_t half) {
    // With exponent and mantissa moved to fp32's places, the number is 2^112 times too small; so are subnormals.
    uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
    uint32_t bits = as_bits(as_float(magnitude) * 0x1p112f);
    bits = (half & 0x7c00) == 0x7c00 ? (magnitude | INFINITE) : bits;
    return as_float(bits | static_cast<uint32_t>(half & 0x8000) << 16);
  }
  static uint16_t store(float value) {  // to nearest, ties to even; from 65520 on infinite
    uint32_t bits = as_bits(value), magnitude = bits & MAGNITUDE;
    uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
    uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(
        std::nearbyint(std::min(as_float(magnitude), 1.0f) * 0x1p24f)));
    uint32_t half = magnitude < 0x38800000 ? small : normal;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half;
    half = magnitude > INFINITE ? 0x7e00 : half;
    return static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
  }
};

template <class Float>
void load(const void *stored, int64_t place, int64_t n, float *values) {
  auto from = static_cast<const typename Float::Stored *>(stored) + place;
  for (int64_t i = 0; i < n; ++i) values[i] = Float::load(from[i]);
}

template <class Float>
void store(const float *values, int64_t n, void *stored, int64_t place) {
  auto to = static_cast<typename Float::Stored *>(stored) + place;
  for (int64_t i = 0; i < n; ++i) to[i] = Float::store(values[i]);
}

void load_as(int64_t type, const void *stored, int64_t place, int64_t n, float *values) {
  if (type == FP32) load<Fp32>(stored, place, n, values);
  if (type == BF16) load<Bf16>(stored, place, n, values);
  if (type == FP16) load<Fp16>(stored, place, n, values);
}

void store_as(int64_t type, const float *values, int64_t n, void *stored, int64_t place) {
  if (type == FP32) store<Fp32>(values, n, stored, place);
  if (type == BF16) store<Bf16>(values, n, stored, place);
  if (type == FP16) store<Fp16>(values, n, stored, place);
}

}  // namespace
}  // namespace VARIANT
