// The exact code of weights' changes, tile by tile in the first-level cache. quantization/weight_code.py defines the
// bytes and is the place to read them; every plane of it appears once here, in each direction.
//
// Compiled once per instruction set (VARIANT names the namespace); dispatch.cpp picks one at run time.
#include "kernels.h"

#include <algorithm>
#include <cstring>

namespace VARIANT {
namespace {

constexpr int64_t TILE = 2048, HEADER = 48, CODED = 1, RAW = 2;
constexpr uint16_t NO_BITMAP = 0xffff;
constexpr int64_t SLACK = 64;  // behind the arrays of a tile: loops may write some codes more than there are

// Bit patterns on a line, -0 beside +0; its own inverse.
inline uint16_t line(uint16_t bits) { return bits & 0x8000 ? bits ^ 0x7fff : bits; }

struct Sums {
  uint64_t plain = 0, weighted = 0;

  // Adds n weights, the first of which is number `first` of the shard.
  void add(const uint16_t *weights, int64_t n, int64_t first) {
    constexpr int64_t PIECE = 256;  // (i + 1) * x fits 32 bits, and so do 256 of them
    for (int64_t start = 0; start < n; start += PIECE) {
      uint32_t sum = 0, by_place = 0;
      int64_t end = std::min(n - start, PIECE);
      const uint16_t *x = weights + start;
#pragma omp simd reduction(+ : sum, by_place)
      for (int64_t i = 0; i < end; ++i) {
        sum += x[i];
        by_place += static_cast<uint32_t>(i + 1) * x[i];
      }
      plain += sum;
      weighted += by_place + static_cast<uint64_t>(first + start) * sum;
    }
  }
};

// Numbers of `bits` bits <-> bytes, the first in the lowest bits; zeros behind the last.
template <int bits>
int64_t pack(uint8_t *numbers, int64_t n, uint8_t *bytes) {
  constexpr int64_t per_byte = 8 / bits;
  int64_t count = (n + per_byte - 1) / per_byte;
  std::fill(numbers + n, numbers + count * per_byte, 0);
  for (int64_t k = 0; k < count; ++k) {
    unsigned byte = 0;
    for (int l = 0; l < per_byte; ++l) byte |= static_cast<unsigned>(numbers[k * per_byte + l]) << (l * bits);
    bytes[k] = static_cast<uint8_t>(byte);
  }
  return count;
}

template <int bits>
void unpack(const uint8_t *bytes, int64_t n, uint8_t *numbers) {
  constexpr int64_t per_byte = 8 / bits;
  for (int64_t k = 0; k < (n + per_byte - 1) / per_byte; ++k)
    for (int l = 0; l < per_byte; ++l)
      numbers[k * per_byte + l] = static_cast<uint8_t>(bytes[k] >> (l * bits) & ((1 << bits) - 1));
}

template <int bits>
int64_t bytes_of(int64_t n) {
  return (n * bits + 7) / 8;
}

struct Tile {
  uint8_t first[TILE + SLACK], some[TILE + SLACK], more[TILE + SLACK];
  int16_t d[TILE + SLACK], far[TILE + SLACK];
  int32_t z[TILE + SLACK];
};

inline int32_t zigzag(int32_t d) { return 2 * ((d < 0 ? -d : d) - 2) + (d < 0); }
inline int32_t unzigzag(int32_t z) { return z & 1 ? -(z / 2 + 2) : z / 2 + 2; }

// Where each plane of a message is, and its place for the next tile.
struct Planes {
  uint8_t *bitmap, *first, *four, *eight, *sixteen, *end;

