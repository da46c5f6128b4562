// LoCo's compress and decompress_reduce, each in one pass over memory: block by block, in the first-level
// cache. quantization/uniform.py and sign.py define the numbers and are the place to read them; here every step of it
// appears once, in the same fp32 operations, so that codes, scales and errors are the same bits.
//
// Compiled once per instruction set (VARIANT names the namespace); dispatch.cpp picks one at run time.
// -ffp-contract=off is part of the format: a fused multiply-add would round differently.
#include "codes.h"
#include "decode.h"
#include "levels.h"
#include "rotation.h"

#include <memory>

namespace VARIANT {
namespace {

// --- scales ---

template <int largest>
float scale_of(float wanted) {  // rounded up to bf16, and at most what keeps largest * s finite
  double most = static_cast<double>(as_float(0x7f7fffff)) / largest;
  uint32_t rounded = (as_bits(wanted) + 0xffff) & 0xffff0000;
  return std::min(as_float(rounded), as_float(as_bits(static_cast<float>(most)) & 0xffff0000));
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

// --- whole numbers ---

// 1.5 * 2^23: its sum with a number is whole, rounded with ties to even, the number in its lowest bits. The
// compiler does not see that it must stay in int8's range, and narrows a vector in few instructions.
constexpr float WHOLE = 12582912.0f;

// --- one block ---

struct Scratch {  // of one block
  std::unique_ptr<float[]> g, e, h, r;
  std::unique_ptr<int32_t[]> whole;
  std::unique_ptr<uint8_t[]> bytes;
  explicit Scratch(int64_t n)
      : g(new float[n]), e(new float[n]), h(new float[n]), r(new float[n]), whole(new int32_t[n + 8]),
        bytes(new uint8_t[2 * n + 16]) {}
};

template <class Codec>
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
  static constexpr int bits = Codec::bits;
  const CompressArguments &a;
  const Layout &layout;
  Scratch scratch;
  double totals[5];

  // Returns where the block's codes end in the payload.
  int64_t send(int64_t shard, int64_t block, uint8_t *payload) {
    const Block here = block_of<bits>(layout, shard, block);
    int64_t place = shard * layout.shard_size + here.start;  // in the gradient and the error
    int64_t n = std::max<int64_t>(std::min(here.length, layout.numel - place), 0);  // of real elements
    float *g = scratch.g.get(), *e = scratch.e.get(), *h = scratch.h.get(), *r = scratch.r.get();
    int32_t *whole = scratch.whole.get();

    const float *gradient = g;
    if (a.gradient_type == FP32)
      gradient = static_cast<const float *>(a.gradient) + place;
    else
      load_as(a.gradient_type, a.gradient, place, n, g);
    if (a.signs != nullptr) rotate(gradient, a.signs, n, g), gradient = g;
    load_error(shard, block, place, n);

    Energies sum;
    uint32_t largest = add(gradient, e, n, h, sum);
    bool finite = largest < INFINITE;
    float scale = finite ? scale_of<Codec::largest>(wanted_scale(largest, n)) : as_float(0x7fc00000);
    const float *noise = a.noise ? a.noise + (shard * layout.blocks + block) * layout.block : nullptr;
    if (bits == 1)
      quantize_signs(n, scale, sum);
    else if (!finite || scale == 0)
      quantize_nothing(n, sum);
    else if constexpr (is_levels<Codec>)
      quantize_levels(n, scale, sum);
    else if (noise == nullptr)
      round(n, scale, sum, [h, scale](int64_t i) { return h[i] / scale; });
    else
      round(n, scale, sum, [h, scale, noise](int64_t i) {
        constexpr float most = Codec::largest;
        return std::max(std::min(std::floor(h[i] / scale + noise[i]), most), -most);
      });
    std::fill(whole + n, whole + here.coded, bits == 1 ? 1 : 0);  // a short shard's fill
    std::fill_n(whole + here.coded, 8, 0);
    pack(here, payload);
    uint16_t stored = static_cast<uint16_t>(as_bits(scale) >> 16);
    std::memcpy(payload + layout.code_bytes + 2 * block, &stored, 2);

    if (!finite) {  // nothing of it was sent: the error stays as it was
      totals[4] += 1;
      return here.end;
    }
    bool fp32 = sum.trustworthy();
    totals[0] += fp32 ? sum.h : energy(h, n);
    totals[1] += fp32 ? sum.r : energy(r, n);
    totals[2] += fp32 ? sum.g : energy(gradient, n);
    totals[3] += fp32 ? sum.e : energy(e, n);
    if (a.error_type != ERROR_NONE) remember(shard, block, place, n);
    return here.end;
  }

  // Every byte up to here.end.
  void pack(const Block &here, uint8_t *payload) {
    constexpr int low = low_bits(bits), high = high_bits(bits);
    const int32_t *whole = scratch.whole.get();
    auto fill = [payload](int64_t from, int64_t to) {
      if (from < to) std::memset(payload + from, 0, to - from);
    };
    VARIANT::pack<low>(whole, here.coded, scratch.bytes.get(), payload + here.code);
    fill(here.code + (here.coded * low + 7) / 8, here.high);
    if constexpr (high > 0) {
      VARIANT::pack<high, low>(whole, here.coded, scratch.bytes.get(), payload + here.high);
      fill(here.high + (here.coded * high + 7) / 8, here.end);
    }
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
    const float *h = scratch.h.get();
    if constexpr (is_levels<Codec>) return wanted_of_levels(largest, n);
    if (bits != 1) return as_float(largest) / Codec::largest;
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; ++i) total += static_cast<double>(std::fabs(h[i]));
    return static_cast<float>(total / static_cast<double>(std::max<int64_t>(n, 1)));
  }

