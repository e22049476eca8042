// Which parts of a file are in use.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

namespace torch_odt::memory {

struct Extent {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// First fit among what was given back, then at the end, up to a limit. Not thread-safe.
class FileSpace {
 public:
  explicit FileSpace(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Nothing when there is no such room below the limit.
  std::optional<Extent> take(int64_t bytes) {
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      const auto [offset, size] = *hole;
      if (size >= bytes) {
        holes_.erase(hole);
        if (size > bytes) {
          holes_.emplace(offset + bytes, size - bytes);
        }
        used_bytes_ += bytes;
        return Extent{offset, bytes};
      }
    }
    if (bytes > limit_bytes_ - end_) {
      return std::nullopt;
    }
    const Extent extent{end_, bytes};
    end_ += bytes;
    used_bytes_ += bytes;
    return extent;
  }

  void give_back(const Extent& extent) {
    if (extent.bytes == 0) {
      return;
    }
    used_bytes_ -= extent.bytes;
    auto next = holes_.emplace(extent.offset, extent.bytes).first;
    if (next != holes_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second == next->first) {
        previous->second += next->second;
        holes_.erase(next);
        next = previous;
      }
    }
    const auto following = std::next(next);
    if (following != holes_.end() && next->first + next->second == following->first) {
      next->second += following->second;
      holes_.erase(following);
    }
    if (next->first + next->second == end_) {
      end_ = next->first;
      holes_.erase(next);
    }
  }

  int64_t limit_bytes() const {
    return limit_bytes_;
  }
  int64_t used_bytes() const {
    return used_bytes_;
  }
  int64_t end() const {
    return end_;
  }

 private:
  int64_t limit_bytes_;
  int64_t end_ = 0;
  int64_t used_bytes_ = 0;
  std::map<int64_t, int64_t> holes_; // offset -> bytes
};

} // namespace torch_odt::memory