  template <class Counts>
  static Planes behind(uint8_t *start, int64_t n, Counts counts) {
    int64_t tiles = (n + TILE - 1) / TILE, sizes[5] = {0, 0, 0, 0, 0};
    for (int64_t tile = 0; tile < tiles; ++tile) {
      uint16_t c[4];
      counts(tile, c);
      int64_t length = std::min(TILE, n - tile * TILE);
      bool bitmap = c[0] != NO_BITMAP;
      sizes[0] += bitmap ? bytes_of<1>(length) : 0;
      sizes[1] += bytes_of<2>(bitmap ? c[0] : length);
      sizes[2] += bytes_of<4>(c[1]);
      sizes[3] += c[2];
      sizes[4] += 2 * static_cast<int64_t>(c[3]);
    }
    Planes p{};
    p.bitmap = start;
    p.first = p.bitmap + sizes[0];
    p.four = p.first + sizes[1];
    p.eight = p.four + sizes[2];
    p.sixteen = p.eight + sizes[3];
    p.end = p.sixteen + sizes[4];
    return p;
  }
};

void count(const uint16_t *old, const uint16_t *now, int64_t n, uint16_t *counts) {
  uint16_t changed = 0, escaped = 0, eights = 0, sixteens = 0;
#pragma omp simd reduction(+ : changed, escaped, eights, sixteens)
  for (int64_t i = 0; i < n; ++i) {
    int16_t d = static_cast<int16_t>(line(now[i]) - line(old[i]));
    changed += d != 0;
    escaped += d > 1 || d < -1;
    eights += d > 9 || d < -8;       // z >= 15
    sixteens += d > 136 || d < -136;  // z >= 270
  }
  counts[0] = 2 * changed < n ? changed : NO_BITMAP;
  counts[1] = escaped, counts[2] = eights, counts[3] = sixteens;
}

void encode_tile(const uint16_t *old, const uint16_t *now, int64_t n, const uint16_t *counts, Planes &p, Tile &t) {
  for (int64_t i = 0; i < n; ++i) {
    int16_t d = static_cast<int16_t>(line(now[i]) - line(old[i]));
    t.d[i] = d;
    t.first[i] = d == 0 ? 0 : d == 1 ? 1 : d == -1 ? 2 : 3;
  }
  int64_t escaped = 0;
  for (int64_t i = 0; i < n; ++i) {
    t.far[escaped] = t.d[i];
    escaped += t.first[i] == 3;
  }
  if (counts[0] != NO_BITMAP) {
    for (int64_t i = 0; i < n; ++i) t.some[i] = t.first[i] != 0;
    p.bitmap += pack<1>(t.some, n, p.bitmap);
    int64_t changed = 0;
    for (int64_t i = 0; i < n; ++i) {
      t.some[changed] = t.first[i];
      changed += t.first[i] != 0;
    }
    p.first += pack<2>(t.some, changed, p.first);
  } else {
    p.first += pack<2>(t.first, n, p.first);
  }
  if (escaped == 0) return;
  for (int64_t j = 0; j < escaped; ++j) {
    t.z[j] = zigzag(t.far[j]);
    t.some[j] = static_cast<uint8_t>(std::min(t.z[j], 15));
  }
  p.four += pack<4>(t.some, escaped, p.four);
  if (counts[2] == 0) return;
  for (int64_t j = 0; j < escaped; ++j) {
    if (t.z[j] < 15) continue;
    *p.eight++ = static_cast<uint8_t>(std::min(t.z[j] - 15, 255));
    if (t.z[j] >= 270) {
      std::memcpy(p.sixteen, &t.far[j], 2);
      p.sixteen += 2;
    }
  }
}

// Whether the planes fit their counts; weights are changed in place.
bool decode_tile(uint16_t *weights, int64_t n, const uint16_t *counts, Planes &p, Tile &t) {
  int64_t changed = n;
  if (counts[0] != NO_BITMAP) {
    changed = counts[0];
    unpack<1>(p.bitmap, n, t.more);
    p.bitmap += bytes_of<1>(n);
    unpack<2>(p.first, changed, t.some);
    int64_t k = 0;
    for (int64_t i = 0; i < n; ++i) {
      t.first[i] = t.more[i] ? t.some[k] : 0;
      k += t.more[i];
    }
    if (k != changed) return false;
  } else {
    unpack<2>(p.first, n, t.first);
  }
  p.first += bytes_of<2>(changed);
  int64_t escaped = 0;
  for (int64_t i = 0; i < n; ++i) escaped += t.first[i] == 3;
  if (escaped != counts[1]) return false;
  unpack<4>(p.four, escaped, t.some);
  p.four += bytes_of<4>(escaped);
  for (int64_t j = 0; j < escaped; ++j) t.far[j] = static_cast<int16_t>(unzigzag(t.some[j]));
  if (counts[2] != 0) {
    const uint8_t *eights = p.eight + counts[2], *sixteens = p.sixteen + 2 * counts[3];
    for (int64_t j = 0; j < escaped; ++j) {
      if (t.some[j] != 15) continue;
      if (p.eight == eights) return false;
      int32_t code = *p.eight++;
      if (code < 255) {
        t.far[j] = static_cast<int16_t>(unzigzag(code + 15));
      } else {
        if (p.sixteen == sixteens) return false;
        std::memcpy(&t.far[j], p.sixteen, 2);
        p.sixteen += 2;
      }
    }
    if (p.eight != eights || p.sixteen != sixteens) return false;
  } else if (std::count(t.some, t.some + escaped, 15)) {
    return false;
  }
  const int16_t near[4] = {0, 1, -1, 0};
  int64_t k = 0;
  for (int64_t i = 0; i < n; ++i) {
    t.d[i] = t.first[i] == 3 ? t.far[k] : near[t.first[i]];
    k += t.first[i] == 3;
  }
  for (int64_t i = 0; i < n; ++i) weights[i] = line(static_cast<uint16_t>(line(weights[i]) + t.d[i]));
  return true;
}

}  // namespace

int64_t weight_encode(const uint16_t *old, const uint16_t *now, int64_t n, uint8_t *message) {
  Tile t;
  int64_t tiles = (n + TILE - 1) / TILE, bound = HEADER + 2 * n;
  Sums before, after;
  before.add(old, n, 0);
  after.add(now, n, 0);
  int64_t header[6] = {RAW, n};
  std::memcpy(header + 2, &before, 16);
  std::memcpy(header + 4, &after, 16);
  uint8_t *at = message + HEADER;
  if (HEADER + 8 * tiles < bound) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      uint16_t counts[4];
      count(old + tile * TILE, now + tile * TILE, std::min(TILE, n - tile * TILE), counts);
      std::memcpy(at + 8 * tile, counts, 8);
    }
    auto counts = [at](int64_t tile, uint16_t *c) { std::memcpy(c, at + 8 * tile, 8); };
    Planes planes = Planes::behind(at + 8 * tiles, n, counts);
    int64_t size = planes.end - message;
    if (size < bound) {
      header[0] = CODED;
      std::memcpy(message, header, HEADER);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        uint16_t c[4];
        counts(tile, c);
        int64_t start = tile * TILE;
        encode_tile(old + start, now + start, std::min(TILE, n - start), c, planes, t);
      }
      return size;
    }
  }
  std::memcpy(message, header, HEADER);
  std::memcpy(at, now, 2 * n);
  return bound;
}

