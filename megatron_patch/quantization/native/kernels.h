// The interface of the native kernels: plain pointers, which quantization/native passes through ctypes.
#pragma once
#include <cstdint>

// How a bucket is cut into shards and blocks (quantization/layout.py).
struct Layout {
  int64_t numel, shards, shard_size, bits, block, blocks, code_bytes, payload_bytes;
  int64_t word_bytes;     // a block's codes begin at a multiple of it
  const int32_t *places;  // [shards, blocks, 3]: a block's first element in its shard, its number of elements, and
                          // the word where its codes begin
};

enum CodecName : int64_t { UNIFORM = 0, LEVELS = 1, SIGN = 2 };
enum FloatType : int64_t { FP32 = 0, BF16 = 1, FP16 = 2 };
enum ErrorType : int64_t { ERROR_NONE = 0, ERROR_INT8 = 1, ERROR_BF16 = 2, ERROR_FP32 = 3 };

struct CompressArguments {
  Layout layout;
  int64_t codec;           // a CodecName
  const float *signs;      // [block] of +-1 where the gradient's blocks are rotated first, else null
  const void *gradient;    // [numel] of gradient_type
  int64_t gradient_type;
  void *error;             // [shards, shard_size] of error_type; changed in place
  uint16_t *error_scales;  // bf16 [shards, blocks], for ERROR_INT8; changed in place
  int64_t error_type;
  float old_weight, new_weight;  // beta and 1 - beta
  uint8_t *payload;        // the codes and scales of all shards are written
  const int64_t *starts;   // [shards]: the byte where each one's payload begins
  double *statistics;      // [5], loco.STATISTICS: sums of h^2, r^2, g^2, e^2, and blocks not finite; or null
};

struct DecompressArguments {
  Layout layout;
  int64_t codec;            // a CodecName
  const float *signs;       // [block] of +-1 where the sum is rotated back, else null
  const uint8_t *payloads;  // [senders, payload_bytes], each of the same shard
  int64_t senders;
  void *output;             // [length] of output_type
  int64_t length;           // at most shard_size
  int64_t output_type;
  float divisor;            // 1 for a sum
};

// The errors that weight_decode returns; it returns 0 if there is none.
enum WeightError : int64_t { WEIGHTS_DIFFER = 1, MESSAGE_CHANGED = 2 };
