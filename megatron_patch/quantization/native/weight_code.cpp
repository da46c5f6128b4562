// The exact code of weights' changes, tile by tile in the first-level cache. weights/code.py defines the
// bytes and is the place to read them; every plane of it appears once here, in each direction.
//
// Compiled once per instruction set (VARIANT names the namespace); dispatch.cpp picks one at run time.
#include "kernels.h"
#include "weights.h"

namespace VARIANT {
namespace {

constexpr int64_t TILE = PIECE, HEADER = 56, CODED = 1, RAW = 2;
constexpr uint16_t NO_BITMAP = 0xffff;
constexpr int64_t SLACK = 64;  // behind the arrays of a tile: loops may touch some numbers more than there are

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
int64_t bytes_of(int64_t n) {
  return (n * bits + 7) / 8;
}

// --- the chosen ones of n numbers, put together ---
//
// `chosen` has a 1 or 0 for each number, and 8 zeros behind. Up to 8 numbers behind the last may be read or written.

#ifdef __AVX2__
// Tables are constants of the library, not filled as it is loaded: that would run this variant's instructions on
// processors that lack them.
struct Permutations {  // of the bytes of 8 numbers, for each set of chosen ones; 0x80 for a zero
  alignas(16) uint8_t together[256][16] = {}, apart[256][16] = {};
  constexpr Permutations() {
    for (int set = 0; set < 256; ++set) {
      for (int byte = 0; byte < 16; ++byte) together[set][byte] = apart[set][byte] = 0x80;
      int found = 0;
      for (int lane = 0; lane < 8; ++lane) {
        if (!(set >> lane & 1)) continue;
        for (int byte = 0; byte < 2; ++byte) {
          together[set][2 * found + byte] = static_cast<uint8_t>(2 * lane + byte);
          apart[set][2 * lane + byte] = static_cast<uint8_t>(2 * found + byte);
        }
        ++found;
      }
    }
  }
};
constexpr Permutations permutations;

inline unsigned set_of(const uint8_t *chosen) {
  __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(chosen));
  return static_cast<unsigned>(_mm_movemask_epi8(_mm_slli_epi16(eight, 7)));
}
#endif

int64_t put_together(const uint16_t *numbers, const uint8_t *chosen, int64_t n, uint16_t *found) {
  int64_t count = 0;
#ifdef __AVX2__
  for (int64_t i = 0; i < n; i += 8) {
    unsigned set = set_of(chosen + i);
    __m128i order = _mm_load_si128(reinterpret_cast<const __m128i *>(permutations.together[set]));
    __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i *>(numbers + i));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(found + count), _mm_shuffle_epi8(eight, order));
    count += __builtin_popcount(set);
  }
#else
  for (int64_t i = 0; i < n; ++i) {
    found[count] = numbers[i];
    count += chosen[i];
  }
#endif
  return count;
}

// --- one tile ---

struct Tile {
  uint8_t bytes[TILE + SLACK], chosen[TILE + SLACK];
  uint16_t d[TILE + SLACK], first[TILE + SLACK], few[TILE + SLACK], far[TILE + SLACK], farther[TILE + SLACK];

  // Which of n numbers `is` holds for.
  template <class Is>
  void choose(int64_t n, Is is) {
    for (int64_t i = 0; i < n; ++i) chosen[i] = is(i);
    std::fill_n(chosen + n, 8, 0);
  }