int64_t weight_decode(const uint8_t *message, int64_t size, uint16_t *weights, int64_t n) {
  int64_t header[6], tiles = (n + TILE - 1) / TILE;
  std::memcpy(header, message, HEADER);  // which the caller has looked at
  Sums before, after, told_before, told_after;
  std::memcpy(&told_before, header + 2, 16);
  std::memcpy(&told_after, header + 4, 16);
  if (header[0] == RAW) {
    before.add(weights, n, 0);
    if (std::memcmp(&before, &told_before, 16)) return WEIGHTS_DIFFER;
    std::memcpy(weights, message + HEADER, 2 * n);
    after.add(weights, n, 0);
    return std::memcmp(&after, &told_after, 16) ? MESSAGE_CHANGED : 0;
  }
  uint8_t *at = const_cast<uint8_t *>(message) + HEADER;  // Planes serve both directions; nothing is written
  if (size < HEADER + 8 * tiles) return MESSAGE_CHANGED;
  auto counts = [at](int64_t tile, uint16_t *c) { std::memcpy(c, at + 8 * tile, 8); };
  for (int64_t tile = 0; tile < tiles; ++tile) {
    uint16_t c[4];
    counts(tile, c);
    int64_t length = std::min(TILE, n - tile * TILE), changed = c[0] == NO_BITMAP ? length : c[0];
    if (changed > length || c[1] > changed || c[2] > c[1] || c[3] > c[2]) return MESSAGE_CHANGED;
  }
  Planes planes = Planes::behind(at + 8 * tiles, n, counts);
  if (planes.end != message + size) return MESSAGE_CHANGED;
  Tile t;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    uint16_t c[4];
    counts(tile, c);
    int64_t start = tile * TILE, length = std::min(TILE, n - start);
    before.add(weights + start, length, start);
    if (!decode_tile(weights + start, length, c, planes, t)) return MESSAGE_CHANGED;
    after.add(weights + start, length, start);
  }
  if (std::memcmp(&before, &told_before, 16)) return WEIGHTS_DIFFER;
  return std::memcmp(&after, &told_after, 16) ? MESSAGE_CHANGED : 0;
}

}  // namespace VARIANT
