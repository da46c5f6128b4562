// Calls the native library on behalf of another process: emulated.py, which describes the messages.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

void read(void *to, size_t size) {
  if (size && fread(to, size, 1, stdin) != 1) exit(feof(stdin) ? 0 : 1);
}

int64_t number() {
  int64_t value;
  read(&value, sizeof value);
  return value;
}

// Bytes with a fence of their own on both sides, at an address as odd as the caller's.
struct Buffer {
  static constexpr size_t FENCE = 64;
  size_t size, offset;
  std::vector<uint8_t> bytes;

  explicit Buffer(size_t size, size_t misalignment) : size(size), offset(FENCE), bytes(size + 3 * FENCE, 0xEE) {
    while ((reinterpret_cast<uintptr_t>(bytes.data()) + offset) % FENCE != misalignment % FENCE) ++offset;
  }
  uint8_t *data() { return bytes.data() + offset; }
  bool whole() const {
    for (size_t i = 0; i < bytes.size(); ++i)
      if ((i < offset || i >= offset + size) && bytes[i] != 0xEE) return false;
    return true;
  }
};

void *library;

template <class F>
F *function(const std::string &name) {
  void *found = dlsym(library, name.c_str());
  if (!found) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return reinterpret_cast<F *>(found);
}

}  // namespace

int main(int, char **arguments) {
  library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  for (;;) {
    std::string name(number(), ' ');
    read(&name[0], name.size());
    const int64_t variant = number();
    std::vector<uint8_t> structure(number());  // empty, or the one argument beside the variant
    read(structure.data(), structure.size());
    std::vector<int64_t> plain(number());  // or else these
    for (int64_t &value : plain) value = number();
    std::vector<Buffer> buffers;
    const int64_t count = number();
    buffers.reserve(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = number(), size = number(), misalignment = number();
      buffers.emplace_back(size, misalignment);
      read(buffers.back().data(), size);
      const auto address = reinterpret_cast<int64_t>(buffers.back().data());
      if (structure.empty())
        plain[place] = address;
      else
        memcpy(&structure[place], &address, sizeof address);
    }
    int64_t result = 0;
    if (name == "megatron_loco_variants") {
      result = function<int()>(name)();
    } else if (!structure.empty()) {
      function<void(int, const void *)>(name)(variant, structure.data());
    } else if (name == "megatron_loco_weight_sums") {
      function<void(int, int64_t, int64_t, int64_t)>(name)(variant, plain[0], plain[1], plain[2]);
    } else if (plain.size() == 6) {
      result = function<int64_t(int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t)>(name)(
          variant, plain[0], plain[1], plain[2], plain[3], plain[4], plain[5]);
    } else {
      result = function<int64_t(int, int64_t, int64_t, int64_t, int64_t)>(name)(variant, plain[0], plain[1],
                                                                                  plain[2], plain[3]);
    }
    for (const Buffer &buffer : buffers)
      if (!buffer.whole()) {
        fprintf(stderr, "%s wrote beyond a buffer\n", name.c_str());
        return 1;
      }
    fwrite(&result, sizeof result, 1, stdout);
    for (Buffer &buffer : buffers) fwrite(buffer.data(), 1, buffer.size, stdout);
    fflush(stdout);
  }
}