  template <int bits>
  void write(const uint16_t *codes, int64_t n, uint8_t *&plane) {
    for (int64_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
    plane += pack<bits>(bytes, n, plane);
  }
};

inline int32_t zigzag(int32_t d) { return 2 * ((d < 0 ? -d : d) - 2) + (d < 0); }
constexpr int32_t unzigzag(int32_t z) { return z & 1 ? -(z / 2 + 2) : z / 2 + 2; }

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

// How many have changed.
int64_t count(const uint16_t *old, const uint16_t *now, int64_t n, uint16_t *counts) {
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
  return changed;
}

void encode_tile(const uint16_t *old, const uint16_t *now, int64_t n, const uint16_t *counts, Planes &p, Tile &t) {
  for (int64_t i = 0; i < n; ++i) {
    auto d = static_cast<uint16_t>(line(now[i]) - line(old[i]));
    t.d[i] = d;
    t.first[i] = d == 0 ? 0 : d == 1 ? 1 : d == 0xffff ? 2 : 3;
  }
  if (counts[0] != NO_BITMAP) {
    t.choose(n, [&](int64_t i) { return t.first[i] != 0; });
    int64_t changed = put_together(t.first, t.chosen, n, t.few);
    p.bitmap += pack<1>(t.chosen, n, p.bitmap);
    t.write<2>(t.few, changed, p.first);
  } else {
    t.write<2>(t.first, n, p.first);
  }
  if (counts[1] == 0) return;
  t.choose(n, [&](int64_t i) { return t.first[i] == 3; });
  int64_t escaped = put_together(t.d, t.chosen, n, t.far);
  for (int64_t j = 0; j < escaped; ++j) {
    t.far[j] = static_cast<uint16_t>(zigzag(static_cast<int16_t>(t.far[j])));
    t.few[j] = std::min<uint16_t>(t.far[j], 15);
  }
  t.write<4>(t.few, escaped, p.four);
  if (counts[2] == 0) return;
  t.choose(escaped, [&](int64_t j) { return t.far[j] >= 15; });
  int64_t eights = put_together(t.far, t.chosen, escaped, t.farther);
  for (int64_t j = 0; j < eights; ++j) p.eight[j] = static_cast<uint8_t>(std::min(t.farther[j] - 15, 255));
  p.eight += eights;
  if (counts[3] == 0) return;
  for (int64_t j = 0; j < eights; ++j) {
    if (t.farther[j] < 270) continue;
    int16_t d = static_cast<int16_t>(unzigzag(t.farther[j]));
    std::memcpy(p.sixteen, &d, 2);
    p.sixteen += 2;
  }
}

// Of one tile; loops may touch some numbers more than there are.
struct Differences {
  int16_t d[TILE + SLACK], few[TILE + SLACK], far[TILE + SLACK], farther[TILE + SLACK];
  uint64_t escapes[TILE / 64], chosen[TILE / 64];  // a bit for each number
};

// What a byte of the 2-bit plane says of four weights, and one of the 4-bit plane of two.
struct Tables {
  int16_t first[256][4] = {}, four[256][2] = {};            // d; 0 where a later plane says it
  uint8_t first_escapes[256] = {}, four_escapes[256] = {};  // where that is
  constexpr Tables() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int place = 0; place < 4; ++place) {
        int code = byte >> (2 * place) & 3;
        first[byte][place] = static_cast<int16_t>((code == 1) - (code == 2));
        first_escapes[byte] |= static_cast<uint8_t>((code == 3) << place);
      }
      for (int place = 0; place < 2; ++place) {
        int z = byte >> (4 * place) & 15;
        four[byte][place] = static_cast<int16_t>(z == 15 ? 0 : unzigzag(z));
        four_escapes[byte] |= static_cast<uint8_t>((z == 15) << place);
      }
    }
  }
};
constexpr Tables tables;

// Numbers into the places that `chosen`, a bit for each of n, has set, where zeros are; how many.
// Up to 8 numbers behind the last may be read, and as many zeros behind the last place.
int64_t put_apart(const int16_t *found, const uint64_t *chosen, int64_t n, int16_t *numbers) {
  const int16_t *from = found;
#ifdef __AVX2__
  const auto *sets = reinterpret_cast<const uint8_t *>(chosen);
  for (int64_t i = 0; i < n; i += 8) {
    unsigned set = sets[i / 8];
    __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    __m128i order = _mm_load_si128(reinterpret_cast<const __m128i *>(permutations.apart[set]));
    auto *to = reinterpret_cast<__m128i *>(numbers + i);
    _mm_storeu_si128(to, _mm_or_si128(_mm_loadu_si128(to), _mm_shuffle_epi8(eight, order)));
    from += __builtin_popcount(set);
  }
#else
  for (int64_t start = 0; start < n; start += 64)
    for (uint64_t set = chosen[start / 64]; set; set &= set - 1) numbers[start + __builtin_ctzll(set)] = *from++;
#endif
  return from - found;
}

// Bits behind the first n of `chosen` are cleared; how many of those are set.
int64_t count_set(uint64_t *chosen, int64_t n) {
  int64_t count = 0;
  if (n % 64) chosen[n / 64] &= (uint64_t{1} << n % 64) - 1;
  for (int64_t k = 0; k < (n + 63) / 64; ++k) count += __builtin_popcountll(chosen[k]);
  return count;
}

