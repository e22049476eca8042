#include "pager.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include <unistd.h>

#include "pieces.h"

namespace torch_odt::memory {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

PagingFault fault_of(int number) {
  if (number == Storage::kEndOfData) {
    return PagingFault::torn;
  }
  // A quota and a limit on the size of files are full devices, too.
  return number == ENOSPC || number == EDQUOT || number == EFBIG ? PagingFault::full : PagingFault::failed;
}

std::string text_of(int number) {
  return number == Storage::kEndOfData ? "the file has become shorter" : std::strerror(number);
}

} // namespace

Pager::Pager(
    std::unique_ptr<Storage> storage, int64_t limit_bytes, int threads, bool packs, double patience_seconds)
    : storage_(std::move(storage)),
      packs_(packs),
      patience_seconds_(patience_seconds),
      process_(getpid()),
      space_(limit_bytes / kBlockBytes * kBlockBytes) {
  if (limit_bytes <= 0 || threads <= 0) {
    throw std::invalid_argument("a pager needs bytes in its file, and a thread");
  }
  // All that can fail comes first, and the memory is there from the beginning, for whoever counts it.
  for (int i = 0; i < threads; ++i) {
    buffers_.push_back(std::make_unique<Mapping>(kPieceBytes, Mapping::Access::read_write));
    std::memset(buffers_.back()->base(), 0, static_cast<size_t>(kPieceBytes));
  }
  try {
    for (const std::unique_ptr<Mapping>& buffer : buffers_) {
      threads_.emplace_back([this, base = buffer->base()] { work(base); });
    }
  } catch (...) {
    end();
    throw;
  }
}

Pager::~Pager() {
  end();
}

void Pager::end() {
  if (getpid() != process_) {
    // The threads are those of another process; here, they are names alone, and what they wait for would wait for them.
    for (std::thread& thread : threads_) {
      thread.detach();
    }
    static_cast<void>(has_work_.release());
    static_cast<void>(is_done_.release());
    return;
  }
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    is_ending_ = true;
    // What nobody has begun is not needed any more.
    reads_.clear();
    writes_.clear();
  }
  has_work_->notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void Pager::require_own_process() const {
  if (getpid() != process_) {
    throw PagingError(PagingFault::forked, "this process is a fork of the one that pages, and cannot page");
  }
}

int64_t Pager::page_out(const void* data, int64_t bytes) {
  if (bytes <= 0) {
    throw std::invalid_argument("a page has at least one byte");
  }
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  const std::optional<Extent> extent = take(lock, round_up(bytes, kBlockBytes));
  if (!extent && leaving_ > 0) {
    throw slow_error(bytes);
  }
  if (!extent) {
    throw PagingError(
        PagingFault::full,
        "the file for paging may not grow by another " + std::to_string(bytes) + " bytes; it holds " +
            std::to_string(space_.used_bytes()) + " of at most " + std::to_string(space_.limit_bytes()));
  }
  if (space_.end() > reserved_bytes_) {
    const int number = storage_->reserve(space_.end());
    if (number != 0) {
      space_.give_back(*extent);
      throw PagingError(fault_of(number), "cannot make the file for paging larger: " + text_of(number));
    }
    reserved_bytes_ = space_.end();
  }
  auto page = std::make_unique<Page>();
  page->bytes = bytes;
  page->extent = *extent;
  page->source = static_cast<const char*>(data);
  writes_.push_back(page.get());
  const int64_t id = next_page_++;
  pages_.emplace(id, std::move(page));
  stats_.file_peak_bytes = std::max(stats_.file_peak_bytes, space_.used_bytes());
  has_work_->notify_one();
  return id;
}

// Room in the file, as soon as it is there.
std::optional<Extent> Pager::take(std::unique_lock<std::mutex>& lock, int64_t bytes) {
  const Clock::time_point start = Clock::now();
  const Clock::time_point end = start + std::chrono::duration_cast<Clock::duration>(
                                            std::chrono::duration<double>(patience_seconds_));
  std::optional<Extent> extent = space_.take(bytes);
  while (!extent && leaving_ > 0 && is_done_->wait_until(lock, end) == std::cv_status::no_timeout) {
    extent = space_.take(bytes);
  }
  stats_.wait_seconds += seconds_since(start);
  return extent;
}

