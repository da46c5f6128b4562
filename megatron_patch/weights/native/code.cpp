// The exact code of weights' changes, whose bytes weights/code.py defines.
//
// This file is compiled once per instruction set (VARIANT names the namespace); dispatch.cpp picks one at run time.
#include "kernels.h"
#include "rans.h"

namespace VARIANT {
namespace {

constexpr int64_t HEADER = 12;
constexpr uint8_t CODED = 0x33, RAW = 0x47;

// Counts the symbols of n weights at their exponents.
void count(const uint16_t *old, const uint16_t *now, int64_t n, int mantissa, Counts &counts) {
  for (int64_t i = 0; i < n; ++i) {
    const int32_t d = static_cast<int16_t>(line(now[i]) - line(old[i]));
    ++counts.of[(old[i] & 0x7fff) >> mantissa][symbols.of[std::min(d < 0 ? -d : d, FAR + 1)]];
  }
  counts.weights += n;
}

// Counts the n weights of piece number `place`: all of them, or one row of eight.
void count_piece(const uint16_t *old, const uint16_t *now, int64_t n, int64_t place, bool sampled, int mantissa,
                 Counts &counts) {
  if (!sampled) return count(old, now, n, mantissa, counts);
  for (int64_t start = 0; start < n; start += 8 * ROW) {
    const auto eighth = static_cast<uint32_t>((place * PIECE + start) / (8 * ROW)) * 0x9e3779b1u >> 29;
    const int64_t row = start + eighth * ROW;
    if (row < n) count(old + row, now + row, std::min<int64_t>(ROW, n - row), mantissa, counts);
  }
}

int64_t unchanged(const uint16_t *old, const uint16_t *now, int64_t n) {
  uint16_t same = 0;
#pragma omp simd reduction(+ : same)
  for (int64_t i = 0; i < n; ++i) same += old[i] == now[i];
  return same;
}

// Writes the message after its header into `room` bytes. Returns its bytes, or `room` if it has as many or more.
int64_t write_body(const Plan &plan, const uint16_t *old, const uint16_t *now, int64_t n, int mantissa, uint8_t *body,
                   int64_t room) {
  uint8_t tables[1024];
  const int64_t size = int64_t{1} << plan.log2_tile, tiles = (n + size - 1) / size, table_bytes = plan.write(tables);
  const int64_t state_bytes = 4 * plan.lanes;
  uint8_t *at = body + table_bytes + tiles * (4 + state_bytes), *const end = body + room;
  if (at >= end) return room;
  std::memcpy(body, tables, static_cast<size_t>(table_bytes));
  Table table;
  fill_encoder(plan.f, table);
  const int64_t most = 2 * std::min(size, n) + MARGIN;  // words of a tile, and what stores may touch before them
  auto *const words = new uint16_t[static_cast<size_t>(most)];
  for (int64_t tile = 0; tile < tiles && at < end; ++tile) {
    const int64_t start = tile * size, length = std::min(size, n - start);
    uint32_t states[LANES];
    const auto run = plan.lanes == LANES ? encode_tile<LANES> : encode_tile<FEW_LANES>;
    const uint16_t *first = run(table, {mantissa, plan.base}, old + start, now + start, length, words + most, states);
    const auto found = static_cast<uint32_t>(words + most - first);
    std::memcpy(body + table_bytes + 4 * tile, &found, 4);
    std::memcpy(body + table_bytes + 4 * tiles + state_bytes * tile, states, static_cast<size_t>(state_bytes));
    if (2 * int64_t{found} < end - at) std::memcpy(at, first, 2 * size_t{found});
    at += std::min<int64_t>(2 * int64_t{found}, end - at);
  }
  delete[] words;
  return at - body;
}

// Returns a WeightError, or 0. If the old weights are not the sender's, contexts differ, and words decode wrongly.
template <int LANES_>
int64_t decode_tiles(const Table &table, Context context, int64_t log2_tile, const uint8_t *body, const uint8_t *end,
                     uint16_t *weights, int64_t n) {
  const int64_t size = int64_t{1} << log2_tile, tiles = (n + size - 1) / size;
  if (end - body < tiles * 4 * (1 + LANES_)) return MESSAGE_CHANGED;
  const auto *counts = reinterpret_cast<const uint32_t *>(body), *states = counts + tiles;
  const auto *words = reinterpret_cast<const uint16_t *>(states + tiles * LANES_);
  int64_t all = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) all += counts[tile];
  if (end - reinterpret_cast<const uint8_t *>(words) != 2 * all) return MESSAGE_CHANGED;
  const uint16_t *const last = words + all;
  for (int64_t tile = 0; tile < tiles; words += counts[tile], ++tile) {
    const int64_t start = tile * size, length = std::min(size, n - start);
    if (!decode_tile<LANES_>(table, context, states + tile * LANES_, words, counts[tile], last, weights + start, length))
      return WEIGHTS_DIFFER;
  }
  return 0;
}

int64_t decode_body(int base, int form, const uint8_t *body, const uint8_t *end, uint16_t *weights, int64_t n) {
  Frequencies f;
  const int64_t tables = read_tables(body, end - body, f), log2_tile = SMALLEST_TILE + form % 8;
  if (tables == 0 || tables > end - body || form >= 32 || log2_tile > LARGEST_TILE) return MESSAGE_CHANGED;
  Table table;
  fill_decoder(f, table);
  const auto run = form & 8 ? decode_tiles<FEW_LANES> : decode_tiles<LANES>;
  return run(table, {form & 16 ? 10 : 7, base}, log2_tile, body + tables, end, weights, n);
}

}  // namespace

