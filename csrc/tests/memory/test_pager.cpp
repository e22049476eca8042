// Pages that leave and come back, a file that is bounded, and storage that fails in every way it can.

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "../../memory/file_space.h"
#include "../../memory/pager.h"
#include "../../memory/pieces.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

using memory::BackingFile;
using memory::Extent;
using memory::FileSpace;
using memory::kBlockBytes;
using memory::kPieceBytes;
using memory::Pager;
using memory::PagingError;
using memory::PagingFault;
using memory::Storage;

constexpr int64_t kLimit = 64 << 20;
// Enough for any machine, however busy; only where a device is slow on purpose, patience ends soon.
constexpr double kPatience = 60.0;
constexpr double kLittlePatience = 0.5;

using Bytes = std::vector<char>;

// A storage in memory whose transfers fail when they are told to. Transfers are counted from 0.
class FaultyStorage final : public Storage {
 public:
  int write(const char* data, int64_t bytes, int64_t offset) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(write_milliseconds.load()));
    const int number = fault_of(writes++, write_fault);
    if (number == 0) {
      std::memcpy(contents.data() + offset, data, static_cast<size_t>(bytes));
    }
    return number;
  }
  int read(char* data, int64_t bytes, int64_t offset) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(read_milliseconds.load()));
    const int number = fault_of(reads++, read_fault);
    if (number == 0) {
      std::memcpy(data, contents.data() + offset, static_cast<size_t>(bytes));
    }
    return number;
  }
  int reserve(int64_t bytes) override {
    if (bytes > largest) {
      return ENOSPC;
    }
    contents.resize(static_cast<size_t>(largest));
    return 0;
  }

  struct Fault {
    int first = -1;
    int count = 0;
    int number = EIO;
  };

  Bytes contents;
  int64_t largest = kLimit;
  std::atomic<int> write_milliseconds{0};
  std::atomic<int> read_milliseconds{0};
  Fault write_fault;
  Fault read_fault;
  std::atomic<int> writes{0};
  std::atomic<int> reads{0};

 private:
  static int fault_of(int transfer, const Fault& fault) {
    return fault.first >= 0 && transfer >= fault.first && transfer < fault.first + fault.count ? fault.number : 0;
  }
};

struct Rig {
  explicit Rig(bool packs = false, int threads = 1, int64_t limit = kLimit, double patience = kPatience) {
    auto owned = std::make_unique<FaultyStorage>();
    storage = owned.get();
    pager = std::make_unique<Pager>(std::move(owned), limit, threads, packs, patience);
  }
  FaultyStorage* storage = nullptr;
  std::unique_ptr<Pager> pager;
};

Bytes random_bytes(int64_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  Bytes result(static_cast<size_t>(bytes));
  for (char& byte : result) {
    byte = static_cast<char>(random());
  }
  return result;
}

// Most words are zero, as behind a rectifier.
Bytes sparse_bytes(int64_t words) {
  Bytes result(static_cast<size_t>(words * 4));
  for (int64_t i = 0; i < words; i += 5) {
    result[static_cast<size_t>(i * 4 + i % 4)] = static_cast<char>(i % 127 + 1);
  }
  return result;
}

PagingFault fault_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const PagingError& error) {
    return error.fault;
  }
  return PagingFault::none;
}

bool comes_back(Pager& pager, const Bytes& block) {
  const int64_t page = pager.page_out(block.data(), static_cast<int64_t>(block.size()));
  pager.wait(page);
  // Nothing says that the place to come back to is aligned.
  Bytes target(block.size() + 1);
  pager.page_in(page, target.data() + 1);
  pager.wait(page);
  pager.drop(page);
  return std::memcmp(target.data() + 1, block.data(), block.size()) == 0;
}

const int64_t kSizes[] = {1, 3, 4095, 4096, 4097, kPieceBytes - 4, kPieceBytes, kPieceBytes + 6, 3 * kPieceBytes + 4};

