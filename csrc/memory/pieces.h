// The pieces in which a block travels: packed or as they are, each with a checksum.
#pragma once

#include <cstdint>

namespace torch_odt::memory {

// So much of a block goes through the buffer of a thread at once.
constexpr int64_t kPieceBytes = int64_t{1} << 20;
// A packed piece has a bit for each of its 32-bit words in front.
constexpr int64_t kMaskBytes = kPieceBytes / 32;

uint64_t checksum(const char* data, int64_t bytes);

// Writes a bit for each 32-bit word of `data`, and those words that are not zero; returns the bytes that this takes, or
// -1 when that is no less than `most`. `bytes` is a multiple of 4 and at most kPieceBytes.
int64_t pack_words(const char* data, int64_t bytes, char* packed, int64_t most);
// The inverse. Returns false when the packed words do not fit to their bits.
bool unpack_words(const char* packed, int64_t packed_bytes, char* data, int64_t bytes);

} // namespace torch_odt::memory
