// Live and peak bytes, and reservations under a cap, from one thread and from several.

#include <limits>

#include "../../memory/counters.h"
#include "../check.h"
#include "threads.h"

namespace torch_odt::tests {
namespace {

using memory::Gauge;
using memory::kUnlimited;

TEST(the_peak_is_the_most_that_was_live) {
  Gauge gauge;
  gauge.add(100);
  gauge.add(50);
  gauge.subtract(120);
  gauge.add(10);
  CHECK_EQUAL(gauge.live(), 40);
  CHECK_EQUAL(gauge.peak(), 150);
  gauge.reset_peak();
  CHECK_EQUAL(gauge.peak(), 40);
  gauge.add(1);
  CHECK_EQUAL(gauge.peak(), 41);
}

TEST(a_reservation_counts_in_the_peak_once_it_is_confirmed) {
  Gauge gauge;
  CHECK(gauge.try_reserve(100, 100));
  CHECK_EQUAL(gauge.live(), 100);
  CHECK_EQUAL(gauge.peak(), 0);
  gauge.confirm();
  CHECK_EQUAL(gauge.peak(), 100);
  CHECK(!gauge.try_reserve(1, 100));
  CHECK_EQUAL(gauge.live(), 100);
}

TEST(a_cap_below_what_lives_refuses_without_overflowing) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Gauge gauge;
  gauge.add(100);
  CHECK(!gauge.try_reserve(1, 50));
  CHECK(!gauge.try_reserve(kMost, 50));
  CHECK(!gauge.try_reserve(kMost, kMost));
  CHECK(gauge.try_reserve(kMost - 100, kMost));
  gauge.subtract(kMost - 100);
  CHECK(gauge.try_reserve(1, kUnlimited));
  CHECK_EQUAL(gauge.live(), 101);
}

TEST(threads_together_reserve_up_to_the_cap_and_no_further) {
  constexpr int kThreads = 4;
  constexpr int64_t kCap = 30000;
  Gauge gauge;
  std::vector<int64_t> taken(kThreads);
  run_together(kThreads, [&](int index) {
    int64_t mine = 0;
    while (gauge.try_reserve(3, kCap)) {
      gauge.confirm();
      mine += 3;
    }
    taken[static_cast<size_t>(index)] = mine;
  });
  CHECK_EQUAL(taken[0] + taken[1] + taken[2] + taken[3], kCap);
  CHECK_EQUAL(gauge.live(), kCap);
  CHECK_EQUAL(gauge.peak(), kCap);
}

TEST(threads_together_leave_an_exact_count_and_a_peak_that_was_possible) {
  constexpr int kThreads = 4;
  Gauge gauge;
  run_together(kThreads, [&](int index) {
    for (int round = 0; round < 5000; ++round) {
      gauge.add(index + 1);
      gauge.subtract(index + 1);
    }
  });
  CHECK_EQUAL(gauge.live(), 0);
  CHECK(gauge.peak() >= kThreads);
  CHECK(gauge.peak() <= 1 + 2 + 3 + 4);
}

TEST(every_category_has_its_gauge) {
  memory::Counters counters;
  for (int category = 0; category < memory::kCategoryCount; ++category) {
    counters.of(static_cast<memory::Category>(category)).add(category + 1);
  }
  for (int category = 0; category < memory::kCategoryCount; ++category) {
    Gauge& gauge = counters.of(static_cast<memory::Category>(category));
    CHECK_EQUAL(gauge.live(), category + 1);
    gauge.subtract(1);
  }
  counters.allocated.add(7);
  counters.outside.add(8);
  counters.allocated.subtract(7);
  counters.outside.subtract(8);
  counters.reset_peak();
  CHECK_EQUAL(counters.allocated.peak(), 0);
  CHECK_EQUAL(counters.outside.peak(), 0);
  for (int category = 0; category < memory::kCategoryCount; ++category) {
    CHECK_EQUAL(counters.of(static_cast<memory::Category>(category)).peak(), category);
  }
}

} // namespace
} // namespace torch_odt::tests
