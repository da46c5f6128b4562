// The codes of each codec (quantization/uniform.py, levels.py, sign.py), and their places in a payload.
#pragma once
#include "floats.h"

namespace VARIANT {
namespace {

// --- the codecs: bits, the number q of each code, and the largest one ---

template <int width>
struct Uniform {
  static constexpr int bits = width, largest = (1 << (width - 1)) - 1;
  static constexpr int number(int code) { return code >> (width - 1) ? code - (1 << width) : code; }
};

template <int width>
struct Levels {
  static constexpr int bits = width, count = 1 << (width - 1);  // count: number of positive levels
  static constexpr int level(int k) {
    constexpr int of4[] = {3, 9, 15, 21, 28, 36, 46, 61}, of2[] = {3, 10};
    return width == 4 ? of4[k] : of2[k];
  }
  static constexpr int number(int code) { return code < count ? level(code) : -level(code - count); }
  static constexpr int largest = width == 4 ? 61 : 10;
  static constexpr double step = width == 4 ? 0.0448032 : 0.151035;  // c of quantization/levels.py
};

struct Sign {
  static constexpr int bits = 1, largest = 1;
  static constexpr int number(int code) { return 2 * code - 1; }
};

template <class Codec>
constexpr bool is_levels = false;
template <int width>
constexpr bool is_levels<Levels<width>> = true;

// --- the place of a block's codes ---

struct Block {
  int64_t start, length;  // the block's first element in the shard, and number of elements
  int64_t code, end;      // the bytes of the payload where its codes begin, and end
};

template <int bits>
inline Block block_of(const Layout &layout, int64_t shard, int64_t block) {
  Block found;
  const int32_t *place = layout.places + 3 * (shard * layout.blocks + block);
  const int64_t word = layout.word_bytes;
  found.start = place[0], found.length = place[1], found.code = place[2] * word;
  found.end = found.code + (found.length * bits + 8 * word - 1) / (8 * word) * word;
  return found;
}

// --- codes <-> bytes: the first element in the lowest bits ---

// Joins pairs of numbers of `bits` bits to numbers of twice as many bits.
template <int bits>
inline void join(const uint8_t *__restrict numbers, int64_t pairs, uint8_t *__restrict joined) {
  for (int64_t k = 0; k < pairs; ++k)
    joined[k] = static_cast<uint8_t>(numbers[2 * k] | numbers[2 * k + 1] << bits);
}

// Packs the lowest `bits` bits of n whole numbers. It reads up to 7 numbers after them, and writes only the bytes that
// they need.
template <int bits>
void pack(const int32_t *__restrict whole, int64_t n, uint8_t *__restrict scratch, uint8_t *__restrict bytes) {
  constexpr int per_byte = 8 / bits;
  int64_t count = (n + per_byte - 1) / per_byte, numbers = count * per_byte;
  uint8_t *single = bits == 8 ? bytes : scratch, *pair = scratch + numbers, *quad = pair + numbers / 2;
  for (int64_t i = 0; i < numbers; ++i) single[i] = static_cast<uint8_t>(whole[i] & ((1 << bits) - 1));
  if (bits == 4) join<4>(single, count, bytes);
  if (bits == 2) join<2>(single, 2 * count, pair), join<4>(pair, count, bytes);
  if (bits == 1) join<1>(single, 4 * count, pair), join<2>(pair, 2 * count, quad), join<4>(quad, count, bytes);
}

}  // namespace
}  // namespace VARIANT