int64_t weight_encode(const uint16_t *old, const uint16_t *now, int64_t n, int64_t fp16, uint8_t *message,
                       int64_t *facts) {
  const int mantissa = fp16 ? 10 : 7;
  Sums before, after;
  Counts counts;
  facts[0] = 0;
  for (int64_t start = 0; start < n; start += PIECE) {
    const int64_t length = std::min(PIECE, n - start), place = start / PIECE;
    before.add(old + start, length, place);  // all of this is done while the piece is in the cache
    after.add(now + start, length, place);
    facts[0] += unchanged(old + start, now + start, length);
    count_piece(old + start, now + start, length, place, n >= SAMPLED_FROM, mantissa, counts);
  }
  std::memcpy(facts + 1, &before, 16);
  std::memcpy(message + 4, &after, 8);
  uint8_t header[4] = {RAW, 0, 0, 0};
  int64_t size = 2 * n;
  if (n) {
    const Plan plan(counts, n);
    size = write_body(plan, old, now, n, mantissa, message + HEADER, 2 * n);
    if (size < 2 * n) {
      header[0] = CODED;
      header[1] = static_cast<uint8_t>(plan.base);
      header[2] = static_cast<uint8_t>(plan.log2_tile - SMALLEST_TILE + (plan.lanes == FEW_LANES) * 8 + (fp16 != 0) * 16);
    }
  }
  if (header[0] == RAW) std::memcpy(message + HEADER, now, static_cast<size_t>(2 * n));
  std::memcpy(message, header, 4);
  return HEADER + size;
}

int64_t weight_decode(const uint8_t *message, int64_t size, uint16_t *weights, int64_t n) {
  const bool raw = message[0] == RAW;  // the caller has checked kind and length
  if (raw)
    std::memcpy(weights, message + HEADER, static_cast<size_t>(2 * n));
  else if (const auto found = decode_body(message[1], message[2], message + HEADER, message + size, weights, n))
    return found;
  Sums sums;
  sums.add_all(weights, n);
  if (std::memcmp(&sums, message + 4, 8) == 0) return 0;
  return raw ? MESSAGE_CHANGED : WEIGHTS_DIFFER;
}

void weight_sums(const uint16_t *weights, int64_t n, int64_t *sums) {
  Sums found;
  found.add_all(weights, n);
  std::memcpy(sums, &found, 16);
}

}  // namespace VARIANT