TEST(a_page_comes_back_as_it_left) {
  for (const bool packs : {false, true}) {
    Rig rig(packs, 2);
    for (const int64_t bytes : kSizes) {
      CHECK(comes_back(*rig.pager, random_bytes(bytes, 1)));
      CHECK(comes_back(*rig.pager, Bytes(static_cast<size_t>(bytes))));
    }
    CHECK(comes_back(*rig.pager, sparse_bytes(kPieceBytes / 2)));
    CHECK_EQUAL(rig.pager->stats().file_bytes, 0);
    CHECK_EQUAL(rig.pager->stats().pages, 0);
  }
}

TEST(many_pages_are_under_way_at_once) {
  Rig rig(false, 3);
  std::vector<Bytes> blocks;
  std::vector<int64_t> pages;
  for (unsigned i = 0; i < 20; ++i) {
    blocks.push_back(random_bytes(100000 + 37 * i, i));
  }
  for (const Bytes& block : blocks) {
    pages.push_back(rig.pager->page_out(block.data(), static_cast<int64_t>(block.size())));
  }
  std::vector<Bytes> targets;
  for (size_t i = 0; i < pages.size(); ++i) {
    targets.emplace_back(blocks[i].size());
  }
  for (size_t i = pages.size(); i-- > 0;) {
    rig.pager->page_in(pages[i], targets[i].data());
  }
  for (size_t i = 0; i < pages.size(); ++i) {
    rig.pager->wait(pages[i]);
    CHECK(targets[i] == blocks[i]);
  }
  CHECK_EQUAL(rig.pager->stats().written_pages, 20);
  CHECK_EQUAL(rig.pager->stats().read_pages, 20);
  for (const int64_t page : pages) {
    rig.pager->drop(page);
  }
  CHECK_EQUAL(rig.pager->stats().file_bytes, 0);
}

TEST(a_page_can_be_read_more_than_once) {
  Rig rig;
  const Bytes block = random_bytes(5000, 3);
  const int64_t page = rig.pager->page_out(block.data(), 5000);
  for (int i = 0; i < 3; ++i) {
    Bytes target(5000);
    rig.pager->page_in(page, target.data());
    rig.pager->wait(page);
    CHECK(target == block);
  }
}

TEST(packing_spares_what_is_zero) {
  Rig rig(true);
  const Bytes block = sparse_bytes(kPieceBytes);
  const int64_t page = rig.pager->page_out(block.data(), 4 * kPieceBytes);
  rig.pager->wait(page);
  // A fifth of the words and a bit for each.
  CHECK(rig.pager->stats().file_bytes < kPieceBytes);
  const Bytes dense = random_bytes(kPieceBytes, 4);
  const int64_t other = rig.pager->page_out(dense.data(), kPieceBytes);
  rig.pager->wait(other);
  CHECK(rig.pager->stats().written_bytes <= 2 * kPieceBytes);
}

TEST(packed_words_that_do_not_fit_are_refused) {
  const Bytes block = sparse_bytes(1000);
  Bytes packed(4000);
  const int64_t bytes = memory::pack_words(block.data(), 4000, packed.data(), 4000);
  CHECK(bytes > 0);
  Bytes target(4000);
  CHECK(memory::unpack_words(packed.data(), bytes, target.data(), 4000));
  CHECK(target == block);
  CHECK(!memory::unpack_words(packed.data(), bytes - 4, target.data(), 4000));
  CHECK(!memory::unpack_words(packed.data(), bytes + 4, target.data(), 4000));
  CHECK_EQUAL(memory::pack_words(random_bytes(4000, 5).data(), 4000, packed.data(), 4000), -1);
}