  // The root of the mean of v^2 in the levels codec's units. Of 256 numbers v the sum of v^2 is exact in fp32.
  float wanted_of_levels(uint32_t largest, int64_t n) const {
    const float *h = scratch.h.get();
    uint32_t exponent = std::min(std::max(largest & INFINITE, uint32_t{1} << 23), uint32_t{253} << 23);
    float unit = as_float((uint32_t{254} << 23) - exponent);
    double energy = 0;
    for (int64_t first = 0; first < n; first += 256) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = first; i < std::min(n, first + 256); ++i) {
        float v = (h[i] * unit + WHOLE / 64) - WHOLE / 64;  // in 64ths, to which the sum rounds it
        sum += v * v;
      }
      energy += sum;
    }
    float mean = static_cast<float>(energy * 4096 / static_cast<double>(std::max<int64_t>(n, 1)));
    return std::sqrt(mean) * static_cast<float>(Codec::step / 64) * as_float(exponent);
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

  void quantize_levels(int64_t n, float scale, Energies &sum) {
    for (int64_t i = 0; i < n; i += PIECE)
      sum.r += to_levels<Codec>(scratch.h.get() + i, scale, std::min(PIECE, n - i), scratch.whole.get() + i,
                                scratch.r.get() + i);
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
    float unit = scale_of<127>(as_float(largest) / 127);
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

template <class Codec>
void reduce(const DecompressArguments &a) {
  const Layout &layout = a.layout;
  std::unique_ptr<float[]> scratch(new float[layout.block + AT_ONCE]);
  float *sum = scratch.get();
  int64_t done = 0;  // elements of the output
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const Block here = block_of<Codec::bits>(layout, 0, block);
    int64_t start = here.start, n = std::min(here.length, a.length - start);
    if (n <= 0) continue;
    clear(a, done, start);
    done = start + n;
    int64_t real = std::min(here.length, layout.numel - start);
    sum_codes<Codec>(a, here, block, a.signs == nullptr ? n : std::max(n, real), sum);
    if (a.signs != nullptr) rotate_back(sum, a.signs, real);
    if (a.divisor != 1.0f)
      for (int64_t i = 0; i < n; ++i) sum[i] /= a.divisor;
    store_as(a.output_type, sum, n, a.output, start);
  }
  clear(a, done, a.length);
}

}  // namespace

// What `templated` does with the arguments' codec.
#define WITH_CODEC(templated)                        \
  switch (a.codec * 16 + a.layout.bits) {            \
    case UNIFORM * 16 + 8: return templated(Uniform<8>); \
    case UNIFORM * 16 + 4: return templated(Uniform<4>); \
    case UNIFORM * 16 + 3: return templated(Uniform<3>); \
    case UNIFORM * 16 + 2: return templated(Uniform<2>); \
    case LEVELS * 16 + 4: return templated(Levels<4>);   \
    case LEVELS * 16 + 3: return templated(Levels<3>);   \
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