void Pager::page_in(int64_t id, void* data, bool is_last) {
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  Page& page = find(id);
  require_settled(lock, page);
  if (page.state == State::unwritten) {
    throw PagingError(page.fault, page.error);
  }
  if (page.extent.bytes == 0) {
    throw std::invalid_argument("page " + std::to_string(id) + " has been read for the last time");
  }
  page.is_last = is_last;
  leaving_ += is_last;
  page.state = State::reading;
  page.target = static_cast<char*>(data);
  reads_.push_back(&page);
  has_work_->notify_one();
}

void Pager::wait(int64_t id) {
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  const Page& page = find(id);
  require_settled(lock, page);
  if (page.fault != PagingFault::none) {
    throw PagingError(page.fault, page.error);
  }
}

bool Pager::drop(int64_t id) {
  if (getpid() != process_) {
    return true;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  Page& page = find(id);
  if (page.is_moving) {
    if (is_stuck_ || !settle(lock, page)) {
      return false;
    }
  } else {
    leaving_ -= static_cast<int>(std::erase(reads_, &page)) * page.is_last;
    std::erase(writes_, &page);
  }
  space_.give_back(page.extent);
  pages_.erase(id);
  return true;
}

PagerStats Pager::stats() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  PagerStats result = stats_;
  result.pages = static_cast<int64_t>(pages_.size());
  result.file_bytes = space_.used_bytes();
  return result;
}

Pager::Page& Pager::find(int64_t id) {
  return const_cast<Page&>(std::as_const(*this).find(id));
}

const Pager::Page& Pager::find(int64_t id) const {
  const auto found = pages_.find(id);
  if (found == pages_.end()) {
    throw std::invalid_argument("there is no page " + std::to_string(id));
  }
  return *found->second;
}

void Pager::require_settled(std::unique_lock<std::mutex>& lock, const Page& page) {
  if (!settle(lock, page)) {
    throw slow_error(page.bytes);
  }
}

PagingError Pager::slow_error(int64_t bytes) const {
  return {
      PagingFault::slow,
      "moving " + std::to_string(bytes) + " bytes takes longer than " +
          std::to_string(static_cast<int64_t>(patience_seconds_)) + " seconds"};
}

// Waits until nothing is under way for a page; returns false when that takes too long.
bool Pager::settle(std::unique_lock<std::mutex>& lock, const Page& page) {
  const auto is_settled = [&page] { return page.state == State::stored || page.state == State::unwritten; };
  if (is_settled()) {
    return true;
  }
  const Clock::time_point start = Clock::now();
  const bool is_done = is_done_->wait_for(lock, std::chrono::duration<double>(patience_seconds_), is_settled);
  stats_.wait_seconds += seconds_since(start);
  is_stuck_ = !is_done;
  return is_done;
}

void Pager::work(char* buffer) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    has_work_->wait(lock, [this] { return is_ending_ || !reads_.empty() || !writes_.empty(); });
    if (is_ending_) {
      return;
    }
    std::deque<Page*>& queue = reads_.empty() ? writes_ : reads_;
    Page& page = *queue.front();
    queue.pop_front();
    const bool is_read = page.state == State::reading;
    page.is_moving = true;
    lock.unlock();
    const Clock::time_point start = Clock::now();
    page.fault = PagingFault::none;
    try {
      if (is_read) {
        read(page, buffer);
      } else {
        write(page, buffer);
      }
    } catch (const std::exception& error) {
      page.fault = PagingFault::failed;
      page.error = error.what();
    }
    const double seconds = seconds_since(start);
    lock.lock();
    finish(page, is_read, seconds);
    is_done_->notify_all();
  }
}