TEST(a_checksum_sees_every_changed_bit) {
  Bytes block = random_bytes(100, 6);
  const uint64_t before = memory::checksum(block.data(), 100);
  for (size_t bit = 0; bit < 800; ++bit) {
    block[bit / 8] = static_cast<char>(block[bit / 8] ^ (1 << bit % 8));
    CHECK(memory::checksum(block.data(), 100) != before);
    block[bit / 8] = static_cast<char>(block[bit / 8] ^ (1 << bit % 8));
  }
  CHECK_EQUAL(memory::checksum(block.data(), 100), before);
  CHECK(memory::checksum(block.data(), 99) != before);
}

TEST(the_file_does_not_grow_beyond_its_limit) {
  Rig rig(false, 1, 3 * kBlockBytes + 5);
  const Bytes block = random_bytes(2 * kBlockBytes, 7);
  const int64_t page = rig.pager->page_out(block.data(), 2 * kBlockBytes);
  CHECK(fault_of([&] { rig.pager->page_out(block.data(), kBlockBytes + 1); }) == PagingFault::full);
  CHECK_EQUAL(rig.pager->stats().pages, 1);
  rig.pager->drop(page);
  CHECK(comes_back(*rig.pager, random_bytes(3 * kBlockBytes, 8)));
}

TEST(a_full_device_is_noticed_before_anything_is_written) {
  Rig rig;
  rig.storage->largest = kBlockBytes;
  const Bytes block = random_bytes(2 * kBlockBytes, 9);
  CHECK(fault_of([&] { rig.pager->page_out(block.data(), 2 * kBlockBytes); }) == PagingFault::full);
  CHECK_EQUAL(rig.storage->writes.load(), 0);
  CHECK_EQUAL(rig.pager->stats().file_bytes, 0);
  CHECK(comes_back(*rig.pager, random_bytes(kBlockBytes, 10)));
}

TEST(every_write_may_fail_once) {
  const Bytes block = random_bytes(3 * kPieceBytes, 11);
  for (int transfer = 0; transfer < 3; ++transfer) {
    Rig rig;
    rig.storage->write_fault = {transfer, 1, EIO};
    CHECK(comes_back(*rig.pager, block));
    CHECK_EQUAL(rig.pager->stats().retries, 1);
  }
}

TEST(a_block_that_cannot_be_written_is_still_there) {
  const Bytes block = random_bytes(3 * kPieceBytes, 12);
  const Bytes before = block;
  for (int transfer = 0; transfer < 3; ++transfer) {
    for (const int number : {EIO, ENOSPC}) {
      Rig rig;
      // A full device is not tried again.
      rig.storage->write_fault = {transfer, number == EIO ? 2 : 1, number};
      const int64_t page = rig.pager->page_out(block.data(), static_cast<int64_t>(block.size()));
      const PagingFault expected = number == EIO ? PagingFault::failed : PagingFault::full;
      CHECK(fault_of([&] { rig.pager->wait(page); }) == expected);
      Bytes target(block.size());
      CHECK(fault_of([&] { rig.pager->page_in(page, target.data()); }) == expected);
      CHECK(block == before);
      rig.pager->drop(page);
      CHECK(comes_back(*rig.pager, block));
    }
  }
}

TEST(every_read_may_fail_once) {
  const Bytes block = random_bytes(3 * kPieceBytes, 13);
  for (int transfer = 0; transfer < 3; ++transfer) {
    Rig rig;
    rig.storage->read_fault = {transfer, 1, EIO};
    CHECK(comes_back(*rig.pager, block));
    CHECK_EQUAL(rig.pager->stats().retries, 1);
  }
}

TEST(a_page_that_cannot_be_read_says_so_and_can_be_tried_again) {
  const Bytes block = random_bytes(3 * kPieceBytes, 14);
  for (const int number : {EIO, Storage::kEndOfData}) {
    Rig rig;
    rig.storage->read_fault = {1, 2, number};
    const int64_t page = rig.pager->page_out(block.data(), static_cast<int64_t>(block.size()));
    Bytes target(block.size());
    rig.pager->page_in(page, target.data());
    const PagingFault expected = number == EIO ? PagingFault::failed : PagingFault::torn;
    CHECK(fault_of([&] { rig.pager->wait(page); }) == expected);
    CHECK(fault_of([&] { rig.pager->wait(page); }) == expected);
    rig.pager->page_in(page, target.data());
    rig.pager->wait(page);
    CHECK(target == block);
  }
}

