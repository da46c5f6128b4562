// Which of the compiled variants runs: the widest instruction set that this processor has.
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

// In rising order; `compiled` are those that the caller may choose from, as far as the processor goes.
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

// Variants 0 to count-1 run on this processor.
EXPORTED int megatron_loco_variants() { return supported(); }
EXPORTED const char *megatron_loco_variant_name(int variant) { return compiled[variant].name; }

EXPORTED void megatron_loco_compress(int variant, const CompressArguments *arguments) {
  compiled[variant].compress(*arguments);
}

EXPORTED void megatron_loco_decompress_reduce(int variant, const DecompressArguments *arguments) {
  compiled[variant].decompress_reduce(*arguments);
}

// Bytes of the message, which has room for weights.code.bound(n); `facts` are weights.code.FACTS numbers.
EXPORTED int64_t megatron_loco_weight_encode(int variant, const uint16_t *old, const uint16_t *now, int64_t n,
                                              int64_t fp16, uint8_t *message, int64_t *facts) {
  return compiled[variant].weight_encode(old, now, n, fp16, message, facts);
}

// A WeightError, or 0.
EXPORTED int64_t megatron_loco_weight_decode(int variant, const uint8_t *message, int64_t size, uint16_t *weights,
                                              int64_t n) {
  return compiled[variant].weight_decode(message, size, weights, n);
}

EXPORTED void megatron_loco_weight_sums(int variant, const uint16_t *weights, int64_t n, int64_t *sums) {
  compiled[variant].weight_sums(weights, n, sums);
}
}
