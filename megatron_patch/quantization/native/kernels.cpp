// LoCo's compress and decompress_reduce, each in one pass over memory: block by block, in the first-level
// cache. quantization/uniform.py and sign.py define the numbers and are the place to read them; here every step of it
// appears once, in the same fp32 operations, so that codes, scales and errors are the same bits.
//
// Compiled once per instruction set (VARIANT names the namespace); dispatch.cpp picks one at run time.
// -ffp-contract=off is part of the format: a fused multiply-add would round differently.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

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

// --- the three float types of gradients, in and out ---

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
    // Exponent and mantissa in their fp32 places are 2^112 too small, subnormals included.
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

// --- scales ---

template <int bits>
constexpr float levels() {
  return bits == 1 ? 1.0f : static_cast<float>((1 << (bits - 1)) - 1);
}

template <int bits>
float largest_scale() {  // the largest bf16 s for which levels * s is a finite fp32
  return as_float(as_bits(static_cast<float>(static_cast<double>(as_float(0x7f7fffff)) / levels<bits>())) &
                  0xffff0000);
}

template <int bits>
float scale_of(float wanted) {  // rounded up to bf16
  return std::min(as_float((as_bits(wanted) + 0xffff) & 0xffff0000), largest_scale<bits>());
}

// Sums of squares of one block. Added up in fp32, some hundred at a time, within the loops that have the values
// at hand anyway; where a square would leave the range of fp32, again in fp64.
constexpr int64_t PIECE = 512;

struct Energies {
  double h = 0, r = 0, g = 0, e = 0;
  bool trustworthy() const { return h > 1e-28 && g < 1e37 && e < 1e37 && h < 1e37; }
};

inline double energy(const float *values, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return sum;
}

template <int bits>
inline float clamp(float value) {
  return std::max(std::min(value, levels<bits>()), -levels<bits>());
}

// --- whole numbers ---

// 1.5 * 2^23: its sum with a number is whole, rounded with ties to even, the number in its lowest bits. The
// compiler does not see that it must stay in int8's range, and narrows a vector in few instructions.
constexpr float WHOLE = 12582912.0f;

// --- codes <-> bytes: the first element in the lowest bits ---

// Pairs of numbers of `bits` bits -> numbers of twice as many.
template <int bits>
inline void join(const uint8_t *__restrict numbers, int64_t pairs, uint8_t *__restrict joined) {
  for (int64_t k = 0; k < pairs; ++k)
    joined[k] = static_cast<uint8_t>(numbers[2 * k] | numbers[2 * k + 1] << bits);
}

// The lowest bits of n whole numbers. Reads up to 7 behind them; writes no byte more than they need.
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

template <int bits>
void unpack(const uint8_t *bytes, int64_t n, int8_t *codes) {  // writes up to 7 codes more than n
  constexpr int per_byte = 8 / bits;
  if (bits == 8) {
    std::memcpy(codes, bytes, n);
    return;
  }
  for (int64_t k = 0; k < (n + per_byte - 1) / per_byte; ++k)
    for (int l = 0; l < per_byte; ++l) {
      int8_t top = static_cast<int8_t>(static_cast<uint8_t>(bytes[k] << (8 - bits - l * bits)));
      codes[k * per_byte + l] = bits == 1 ? (top < 0 ? 1 : -1) : static_cast<int8_t>(top >> (8 - bits));
    }
}

// --- one block ---

struct Block {
  int64_t start, length;  // of its elements in the shard, fill at the end of a regular shard included
  int64_t code;           // the byte of the payload where its codes begin
};

inline Block block_of(const Layout &layout, int64_t shard, int64_t block) {
  if (layout.places == nullptr) {
    int64_t start = block * layout.block;
    return {start, std::min(layout.block, layout.shard_size - start), start * layout.bits / 8};
  }
  const int32_t *place = layout.places + 3 * (shard * layout.blocks + block);
  return {place[0], place[1], place[2] * layout.word_bytes};
}

// Bytes of a block's codes: whole words, but in a regular cut.
inline int64_t code_bytes_of(const Layout &layout, int64_t elements) {
  int64_t bytes = (elements * layout.bits + 7) / 8;
  return layout.places == nullptr ? bytes : (bytes + layout.word_bytes - 1) / layout.word_bytes * layout.word_bytes;
}

struct Scratch {  // of one block
  std::unique_ptr<float[]> g, e, h, r;
  std::unique_ptr<int32_t[]> whole;
  std::unique_ptr<uint8_t[]> bytes;
  explicit Scratch(int64_t n)
      : g(new float[n]), e(new float[n]), h(new float[n]), r(new float[n]), whole(new int32_t[n + 8]),
        bytes(new uint8_t[2 * n + 16]) {}
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

template <int bits>
class Compress {
 public:
  explicit Compress(const CompressArguments &arguments)
      : a(arguments), layout(a.layout), scratch(layout.block), totals{} {}