TEST(a_changed_byte_in_the_file_is_noticed) {
  for (const bool packs : {false, true}) {
    Rig rig(packs);
    const Bytes block = packs ? sparse_bytes(5000) : random_bytes(20000, 15);
    const int64_t page = rig.pager->page_out(block.data(), static_cast<int64_t>(block.size()));
    rig.pager->wait(page);
    rig.storage->contents[1000] = static_cast<char>(rig.storage->contents[1000] ^ 1);
    Bytes target(block.size());
    rig.pager->page_in(page, target.data());
    CHECK(fault_of([&] { rig.pager->wait(page); }) == PagingFault::torn);
  }
}

TEST(a_slow_device_is_an_error_and_not_a_loss) {
  Rig rig(false, 1, kLimit, kLittlePatience);
  rig.storage->write_milliseconds = 1200;
  const Bytes block = random_bytes(5000, 19);
  const int64_t page = rig.pager->page_out(block.data(), 5000);
  CHECK(fault_of([&] { rig.pager->wait(page); }) == PagingFault::slow);
  Bytes target(5000);
  CHECK(fault_of([&] { rig.pager->page_in(page, target.data()); }) == PagingFault::slow);
  rig.storage->write_milliseconds = 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  rig.pager->page_in(page, target.data());
  rig.pager->wait(page);
  CHECK(target == block);
}

TEST(pages_of_a_device_that_hangs_are_dropped_when_it_answers) {
  Rig rig(false, 1, kLimit, kLittlePatience);
  rig.storage->write_milliseconds = 3000;
  const Bytes block = random_bytes(5000, 21);
  const int64_t moving = rig.pager->page_out(block.data(), 5000);
  const int64_t queued = rig.pager->page_out(block.data(), 5000);
  CHECK(fault_of([&] { rig.pager->wait(moving); }) == PagingFault::slow);
  const auto start = std::chrono::steady_clock::now();
  CHECK(!rig.pager->drop(moving));
  // Nobody has begun it.
  CHECK(rig.pager->drop(queued));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(400));
  CHECK_EQUAL(rig.pager->stats().pages, 1);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  CHECK(rig.pager->drop(moving));
  CHECK_EQUAL(rig.storage->writes.load(), 1);
  CHECK_EQUAL(rig.pager->stats().file_bytes, 0);
}

TEST(room_of_what_is_read_for_the_last_time_is_waited_for) {
  // Room for one page.
  Rig rig(false, 1, 2 * 4096);
  rig.storage->read_milliseconds = 300;
  const Bytes block = random_bytes(5000, 22);
  const int64_t first = rig.pager->page_out(block.data(), 5000);
  rig.pager->wait(first);
  CHECK(fault_of([&] { rig.pager->page_out(block.data(), 5000); }) == PagingFault::full);
  Bytes target(5000);
  rig.pager->page_in(first, target.data(), true);
  const int64_t second = rig.pager->page_out(block.data(), 5000);
  rig.pager->wait(first);
  CHECK(target == block);
  CHECK_THROWS(std::invalid_argument, rig.pager->page_in(first, target.data(), true));
  rig.pager->drop(first);
  rig.pager->drop(second);
  CHECK_EQUAL(rig.pager->stats().file_bytes, 0);

  // What fails keeps its place: the error comes from who waits for it.
  const int64_t third = rig.pager->page_out(block.data(), 5000);
  rig.pager->wait(third);
  rig.storage->read_fault = {rig.storage->reads, 2, EIO};
  rig.pager->page_in(third, target.data(), true);
  CHECK(fault_of([&] { rig.pager->page_out(block.data(), 5000); }) == PagingFault::full);
  CHECK(fault_of([&] { rig.pager->wait(third); }) == PagingFault::failed);
  rig.pager->page_in(third, target.data(), true);
  rig.pager->drop(third);
  rig.pager->drop(rig.pager->page_out(block.data(), 5000));
}

