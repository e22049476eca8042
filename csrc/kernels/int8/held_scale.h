// Self-adaptive rescaling (Mandheling): how the scale of one tensor is held, and when it is looked at. The same as
// torch_odt/quant/rescaling.py, which explains it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace torch_odt::kernels::int8 {

inline constexpr int64_t kLargestShift = 30; // of what is dropped

// How many bits an integer of this magnitude has.
inline int64_t bits_of(double largest) {
  int exponent = 0;
  std::frexp(largest, &exponent);
  return std::max(exponent, 0);
}

struct HeldScale {
  static constexpr int64_t kWidth = 10; // numbers of a row

  int64_t longest_period;
  int64_t slack_bits;
  bool is_known;
  int64_t exponent;
  int64_t period;
  int64_t wait;
  int64_t batches;
  int64_t checks;
  int64_t changes;
  int64_t clipped_batches;

  explicit HeldScale(const double* row)
      : longest_period(static_cast<int64_t>(row[0])),
        slack_bits(static_cast<int64_t>(row[1])),
        is_known(row[2] != 0),
        exponent(static_cast<int64_t>(row[3])),
        period(static_cast<int64_t>(row[4])),
        wait(static_cast<int64_t>(row[5])),
        batches(static_cast<int64_t>(row[6])),
        checks(static_cast<int64_t>(row[7])),
        changes(static_cast<int64_t>(row[8])),
        clipped_batches(static_cast<int64_t>(row[9])) {}

  void write(double* row) const {
    const int64_t numbers[kWidth] = {
        longest_period, slack_bits, is_known ? 1 : 0, exponent, period, wait, batches, checks, changes,
        clipped_batches};
    std::copy_n(numbers, kWidth, row);
  }

  bool is_due() const {
    return !is_known || wait == 0;
  }

  // The bits to drop of sums of that exponent.
  int64_t shift(int64_t sums_exponent) const {
    return is_known ? std::clamp<int64_t>(exponent - sums_exponent, 0, kLargestShift) : 0;
  }

  // The bits to drop of sums that reach so far, so that `bits` are left; the present ones, where they still fit.
  int64_t fitting_shift(double largest, int64_t bits, int64_t sums_exponent) const {
    const int64_t fitting = std::clamp<int64_t>(bits_of(largest) - bits, 0, kLargestShift);
    const int64_t present = shift(sums_exponent);
    const bool fits = fitting <= present && present <= fitting + slack_bits;
    return is_known && (fits || largest == 0) ? present : fitting;
  }

  // A batch has found this exponent; of zeros alone, nothing is learnt.
  void note_check(int64_t found, bool is_zero) {
    ++batches;
    ++checks;
    if (is_zero) {
      return;
    }
    const bool held = is_known && found == exponent;
    changes += is_known && !held ? 1 : 0;
    period = held ? std::min(2 * period, longest_period) : 1;
    wait = period - 1;
    is_known = true;
    exponent = found;
  }

  // A batch has taken the scale as it was.
  void note_batch(bool was_clipped) {
    ++batches;
    if (was_clipped) {
      period = 1;
      wait = 0;
      ++clipped_batches;
    } else {
      --wait;
    }
  }
};

} // namespace torch_odt::kernels::int8