  void run() {
    for (int64_t shard = 0; shard < layout.shards; ++shard) {
      uint8_t *payload = a.payload + shard * layout.payload_bytes;
      int64_t packed = 0, end = layout.code_bytes + 2 * layout.blocks;
      for (int64_t block = 0; block < layout.blocks; ++block) packed = send(shard, block, payload);
      std::memset(payload + packed, 0, layout.code_bytes - packed);
      std::memset(payload + end, 0, layout.payload_bytes - end);
    }
    std::copy(totals, totals + 5, a.statistics);
  }

 private:
  const CompressArguments &a;
  const Layout &layout;
  Scratch scratch;
  double totals[5];

  // Returns where the block's codes end in the payload.
  int64_t send(int64_t shard, int64_t block, uint8_t *payload) {
    const Block here = block_of(layout, shard, block);
    int64_t place = shard * layout.shard_size + here.start;  // in the gradient and the error
    int64_t length = here.length;
    int64_t n = std::max<int64_t>(std::min(length, layout.numel - place), 0);  // of real elements
    float *g = scratch.g.get(), *e = scratch.e.get(), *h = scratch.h.get(), *r = scratch.r.get();
    int32_t *whole = scratch.whole.get();

    const float *gradient = g;
    if (a.gradient_type == FP32)
      gradient = static_cast<const float *>(a.gradient) + place;
    else
      load_as(a.gradient_type, a.gradient, place, n, g);
    load_error(shard, block, place, n);

    Energies sum;
    uint32_t largest = add(gradient, e, n, h, sum);
    bool finite = largest < INFINITE;
    float scale = finite ? scale_of<bits>(wanted_scale(largest, n)) : as_float(0x7fc00000);
    const float *noise = a.noise ? a.noise + (shard * layout.blocks + block) * layout.block : nullptr;
    if (bits == 1)
      quantize_signs(n, scale, sum);
    else if (!finite || scale == 0)
      quantize_nothing(n, sum);
    else if (noise == nullptr)
      round(n, scale, sum, [h, scale](int64_t i) { return h[i] / scale; });
    else
      round(n, scale, sum, [h, scale, noise](int64_t i) {
        return clamp<bits>(std::floor(h[i] / scale + noise[i]));
      });
    std::fill(whole + n, whole + length, bits == 1 ? 1 : 0);  // a short shard's fill
    std::fill_n(whole + length, 8, 0);
    uint8_t *codes = payload + here.code;
    pack<bits>(whole, length, scratch.bytes.get(), codes);
    int64_t code_bytes = code_bytes_of(layout, length);
    for (int64_t byte = (length * bits + 7) / 8; byte < code_bytes; ++byte) codes[byte] = 0;
    uint16_t stored = static_cast<uint16_t>(as_bits(scale) >> 16);
    std::memcpy(payload + layout.code_bytes + 2 * block, &stored, 2);

    if (!finite) {  // nothing of it was sent: the error stays as it was
      totals[4] += 1;
      return here.code + code_bytes;
    }
    bool fp32 = sum.trustworthy();
    totals[0] += fp32 ? sum.h : energy(h, n);
    totals[1] += fp32 ? sum.r : energy(r, n);
    totals[2] += fp32 ? sum.g : energy(gradient, n);
    totals[3] += fp32 ? sum.e : energy(e, n);
    if (a.error_type != ERROR_NONE) remember(shard, block, place, n);
    return here.code + code_bytes;
  }

  // h = g + e; returns the bits of the largest |h|. The magnitudes of floats compare like the integers of their
  // bits: NaN and Inf come out on top.
  static uint32_t add(const float *__restrict g, const float *__restrict e, int64_t n, float *__restrict h,
                      Energies &sum) {
    uint32_t largest = 0;
    for (int64_t first = 0; first < n; first += PIECE) {
      float of_g = 0, of_e = 0, of_h = 0;
#pragma omp simd reduction(max : largest) reduction(+ : of_g, of_e, of_h)
      for (int64_t i = first; i < std::min(n, first + PIECE); ++i) {
        float value = g[i] + e[i];
        h[i] = value;
        largest = std::max(largest, as_bits(value) & MAGNITUDE);
        of_g += g[i] * g[i];
        of_e += e[i] * e[i];
        of_h += value * value;
      }
      sum.g += of_g, sum.e += of_e, sum.h += of_h;
    }
    return largest;
  }

  float wanted_scale(uint32_t largest, int64_t n) const {
    if (bits != 1) return as_float(largest) / levels<bits>();
    const float *h = scratch.h.get();
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; ++i) total += static_cast<double>(std::fabs(h[i]));
    return static_cast<float>(total / static_cast<double>(std::max<int64_t>(n, 1)));
  }

  // r = h - s*q, and its energy; `code(i)` gives q and leaves what is sent of it in whole[i].
  template <class Code>
  void quantize(int64_t n, float scale, Energies &sum, Code code) {
    const float *__restrict h = scratch.h.get();
    float *__restrict r = scratch.r.get();
    for (int64_t first = 0; first < n; first += PIECE) {
      float of_r = 0;
#pragma omp simd reduction(+ : of_r)
      for (int64_t i = first; i < std::min(n, first + PIECE); ++i) {
        r[i] = h[i] - code(i) * scale;
        of_r += r[i] * r[i];
      }
      sum.r += of_r;
    }
  }