TEST(a_fork_is_told_that_it_cannot_page) {
  Rig rig;
  const Bytes block = random_bytes(5000, 20);
  const int64_t page = rig.pager->page_out(block.data(), 5000);
  rig.pager->wait(page);
  const pid_t child = fork();
  if (child == 0) {
    Bytes target(5000);
    const bool refused = fault_of([&] { rig.pager->page_in(page, target.data()); }) == PagingFault::forked &&
        fault_of([&] { rig.pager->wait(page); }) == PagingFault::forked &&
        fault_of([&] { rig.pager->page_out(block.data(), 5000); }) == PagingFault::forked;
    rig.pager->drop(page);
    rig.pager.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 1;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
}

TEST(a_pager_may_end_while_pages_are_under_way) {
  const Bytes block = random_bytes(4 * kPieceBytes, 16);
  for (int i = 0; i < 5; ++i) {
    Rig rig(true, 2);
    for (int page = 0; page < 8; ++page) {
      rig.pager->page_out(block.data(), static_cast<int64_t>(block.size()));
    }
  }
}

TEST(what_is_no_page_is_refused) {
  Rig rig;
  CHECK_THROWS(std::invalid_argument, rig.pager->wait(0));
  CHECK_THROWS(std::invalid_argument, rig.pager->drop(7));
  CHECK_THROWS(std::invalid_argument, rig.pager->page_out(&rig, 0));
  CHECK_THROWS(std::invalid_argument, Pager(std::make_unique<FaultyStorage>(), 0, 1, false, kPatience));
  CHECK_THROWS(std::invalid_argument, Pager(std::make_unique<FaultyStorage>(), kLimit, 0, false, kPatience));
}

TEST(space_of_a_file_is_used_again) {
  FileSpace space(100);
  const Extent first = *space.take(30);
  const Extent second = *space.take(30);
  const Extent third = *space.take(40);
  CHECK(!space.take(1));
  space.give_back(first);
  space.give_back(second);
  CHECK_EQUAL(space.used_bytes(), 40);
  // The two holes have become one.
  const Extent large = *space.take(60);
  CHECK_EQUAL(large.offset, 0);
  space.give_back(third);
  CHECK_EQUAL(space.end(), 60);
  space.give_back(large);
  CHECK_EQUAL(space.end(), 0);
  CHECK_EQUAL(space.used_bytes(), 0);
}

TEST(a_file_on_a_disk_leaves_nothing_behind) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("torch_odt_pager_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  {
    auto file = std::make_unique<BackingFile>(folder.string());
    CHECK(std::filesystem::is_empty(folder));
    Pager pager(std::move(file), kLimit, 2, false, kPatience);
    for (const int64_t bytes : kSizes) {
      CHECK(comes_back(pager, random_bytes(bytes, 17)));
    }
    CHECK(std::filesystem::is_empty(folder));
  }
  std::filesystem::remove(folder);
  CHECK_THROWS(std::runtime_error, BackingFile(folder.string()));
}

TEST(a_file_that_was_cut_off_is_torn) {
  auto owned = std::make_unique<BackingFile>(std::filesystem::temp_directory_path().string());
  const int descriptor = owned->descriptor();
  Pager pager(std::move(owned), kLimit, 1, false, kPatience);
  const Bytes block = random_bytes(3 * kPieceBytes, 18);
  const int64_t page = pager.page_out(block.data(), static_cast<int64_t>(block.size()));
  pager.wait(page);
  CHECK_EQUAL(ftruncate(descriptor, kPieceBytes), 0);
  Bytes target(block.size());
  pager.page_in(page, target.data());
  CHECK(fault_of([&] { pager.wait(page); }) == PagingFault::torn);
}

} // namespace
} // namespace torch_odt::tests
