#include "../../memory/refusals.h"

#include <vector>

#include "../check.h"
#include "threads.h"

namespace torch_odt::tests {
namespace {

using memory::kUnlimited;
using memory::Refusals;

TEST(nothing_is_refused_unless_it_is_asked_for) {
  Refusals refusals;
  CHECK(!refusals.refuses_next());
  refusals.refuse_after(0, true);
  refusals.refuse_after(kUnlimited, false);
  CHECK(!refusals.refuses_next());
  CHECK_EQUAL(refusals.count(), 0);
}

TEST(one_allocation_is_refused_after_so_many) {
  Refusals refusals;
  refusals.refuse_after(2, false);
  CHECK(!refusals.refuses_next());
  CHECK(!refusals.refuses_next());
  CHECK(refusals.refuses_next());
  CHECK(!refusals.refuses_next());
}

TEST(a_lasting_refusal_ends_when_it_is_switched_off) {
  Refusals refusals;
  refusals.refuse_after(1, true);
  CHECK(!refusals.refuses_next());
  CHECK(refusals.refuses_next());
  CHECK(refusals.refuses_next());
  refusals.refuse_after(kUnlimited, true);
  CHECK(!refusals.refuses_next());
}

TEST(of_threads_together_exactly_one_is_refused) {
  constexpr int kThreads = 4;
  Refusals refusals;
  refusals.refuse_after(1000, false);
  std::vector<int64_t> refused(kThreads);
  run_together(kThreads, [&](int index) {
    for (int round = 0; round < 1000; ++round) {
      if (refusals.refuses_next()) {
        ++refused[static_cast<size_t>(index)];
        refusals.note();
      }
    }
  });
  CHECK_EQUAL(refused[0] + refused[1] + refused[2] + refused[3], 1);
  CHECK_EQUAL(refusals.count(), 1);
}

} // namespace
} // namespace torch_odt::tests