// n codes of a plane as d, and which of them a later plane says; how many those are.
template <int per_byte>
int64_t read(const uint8_t *plane, int64_t n, const int16_t (*said)[per_byte], const uint8_t *later, int16_t *d,
             uint64_t *escapes) {
  constexpr int64_t per_word = 64 / per_byte;
  int64_t bytes = (n + per_byte - 1) / per_byte;
  for (int64_t start = 0; start < bytes; start += per_word) {
    uint64_t set = 0;
    for (int64_t k = start; k < std::min(start + per_word, bytes); ++k) {
      std::memcpy(d + per_byte * k, said[plane[k]], 2 * per_byte);
      set |= static_cast<uint64_t>(later[plane[k]]) << ((k - start) * per_byte);
    }
    escapes[start / per_word] = set;
  }
  return count_set(escapes, n);
}

// The planes of one tile as d. Whether they fit their counts.
bool read_tile(int64_t n, const uint16_t *counts, Planes &p, Differences &t) {
  bool bitmap = counts[0] != NO_BITMAP;
  int64_t said = bitmap ? counts[0] : n, escaped = counts[1], eights = counts[2], sixteens = counts[3];
  int16_t *d = bitmap ? t.few : t.d;
  if (read<4>(p.first, said, tables.first, tables.first_escapes, d, t.escapes) != escaped) return false;
  p.first += bytes_of<2>(said);
  if (escaped) {
    if (read<2>(p.four, escaped, tables.four, tables.four_escapes, t.far, t.chosen) != eights) return false;
    p.four += bytes_of<4>(escaped);
    for (int64_t j = 0; j < eights; ++j) t.farther[j] = static_cast<int16_t>(unzigzag(p.eight[j] + 15));
    for (int64_t j = 0; j < eights; ++j) {
      if (p.eight[j] != 255) continue;
      if (sixteens-- == 0) return false;
      std::memcpy(&t.farther[j], p.sixteen, 2);
      p.sixteen += 2;
    }
    p.eight += eights;
    if (sixteens) return false;
    put_apart(t.farther, t.chosen, escaped, t.far);
    put_apart(t.far, t.escapes, said, d);
  }
  if (!bitmap) return true;
  std::memcpy(t.chosen, p.bitmap, bytes_of<1>(n));  // the lower byte first, as bits lie in it
  p.bitmap += bytes_of<1>(n);
  if (count_set(t.chosen, n) != said) return false;
  std::fill_n(t.d, n, 0);
  put_apart(t.few, t.chosen, n, t.d);
  return true;
}

}  // namespace

int64_t weight_encode(const uint16_t *old, const uint16_t *now, int64_t n, uint8_t *message) {
  Tile t;
  int64_t tiles = (n + TILE - 1) / TILE, bound = HEADER + 2 * n;
  Sums before, after;
  int64_t header[7] = {RAW, n, n};
  uint8_t *at = message + HEADER;
  bool room = HEADER + 8 * tiles < bound;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    uint16_t counts[4];
    int64_t start = tile * TILE, length = std::min(TILE, n - start);
    header[2] -= count(old + start, now + start, length, counts);
    before.add(old + start, length, tile);  // while they are in the cache
    after.add(now + start, length, tile);
    if (room) std::memcpy(at + 8 * tile, counts, 8);
  }
  std::memcpy(header + 3, &before, 16);
  std::memcpy(header + 5, &after, 16);
  if (room) {
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
  int64_t header[7], tiles = (n + TILE - 1) / TILE;
  std::memcpy(header, message, HEADER);  // which the caller has looked at
  Sums sums, told;
  std::memcpy(&told, header + 5, 16);
  if (header[0] == RAW) {
    std::memcpy(weights, message + HEADER, 2 * n);
    sums.add_all(weights, n);
    return std::memcmp(&sums, &told, 16) ? MESSAGE_CHANGED : 0;
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
  Differences t;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    uint16_t c[4];
    counts(tile, c);
    int64_t start = tile * TILE, length = std::min(TILE, n - start);
    if (!read_tile(length, c, planes, t)) return MESSAGE_CHANGED;
    uint16_t *of_tile = weights + start;
    for (int64_t i = 0; i < length; ++i) of_tile[i] = line(static_cast<uint16_t>(line(of_tile[i]) + t.d[i]));
    sums.add(of_tile, length, tile);
  }
  return std::memcmp(&sums, &told, 16) ? WEIGHTS_DIFFER : 0;
}

void weight_sums(const uint16_t *weights, int64_t n, int64_t *sums) {
  Sums found;
  found.add_all(weights, n);
  std::memcpy(sums, &found, 16);
}

}  // namespace VARIANT
