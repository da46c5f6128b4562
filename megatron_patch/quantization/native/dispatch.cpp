// The exported functions, which run one of the compiled variants: by default the widest that the processor supports.
#include "kernels.h"

namespace baseline {
void compress(const CompressArguments &);
void decompress_reduce(const DecompressArguments &);
int64_t weight_encode(const uint16_t *, const uint16_t *, int64_t, int64_t, uint8_t *, int64_t *);
int64_t weight_decode(const uint8_t *, int64_t, uint16_t *, int64_t);
void weight_sums(const uint16_t *, int64_t, int64_t *);
}  // namespace baseline

#ifdef X86
namespace avx2 {
void compress(const CompressArguments &);
void decompress_reduce(const DecompressArguments &);
int64_t weight_encode(const uint16_t *, const uint16_t *, int64_t, int64_t, uint8_t *, int64_t *);
int64_t weight_decode(const uint8_t *, int64_t, uint16_t *, int64_t);
void weight_sums(const uint16_t *, int64_t, int64_t *);
}  // namespace avx2
namespace avx512 {
void compress(const CompressArguments &);
void decompress_reduce(const DecompressArguments &);
int64_t weight_encode(const uint16_t *, const uint16_t *, int64_t, int64_t, uint8_t *, int64_t *);
int64_t weight_decode(const uint8_t *, int64_t, uint16_t *, int64_t);
void weight_sums(const uint16_t *, int64_t, int64_t *);
}  // namespace avx512
#endif

namespace {

struct Variant {
  const char *name;
  void (*compress)(const CompressArguments &);
  void (*decompress_reduce)(const DecompressArguments &);
  int64_t (*weight_encode)(const uint16_t *, const uint16_t *, int64_t, int64_t, uint8_t *, int64_t *);
  int64_t (*weight_decode)(const uint8_t *, int64_t, uint16_t *, int64_t);
  void (*weight_sums)(const uint16_t *, int64_t, int64_t *);
};

#define VARIANT_OF(name) \
  {#name, name::compress, name::decompress_reduce, name::weight_encode, name::weight_decode, name::weight_sums}

// The variants in rising order; the caller may choose one of the first `supported()`.
const Variant compiled[] = {
    VARIANT_OF(baseline),
#ifdef X86
    VARIANT_OF(avx2),
    VARIANT_OF(avx512),
#endif
};

int supported() {
#ifdef X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return 3;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return 2;
#endif
  return 1;
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// Returns the number of variants that this processor supports; they are the first ones.
EXPORTED int megatron_loco_variants() { return supported(); }
EXPORTED const char *megatron_loco_variant_name(int variant) { return compiled[variant].name; }

EXPORTED void megatron_loco_compress(int variant, const CompressArguments *arguments) {
  compiled[variant].compress(*arguments);
}

EXPORTED void megatron_loco_decompress_reduce(int variant, const DecompressArguments *arguments) {
  compiled[variant].decompress_reduce(*arguments);
}

// Returns the message's bytes; `message` must have room for weights.code.bound(n), `facts` for weights.code.FACTS.
EXPORTED int64_t megatron_loco_weight_encode(int variant, const uint16_t *old, const uint16_t *now, int64_t n,
                                              int64_t fp16, uint8_t *message, int64_t *facts) {
  return compiled[variant].weight_encode(old, now, n, fp16, message, facts);
}

// Returns a WeightError, or 0.
EXPORTED int64_t megatron_loco_weight_decode(int variant, const uint8_t *message, int64_t size, uint16_t *weights,
                                              int64_t n) {
  return compiled[variant].weight_decode(message, size, weights, n);
}

EXPORTED void megatron_loco_weight_sums(int variant, const uint16_t *weights, int64_t n, int64_t *sums) {
  compiled[variant].weight_sums(weights, n, sums);
}
}
