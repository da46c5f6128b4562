// LoCo's compress and decompress_reduce, each in one pass over memory: block by block, in the first-level
// cache. quantization/uniform.py, levels.py, sign.py and rotation.py define the numbers; the code here does the
// same fp32 operations, so that codes, scales and errors have the same bits.
//
// This file is compiled once per instruction set (VARIANT names the namespace); dispatch.cpp picks one at run
// time. -ffp-contract=off is part of the format: a fused multiply-add would round differently.
#include "codes.h"
#include "decode.h"
#include "levels.h"
#include "rotation.h"
#include "vectors.h"

#include <memory>

namespace VARIANT {
namespace {

// --- scales ---

template <int largest>
float scale_of(float wanted) {  // s: `wanted` rounded up to bf16, and at most so large that largest * s is finite
  double most = static_cast<double>(as_float(0x7f7fffff)) / largest;
  uint32_t rounded = (as_bits(wanted) + 0xffff) & 0xffff0000;
  return std::min(as_float(rounded), as_float(as_bits(static_cast<float>(most)) & 0xffff0000));
}

// Sums of squares of one block. They are added up in fp32, PIECE at a time, in the loops that load the values
// anyway. If a square may leave the range of fp32 (`trustworthy` is false), they are added up again in fp64.
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

// --- whole numbers ---

// 1.5 * 2^23: its sum with a number is rounded to a whole number, ties to even, which is in the lowest bits. A vector
// of these bits is narrowed to int8 by truncation, in few instructions.
constexpr float WHOLE = 12582912.0f;

// --- one block ---

// Short blocks are worked on in turns: while one block waits for its scale, or for its error's scale, which depend on
// all of its numbers, the processor works on the others.
constexpr int64_t IN_TURNS = 8, NUMBERS_IN_TURNS = 1024;

struct Pending {  // a block that is being compressed
  Block here;
  int64_t shard, block, place, n;  // place: the block's index in gradient and error; n: elements without fill
  const float *gradient;  // points to g, or to the argument `gradient` itself
  float *g, *e, *h, *r;   // scratch
  Energies sum;
  bool finite;
  float scale;
};

template <class Codec>
class Compress {
 public:
  explicit Compress(const CompressArguments &arguments)
      : a(arguments), layout(a.layout),
        turns(std::min(std::max<int64_t>(NUMBERS_IN_TURNS / layout.block, 1), IN_TURNS)),
        numbers(new float[4 * turns * layout.block]), whole(new int32_t[layout.block + 8]),
        bytes(new uint8_t[2 * layout.block + 16]), diagonal(a.signs, layout.block), totals{} {}

  void run() {
    Pending pending[IN_TURNS];
    for (int64_t shard = 0; shard < layout.shards; ++shard) {
      uint8_t *payload = a.payload + a.starts[shard];
      int64_t packed = 0, end = layout.code_bytes + 2 * layout.blocks;
      for (int64_t first = 0; first < layout.blocks; first += turns) {
        int64_t count = std::min(turns, layout.blocks - first);
        for (int64_t k = 0; k < count; ++k) pending[k] = begun(shard, first + k, k);
        for (int64_t k = 0; k < count; ++k) send(pending[k], payload);
        for (int64_t k = 0; k < count; ++k) finish(pending[k]);
        packed = pending[count - 1].here.end;
      }
      std::memset(payload + packed, 0, layout.code_bytes - packed);
      std::memset(payload + end, 0, (end + 15) / 16 * 16 - end);
    }
    if (a.statistics) std::copy(totals, totals + 5, a.statistics);
  }

 private:
  static constexpr int bits = Codec::bits;
  const CompressArguments &a;
  const Layout &layout;
  const int64_t turns;
  std::unique_ptr<float[]> numbers;
  std::unique_ptr<int32_t[]> whole;  // the whole numbers of one block
  std::unique_ptr<uint8_t[]> bytes;
  Diagonal diagonal;
  double totals[5];

  // Computes h of a block, and its scale.
  Pending begun(int64_t shard, int64_t block, int64_t turn) {
    Pending one;
    one.here = block_of<bits>(layout, shard, block);
    one.shard = shard, one.block = block;
    one.place = shard * layout.shard_size + one.here.start;
    one.n = one.here.length;
    one.g = numbers.get() + 4 * turn * layout.block;
    one.e = one.g + layout.block, one.h = one.e + layout.block, one.r = one.h + layout.block;

    one.gradient = one.g;
    if (a.gradient_type == FP32)
      one.gradient = static_cast<const float *>(a.gradient) + one.place;
    else
      load_as(a.gradient_type, a.gradient, one.place, one.n, one.g);
    if (a.signs != nullptr) rotate(one.gradient, diagonal.of(one.n), one.n, one.g), one.gradient = one.g;
    load_error(one);

    uint32_t largest = add(one.gradient, one.e, one.n, one.h, one.sum);
    one.finite = largest < INFINITE;
    one.scale = one.finite ? scale_of<Codec::largest>(wanted_scale(one.h, one.n, largest)) : as_float(0x7fc00000);
    return one;
  }

