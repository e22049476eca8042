// Moves blocks of memory to a file and back, on threads of its own, while the caller computes.
//
// A page is one block on its way or in the file. Every transfer goes through a small aligned buffer, so that blocks may
// lie anywhere, and carries a checksum, so that what comes back is what left. Nothing is lost by an error: a block whose
// writing failed is still where it was, and whoever waits for a transfer is told.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backing_file.h"
#include "file_space.h"
#include "mapping.h"

namespace torch_odt::memory {

enum class PagingFault { none, full, failed, torn, slow, forked };

// What a transfer ended with.
class PagingError : public std::runtime_error {
 public:
  PagingError(PagingFault fault, const std::string& text) : std::runtime_error(text), fault(fault) {}
  const PagingFault fault;
};

struct PagerStats {
  int64_t pages = 0; // now, on their way included
  int64_t file_bytes = 0; // in use now
  int64_t file_peak_bytes = 0;
  int64_t written_bytes = 0; // in all, as they are in the file
  int64_t read_bytes = 0;
  int64_t written_pages = 0;
  int64_t read_pages = 0;
  int64_t retries = 0;
  double write_seconds = 0; // of transfers alone
  double read_seconds = 0;
  double wait_seconds = 0; // of callers
};

class Pager {
 public:
  // `packs`: words that are zero take a bit each in the file. `patience_seconds`: how long `wait` waits.
  Pager(std::unique_ptr<Storage> storage, int64_t limit_bytes, int threads, bool packs, double patience_seconds);
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // Begins to write a block, which must stay as it is until `wait` returns. Throws PagingError when the file may not or
  // cannot grow so far; the block is untouched then.
  int64_t page_out(const void* data, int64_t bytes);
  // Begins to fill a block with a page, whose bytes it must have; it must stay until `wait` returns. `is_last`: the page
  // is not read again, and its place in the file is free once it has been; `page_out` waits for that if it has to.
  void page_in(int64_t page, void* data, bool is_last = false);
  // Returns when nothing is under way for a page. Throws PagingError for the transfer that failed, each time until the
  // page is dropped or read again, and when it takes too long; then it is still under way.
  void wait(int64_t page);
  // Forgets a page; what is under way for it ends first. Returns false when that takes too long, and at once when it has
  // taken too long before: the page stays then, and its block must.
  bool drop(int64_t page);

  PagerStats stats() const;

 private:
  enum class State { writing, stored, reading, unwritten };

  struct Page {
    State state = State::writing;
    // A thread has it: before that, it can be taken back.
    bool is_moving = false;
    bool is_last = false;
    int64_t bytes = 0;
    Extent extent;
    // Of each piece: bytes in the file, and the checksum of its contents.
    std::vector<int64_t> piece_bytes;
    std::vector<uint64_t> checksums;
    const char* source = nullptr;
    char* target = nullptr;
    PagingFault fault = PagingFault::none;
    std::string error;
    int64_t retries = 0;
  };

  Page& find(int64_t page);
  const Page& find(int64_t page) const;
  bool settle(std::unique_lock<std::mutex>& lock, const Page& page);
  void require_settled(std::unique_lock<std::mutex>& lock, const Page& page);
  void require_own_process() const;
  PagingError slow_error(int64_t bytes) const;
  std::optional<Extent> take(std::unique_lock<std::mutex>& lock, int64_t bytes);
  void work(char* buffer);
  void end();
  void finish(Page& page, bool is_read, double seconds);
  void write(Page& page, char* buffer);
  void read(Page& page, char* buffer);
  std::string read_piece(Page& page, size_t piece, int64_t offset, char* buffer);

  const std::unique_ptr<Storage> storage_;
  const bool packs_;
  const double patience_seconds_;
  const int process_;
  mutable std::mutex mutex_;
  std::unique_ptr<std::condition_variable> has_work_ = std::make_unique<std::condition_variable>();
  std::unique_ptr<std::condition_variable> is_done_ = std::make_unique<std::condition_variable>();
  std::unordered_map<int64_t, std::unique_ptr<Page>> pages_;
  // Reads come first: somebody waits for them sooner.
  std::deque<Page*> reads_;
  std::deque<Page*> writes_;
  // Pages whose last reading is under way.
  int leaving_ = 0;
  FileSpace space_;
  int64_t reserved_bytes_ = 0;
  int64_t next_page_ = 0;
  bool is_ending_ = false;
  // Somebody has lost patience, and nothing has moved since.
  bool is_stuck_ = false;
  PagerStats stats_;
  std::vector<std::unique_ptr<Mapping>> buffers_;
  std::vector<std::thread> threads_;
};

} // namespace torch_odt::memory