// With the lock held: what a transfer means for everybody else.
void Pager::finish(Page& page, bool is_read, double seconds) {
  const bool is_in_file = is_read || page.fault == PagingFault::none;
  page.state = is_in_file ? State::stored : State::unwritten;
  page.is_moving = false;
  is_stuck_ = false;
  page.source = nullptr;
  page.target = nullptr;
  stats_.retries += page.retries;
  page.retries = 0;
  int64_t bytes = 0;
  for (const int64_t piece : page.piece_bytes) {
    bytes += round_up(piece, kBlockBytes);
  }
  if (is_read) {
    if (page.is_last) {
      --leaving_;
      if (page.fault == PagingFault::none) {
        space_.give_back(page.extent);
        page.extent.bytes = 0;
      }
    }
    stats_.read_seconds += seconds;
    stats_.read_bytes += bytes;
    ++stats_.read_pages;
    return;
  }
  stats_.write_seconds += seconds;
  stats_.written_bytes += bytes;
  ++stats_.written_pages;
  if (is_in_file) {
    // What packing has spared.
    space_.give_back({page.extent.offset + bytes, page.extent.bytes - bytes});
    page.extent.bytes = bytes;
  }
}

void Pager::write(Page& page, char* buffer) {
  int64_t offset = page.extent.offset;
  for (int64_t at = 0; at < page.bytes; at += kPieceBytes) {
    const int64_t raw_bytes = std::min(kPieceBytes, page.bytes - at);
    int64_t bytes = packs_ && raw_bytes % 4 == 0 ? pack_words(page.source + at, raw_bytes, buffer, raw_bytes) : -1;
    if (bytes < 0) {
      bytes = raw_bytes;
      std::memcpy(buffer, page.source + at, static_cast<size_t>(bytes));
    }
    const int64_t whole = round_up(bytes, kBlockBytes);
    std::memset(buffer + bytes, 0, static_cast<size_t>(whole - bytes));
    page.piece_bytes.push_back(bytes);
    page.checksums.push_back(checksum(buffer, bytes));
    int number = storage_->write(buffer, whole, offset);
    if (number != 0 && fault_of(number) == PagingFault::failed) {
      ++page.retries;
      number = storage_->write(buffer, whole, offset);
    }
    if (number != 0) {
      page.fault = fault_of(number);
      page.error = "paging out " + std::to_string(page.bytes) + " bytes: " + text_of(number);
      return;
    }
    offset += whole;
  }
}

void Pager::read(Page& page, char* buffer) {
  int64_t offset = page.extent.offset;
  for (size_t piece = 0; piece < page.piece_bytes.size(); ++piece) {
    std::string error = read_piece(page, piece, offset, buffer);
    if (!error.empty()) {
      ++page.retries;
      error = read_piece(page, piece, offset, buffer);
    }
    if (!error.empty()) {
      page.error = "paging in " + std::to_string(page.bytes) + " bytes: " + error;
      return;
    }
    offset += round_up(page.piece_bytes[piece], kBlockBytes);
  }
}

// What went wrong, if anything did; the page's fault says of which kind.
std::string Pager::read_piece(Page& page, size_t piece, int64_t offset, char* buffer) {
  const int64_t bytes = page.piece_bytes[piece];
  const int number = storage_->read(buffer, round_up(bytes, kBlockBytes), offset);
  page.fault = number == 0 ? PagingFault::none : fault_of(number);
  if (number != 0) {
    return text_of(number);
  }
  const int64_t at = static_cast<int64_t>(piece) * kPieceBytes;
  const int64_t raw_bytes = std::min(kPieceBytes, page.bytes - at);
  bool is_whole = checksum(buffer, bytes) == page.checksums[piece];
  if (is_whole && bytes < raw_bytes) {
    is_whole = unpack_words(buffer, bytes, page.target + at, raw_bytes);
  } else if (is_whole) {
    std::memcpy(page.target + at, buffer, static_cast<size_t>(bytes));
  }
  page.fault = is_whole ? PagingFault::none : PagingFault::torn;
  return is_whole ? "" : "the file does not hold what was written to it";
}

} // namespace torch_odt::memory