  // Computes the codes and r, and writes codes and scale to the payload.
  void send(Pending &one, uint8_t *payload) {
    const float *h = one.h;
    const float scale = one.scale;
    if (bits == 1)
      quantize_signs(one);
    else if (!one.finite || scale == 0)
      quantize_nothing(one);
    else if constexpr (is_levels<Codec>)
      quantize_levels(one);
    else
      round(one, [h, scale](int64_t i) { return h[i] / scale; });
    std::fill_n(whole.get() + one.n, 8, 0);
    pack(one.here, payload);
    uint16_t stored = static_cast<uint16_t>(as_bits(scale) >> 16);
    std::memcpy(payload + layout.code_bytes + 2 * one.block, &stored, 2);
  }

  // Updates the error and the statistics.
  void finish(const Pending &one) {
    if (!one.finite) {  // nothing was sent: the error does not change
      totals[4] += 1;
      return;
    }
    bool fp32 = one.sum.trustworthy();
    totals[0] += fp32 ? one.sum.h : energy(one.h, one.n);
    totals[1] += fp32 ? one.sum.r : energy(one.r, one.n);
    totals[2] += fp32 ? one.sum.g : energy(one.gradient, one.n);
    totals[3] += fp32 ? one.sum.e : energy(one.e, one.n);
    if (a.error_type != ERROR_NONE) remember(one);
  }

  // Packs the codes, and writes every byte up to here.end.
  void pack(const Block &here, uint8_t *payload) {
    VARIANT::pack<bits>(whole.get(), here.length, bytes.get(), payload + here.code);
    const int64_t written = here.code + (here.length * bits + 7) / 8;
    std::memset(payload + written, 0, here.end - written);
  }

  // Computes h = g + e; returns the bits of the largest |h|.
  static uint32_t add(const float *g, const float *e, int64_t n, float *h, Energies &sum) {
    Largest largest;
    for (int64_t first = 0; first < n; first += PIECE) {
      Vector of_g = {}, of_e = {}, of_h = {};
      by_vectors(first, std::min(n, first + PIECE), [&](int64_t i, auto count) {
        const Vector one = vector_at(g + i, count), other = vector_at(e + i, count), value = one + other;
        put(h + i, value, count);
        largest.meet(value);
        of_g = of_g + one * one, of_e = of_e + other * other, of_h = of_h + value * value;
      });
      sum.g += total(of_g), sum.e += total(of_e), sum.h += total(of_h);
    }
    return largest.found();
  }

  static float wanted_scale(const float *h, int64_t n, uint32_t largest) {
    if constexpr (is_levels<Codec>) return wanted_of_levels(h, n, largest);
    if (bits != 1) return as_float(largest) / Codec::largest;
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; ++i) total += static_cast<double>(std::fabs(h[i]));
    return static_cast<float>(total / static_cast<double>(std::max<int64_t>(n, 1)));
  }

  // Returns c * rms(h) of the levels codec. The sum of v^2 of 256 numbers v is exact in fp32.
  static float wanted_of_levels(const float *h, int64_t n, uint32_t largest) {
    uint32_t exponent = std::min(std::max(largest & INFINITE, uint32_t{1} << 23), uint32_t{253} << 23);
    float unit = as_float((uint32_t{254} << 23) - exponent);
    double energy = 0;
    for (int64_t first = 0; first < n; first += 256) {
      Vector sum = {};
      by_vectors(first, std::min(n, first + 256), [&](int64_t i, auto count) {
        // The sum rounds v to 64ths.
        const Vector v = (vector_at(h + i, count) * all(unit) + all(WHOLE / 64)) - all(WHOLE / 64);
        sum = sum + v * v;
      });
      energy += total(sum);
    }
    float mean = static_cast<float>(energy * 4096 / static_cast<double>(std::max<int64_t>(n, 1)));
    return std::sqrt(mean) * static_cast<float>(Codec::step / 64) * as_float(exponent);
  }

  // Computes r = h - s*q and its energy; `code(i)` returns q and writes the code that is sent to whole[i].
  template <class Code>
  void quantize(Pending &one, Code code) {
    const float *__restrict h = one.h;
    float *__restrict r = one.r;
    const float scale = one.scale;
    const int64_t n = one.n;
    for (int64_t first = 0; first < n; first += PIECE) {
      float of_r = 0;
#pragma omp simd reduction(+ : of_r)
      for (int64_t i = first; i < std::min(n, first + PIECE); ++i) {
        r[i] = h[i] - code(i) * scale;
        of_r += r[i] * r[i];
      }
      one.sum.r += of_r;
    }
  }

