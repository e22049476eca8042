// A file that holds what was paged out: opened so that the system keeps no copy in memory, and gone with its process.
#pragma once

#include <cstdint>
#include <string>

namespace torch_odt::memory {

// Offsets and lengths are multiples of this: what direct input and output ask for, on every usual device.
constexpr int64_t kBlockBytes = 4096;

// What pages are written to and read from. All functions may be called by several threads at once; they return 0, or
// the system's number for what went wrong. `end_of_data` says that the file is shorter than it was.
class Storage {
 public:
  static constexpr int kEndOfData = -1;

  virtual ~Storage() = default;
  virtual int write(const char* data, int64_t bytes, int64_t offset) = 0;
  virtual int read(char* data, int64_t bytes, int64_t offset) = 0;
  // Makes the file at least so long, so that a full device is noticed before anything depends on it.
  virtual int reserve(int64_t bytes) = 0;
};

// A nameless file in a folder: nothing of it is left behind, however the process ends.
class BackingFile final : public Storage {
 public:
  // Throws std::runtime_error when there can be no file in this folder.
  explicit BackingFile(const std::string& folder);
  ~BackingFile() override;
  BackingFile(const BackingFile&) = delete;
  BackingFile& operator=(const BackingFile&) = delete;

  int write(const char* data, int64_t bytes, int64_t offset) override;
  int read(char* data, int64_t bytes, int64_t offset) override;
  int reserve(int64_t bytes) override;

  int descriptor() const {
    return descriptor_;
  }
  // Whether transfers go past the system's cache; otherwise the cache is emptied behind them.
  bool is_direct() const {
    return is_direct_;
  }

 private:
  void drop_cached(int64_t offset, int64_t bytes) const;

  int descriptor_ = -1;
  bool is_direct_ = false;
};

} // namespace torch_odt::memory
