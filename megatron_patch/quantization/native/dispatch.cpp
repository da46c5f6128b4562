// Which of the compiled variants runs: the widest instruction set that this processor has.
#include "kernels.h"

namespace baseline {
void compress(const CompressArguments &);
void decompress_reduce(const DecompressArguments &);
}  // namespace baseline

#ifdef X86
namespace avx2 {
void compress(const CompressArguments &);
void decompress_reduce(const DecompressArguments &);
}  // namespace avx2
namespace avx512 {
void compress(const CompressArguments &);
void decompress_reduce(const DecompressArguments &);
}  // namespace avx512
#endif

namespace {

struct Variant {
  const char *name;
  void (*compress)(const CompressArguments &);
  void (*decompress_reduce)(const DecompressArguments &);
};

// In rising order; `compiled` are those that the caller may choose from, as far as the processor goes.
const Variant compiled[] = {
    {"baseline", baseline::compress, baseline::decompress_reduce},
#ifdef X86
    {"avx2", avx2::compress, avx2::decompress_reduce},
    {"avx512", avx512::compress, avx512::decompress_reduce},
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
}