  // The nearest whole number to `ratio(i)`. Not clamped: |h/s| is below levels + 1/2.
  template <class Ratio>
  void round(int64_t n, float scale, Energies &sum, Ratio ratio) {
    quantize(n, scale, sum, [whole = scratch.whole.get(), ratio](int64_t i) {
      float rounded = ratio(i) + WHOLE;
      whole[i] = static_cast<int32_t>(as_bits(rounded));
      return rounded - WHOLE;
    });
  }

  void quantize_signs(int64_t n, float scale, Energies &sum) {
    quantize(n, scale, sum, [h = scratch.h.get(), whole = scratch.whole.get()](int64_t i) {
      whole[i] = h[i] >= 0;
      return h[i] >= 0 ? 1.0f : -1.0f;
    });
  }

  void quantize_nothing(int64_t n, Energies &sum) {
    std::fill_n(scratch.whole.get(), n, 0);
    std::copy_n(scratch.h.get(), n, scratch.r.get());
    sum.r = sum.h;
  }

  void load_error(int64_t shard, int64_t block, int64_t place, int64_t n) {
    float *e = scratch.e.get();
    if (a.error_type == ERROR_INT8) {
      float scale = Bf16::load(a.error_scales[shard * layout.blocks + block]);
      auto codes = static_cast<const int8_t *>(a.error) + place;
      for (int64_t i = 0; i < n; ++i) e[i] = static_cast<float>(codes[i]) * scale;
    } else if (a.error_type != ERROR_NONE) {
      load_as(a.error_type == ERROR_BF16 ? BF16 : FP32, a.error, place, n, e);
    } else {
      std::fill(e, e + n, 0.0f);
    }
  }

  // e <- encode(beta*e + (1-beta)*r)
  void remember(int64_t shard, int64_t block, int64_t place, int64_t n) {
    const float *__restrict e = scratch.e.get();
    float *__restrict r = scratch.r.get();
    float old_weight = a.old_weight, new_weight = a.new_weight;
    uint32_t largest = 0;
    if (old_weight != 0) {
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < n; ++i) {
        r[i] = e[i] * old_weight + r[i] * new_weight;
        largest = std::max(largest, as_bits(r[i]) & MAGNITUDE);
      }
    } else {
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < n; ++i) largest = std::max(largest, as_bits(r[i]) & MAGNITUDE);
    }
    if (a.error_type != ERROR_INT8) {
      store_as(a.error_type == ERROR_BF16 ? BF16 : FP32, r, n, a.error, place);
      return;
    }
    float unit = scale_of<8>(as_float(largest) / levels<8>());
    auto codes = static_cast<int8_t *>(a.error) + place;
    if (unit > 0)
      for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(as_bits(r[i] / unit + WHOLE));
    else
      std::fill(codes, codes + n, 0);
    a.error_scales[shard * layout.blocks + block] = static_cast<uint16_t>(as_bits(unit) >> 16);
  }
};

// Zeros for what is in no block: elements `from` to before `to` of the output.
inline void clear(const DecompressArguments &a, int64_t from, int64_t to) {
  int64_t size = a.output_type == FP32 ? 4 : 2;
  if (from < to) std::memset(static_cast<uint8_t *>(a.output) + from * size, 0, (to - from) * size);
}

template <int bits>
void reduce(const DecompressArguments &a) {
  const Layout &layout = a.layout;
  Scratch scratch(layout.block);
  float *sum = scratch.h.get();
  int8_t *q = reinterpret_cast<int8_t *>(scratch.bytes.get());
  int64_t done = 0;  // elements of the output
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const Block here = block_of(layout, 0, block);
    int64_t start = here.start, n = std::min(here.length, a.length - start);
    if (n <= 0) continue;
    clear(a, done, start);
    done = start + n;
    for (int64_t sender = 0; sender < a.senders; ++sender) {
      const uint8_t *payload = a.payloads + sender * layout.payload_bytes;
      uint16_t stored;
      std::memcpy(&stored, payload + layout.code_bytes + 2 * block, 2);
      float scale = Bf16::load(stored);
      unpack<bits>(payload + here.code, n, q);
      if (sender == 0)
        for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<float>(q[i]) * scale;
      else
        for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<float>(q[i]) * scale;
    }
    if (a.divisor != 1.0f)
      for (int64_t i = 0; i < n; ++i) sum[i] /= a.divisor;
    store_as(a.output_type, sum, n, a.output, start);
  }
  clear(a, done, a.length);
}

}  // namespace

void compress(const CompressArguments &a) {
  switch (a.layout.bits) {
    case 8: return Compress<8>(a).run();
    case 4: return Compress<4>(a).run();
    case 2: return Compress<2>(a).run();
    default: return Compress<1>(a).run();
  }
}

void decompress_reduce(const DecompressArguments &a) {
  switch (a.layout.bits) {
    case 8: return reduce<8>(a);
    case 4: return reduce<4>(a);
    case 2: return reduce<2>(a);
    default: return reduce<1>(a);
  }
}

}  // namespace VARIANT
