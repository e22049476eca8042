#include "pieces.h"

#include <bit>
#include <cstring>

namespace torch_odt::memory {

namespace {

constexpr int64_t kLanes = 4;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15; // of the golden ratio: its bits look random
constexpr int kTurn = 29;

uint64_t mixed(uint64_t state, uint64_t word) {
  return std::rotl((state ^ word) * kOdd, kTurn);
}

template <typename Word>
Word load(const char* data) {
  Word word;
  std::memcpy(&word, data, sizeof(Word));
  return word;
}

int64_t mask_bytes(int64_t words) {
  return (words + 63) / 64 * 8;
}

} // namespace

uint64_t checksum(const char* data, int64_t bytes) {
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  int64_t at = 0;
  // Lanes do not wait for each other.
  for (; at + kLanes * 8 <= bytes; at += kLanes * 8) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = mixed(lanes[lane], load<uint64_t>(data + at + lane * 8));
    }
  }
  uint64_t result = static_cast<uint64_t>(bytes);
  for (const uint64_t lane : lanes) {
    result = mixed(result, lane);
  }
  for (; at < bytes; ++at) {
    result = mixed(result, static_cast<unsigned char>(data[at]));
  }
  return result ^ (result >> 32);
}

int64_t pack_words(const char* data, int64_t bytes, char* packed, int64_t most) {
  const int64_t words = bytes / 4;
  int64_t end = mask_bytes(words);
  for (int64_t first = 0; first < words; first += 64) {
    const int64_t count = words - first < 64 ? words - first : 64;
    if (end + count * 4 > most) {
      return -1;
    }
    uint64_t mask = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t word = load<uint32_t>(data + (first + i) * 4);
      const bool is_there = word != 0;
      mask |= static_cast<uint64_t>(is_there) << i;
      // Written in any case, and overwritten by the next one if it is zero: no branch to guess.
      std::memcpy(packed + end, &word, 4);
      end += is_there ? 4 : 0;
    }
    std::memcpy(packed + first / 8, &mask, 8);
  }
  return end < most ? end : -1;
}

bool unpack_words(const char* packed, int64_t packed_bytes, char* data, int64_t bytes) {
  const int64_t words = bytes / 4;
  int64_t at = mask_bytes(words);
  for (int64_t first = 0; first < words; first += 64) {
    const int64_t count = words - first < 64 ? words - first : 64;
    const uint64_t mask = load<uint64_t>(packed + first / 8);
    if (at + 4 * std::popcount(mask) > packed_bytes) {
      return false;
    }
    for (int64_t i = 0; i < count; ++i) {
      uint32_t word = 0;
      if ((mask >> i & 1) != 0) {
        word = load<uint32_t>(packed + at);
        at += 4;
      }
      std::memcpy(data + (first + i) * 4, &word, 4);
    }
  }
  return at == packed_bytes;
}

} // namespace torch_odt::memory