  // Quantizes to the whole number nearest to `ratio(i)`. It needs no clamp: |h/s| is below the largest code + 1/2.
  template <class Ratio>
  void round(Pending &one, Ratio ratio) {
    quantize(one, [whole = whole.get(), ratio](int64_t i) {
      float rounded = ratio(i) + WHOLE;
      whole[i] = static_cast<int32_t>(as_bits(rounded));
      return rounded - WHOLE;
    });
  }

  void quantize_signs(Pending &one) {
    quantize(one, [h = one.h, whole = whole.get()](int64_t i) {
      whole[i] = h[i] >= 0;
      return h[i] >= 0 ? 1.0f : -1.0f;
    });
  }

  void quantize_levels(Pending &one) {
    for (int64_t i = 0; i < one.n; i += PIECE)
      one.sum.r +=
          to_levels<Codec>(one.h + i, one.scale, std::min(PIECE, one.n - i), whole.get() + i, one.r + i);
  }

  void quantize_nothing(Pending &one) {
    std::fill_n(whole.get(), one.n, 0);
    std::copy_n(one.h, one.n, one.r);
    one.sum.r = one.sum.h;
  }

  void load_error(const Pending &one) {
    float *e = one.e;
    if (a.error_type == ERROR_INT8) {
      float scale = Bf16::load(a.error_scales[one.shard * layout.blocks + one.block]);
      auto codes = static_cast<const int8_t *>(a.error) + one.place;
      for (int64_t i = 0; i < one.n; ++i) e[i] = static_cast<float>(codes[i]) * scale;
    } else if (a.error_type != ERROR_NONE) {
      load_as(a.error_type == ERROR_BF16 ? BF16 : FP32, a.error, one.place, one.n, e);
    } else {
      std::fill(e, e + one.n, 0.0f);
    }
  }

  // e <- encode(beta*e + (1-beta)*r)
  void remember(const Pending &one) {
    const float *__restrict e = one.e;
    float *__restrict r = one.r;
    const int64_t n = one.n;
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
      store_as(a.error_type == ERROR_BF16 ? BF16 : FP32, r, n, a.error, one.place);
      return;
    }
    float unit = scale_of<127>(as_float(largest) / 127);
    auto codes = static_cast<int8_t *>(a.error) + one.place;
    if (unit > 0)
      for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(as_bits(r[i] / unit + WHOLE));
    else
      std::fill(codes, codes + n, 0);
    a.error_scales[one.shard * layout.blocks + one.block] = static_cast<uint16_t>(as_bits(unit) >> 16);
  }
};

// Zeroes the output's elements `from` to `to` - 1, which are in no block.
inline void clear(const DecompressArguments &a, int64_t from, int64_t to) {
  int64_t size = a.output_type == FP32 ? 4 : 2;
  if (from < to) std::memset(static_cast<uint8_t *>(a.output) + from * size, 0, (to - from) * size);
}

template <class Codec>
void reduce(const DecompressArguments &a) {
  const Layout &layout = a.layout;
  std::unique_ptr<float[]> scratch(new float[layout.block + AT_ONCE]);
  float *sum = scratch.get();
  Diagonal diagonal(a.signs, layout.block);
  int64_t done = 0;  // elements of the output that are written
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const Block here = block_of<Codec::bits>(layout, 0, block);
    const int64_t start = here.start, n = here.length;
    if (n == 0) continue;  // a shard with fewer blocks than others
    clear(a, done, start);
    done = start + n;
    int64_t stages = sum_codes<Codec>(a, here, block, n, a.signs == nullptr ? 0 : n, sum);
    if (a.signs != nullptr) rotate_back(sum, diagonal.of(n), n, stages);
    if (a.divisor != 1.0f)
      for (int64_t i = 0; i < n; ++i) sum[i] /= a.divisor;
    store_as(a.output_type, sum, n, a.output, start);
  }
  clear(a, done, a.length);
}

}  // namespace

// Runs `templated` with the codec of the arguments.
#define WITH_CODEC(templated)                            \
  switch (a.codec * 16 + a.layout.bits) {                \
    case UNIFORM * 16 + 8: return templated(Uniform<8>); \
    case UNIFORM * 16 + 4: return templated(Uniform<4>); \
    case UNIFORM * 16 + 2: return templated(Uniform<2>); \
    case LEVELS * 16 + 4: return templated(Levels<4>);   \
    case LEVELS * 16 + 2: return templated(Levels<2>);   \
    default: return templated(Sign);                     \
  }

void compress(const CompressArguments &a) {
#define COMPRESS(codec) Compress<codec>(a).run()
  WITH_CODEC(COMPRESS)
}

void decompress_reduce(const DecompressArguments &a) {
#define REDUCE(codec) reduce<codec>(a)
  WITH_CODEC(REDUCE)
}

}  // namespace VARIANT
