// Sums of a pass, and what becomes of them.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "correlation.h"
#include "finish.h"

namespace torch_odt::kernels::int8 {

inline constexpr int64_t kMostRows = Correlation::kMostRows;

// Where in the target each row of a block begins.
using Places = std::array<int64_t, kMostRows>;

// What a pass reads and where it writes.
struct Source {
  const int8_t* data;
  const int8_t* end;
  int64_t channels;
  int32_t zero_point;
  const int32_t* bias;
  const char* packed; // weights; or null, where they are
  const int8_t* weight; // as the convolution has them
};

struct Target {
  int64_t rows;
  int64_t columns;
  int64_t channels;
};

// Some panels of a group.
struct Panels {
  int64_t group;
  int64_t first;
  int64_t count;
  const char* packed;
  const int32_t* column_sums;

  int64_t first_column() const {
    return first * kPanelColumns;
  }
  int64_t columns() const {
    return count * kPanelColumns;
  }
};

// What becomes of the sums of rows in some panels.
class PanelSums {
 public:
  PanelSums(const Conv2d& conv, const Correlation& part, const Source& source, const Target& target, const Finish& how)
      : conv_(conv), part_(part), source_(source), target_(target), how_(how) {}

  int64_t columns_of(const Panels& panels) const {
    return std::min(panels.columns(), part_.target_depth - panels.first_column());
  }

  bool has_terms() const {
    return source_.bias != nullptr || source_.zero_point + part_.kernels().left_offset != 0;
  }

  // Whether sums of no terms, as phases without a tap have them, become zeros.
  bool nothing_is_zeros() const {
    const bool limits = how_.zero_point != 0 || how_.low > 0 || how_.high < 0 || how_.mask != nullptr;
    const bool stays =
        how_.result == Result::sums || how_.result == Result::floats || how_.result == Result::bfloat16s;
    return source_.bias == nullptr && (stays || (how_.result == Result::int8 && !limits));
  }

  void clear(int64_t rows, const Places& places) const {
    const int64_t bytes = how_.result == Result::int8 ? 1 : how_.result == Result::bfloat16s ? 2 : 4;
    for (int64_t i = 0; i < rows; ++i) {
      char* const to = static_cast<char*>(how_.output) + places[static_cast<size_t>(i)] * bytes;
      std::memset(to, 0, static_cast<size_t>(target_.channels * bytes));
    }
  }

  // What is added to each column: its bias, and what takes the offsets of the left operand off.
  template <typename Sum>
  std::array<Sum, kCachedColumns> terms_of(const Panels& panels) const {
    const int64_t channel = panels.group * part_.target_depth + panels.first_column();
    const int64_t offset = source_.zero_point + part_.kernels().left_offset;
    std::array<Sum, kCachedColumns> terms{};
    for (int64_t i = 0; i < columns_of(panels); ++i) {
      const int64_t bias = source_.bias == nullptr ? 0 : source_.bias[channel + i];
      terms[static_cast<size_t>(i)] = static_cast<Sum>(bias - offset * panels.column_sums[i]);
    }
    return terms;
  }

  // Adds up the sums of chunks, each of which int32 holds, in 64 bits; of the first one with what is added to columns.
  void widen(const Panels& panels, bool is_first, int64_t rows, const int32_t* sums, int64_t* wide_sums) const {
    const auto terms = terms_of<int64_t>(panels);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns_of(panels); ++column) {
        const int64_t at = row * panels.columns() + column;
        const int64_t before = is_first ? terms[static_cast<size_t>(column)] : wide_sums[at];
        wide_sums[at] = before + sums[at];
      }
    }
  }

  template <typename Sum>
  float finish_sums(
      const Sum* sums,
      const int32_t* terms,
      const Panels& panels,
      int64_t rows,
      const int64_t* places) const {
    if (const int64_t joined = rows_joined(panels); joined > 1 && rows >= joined) {
      const int64_t whole = rows / joined * joined;
      const Sum* const rest = sums + whole * panels.columns();
      return std::max(
          finish_joined(sums, terms, panels, whole, joined, places),
          finish_rows(rest, terms, panels, rows - whole, places + whole));
    }
    return finish_rows(sums, terms, panels, rows, places);
  }

 private:
  // How many rows are finished as one, as whole vectors, where their sums and elements lie side by side. Draws depend on
  // where a row begins.
  int64_t rows_joined(const Panels& panels) const {
    const int64_t width = panels.columns();
    const int64_t joined = std::lcm(width, int64_t{64}) / width;
    const bool draws = how_.rounding == Rounding::stochastic && how_.result == Result::int8;
    const bool adjoin = part_.rows.output_step == 1 && part_.columns.output_step == 1 &&
        columns_of(panels) == target_.channels && columns_of(panels) == width;
    return draws || !adjoin || joined * width > kBlockColumns ? 1 : joined;
  }

  template <typename Sum>
  float finish_joined(
      const Sum* sums,
      const int32_t* terms,
      const Panels& panels,
      int64_t rows,
      int64_t joined,
      const int64_t* places) const {
    const int64_t width = panels.columns();
    Places joined_places;
    std::array<int32_t, kBlockColumns> joined_terms;
    std::array<float, kBlockColumns> multipliers;
    for (int64_t i = 0; i < rows / joined; ++i) {
      joined_places[static_cast<size_t>(i)] = places[i * joined];
    }
    Finish joined_how = how_;
    for (int64_t i = 0; i < joined; ++i) {
      if (terms != nullptr) {
        std::copy_n(terms, width, joined_terms.data() + i * width);
      }
      if (how_.per_channel) {
        std::copy_n(how_.multipliers, width, multipliers.data() + i * width);
        joined_how.multipliers = multipliers.data();
      }
    }
    const int32_t* const column_terms = terms == nullptr ? nullptr : joined_terms.data();
    return finish(
        joined_how,
        Block<Sum>{
            sums,
            joined * width,
            rows / joined,
            joined * width,
            joined_places.data(),
            0,
            0,
            column_terms,
            nullptr});
  }

  template <typename Sum>
  float finish_rows(
      const Sum* sums, const int32_t* terms, const Panels& panels, int64_t rows, const int64_t* places) const {
    if (rows == 0) {
      return 0;
    }
    const int64_t channel = panels.group * part_.target_depth + panels.first_column();
    // The channels of a depthwise convolution are one row, although each is a group.
    const int64_t column = conv_.depthwise() ? channel : panels.first_column();
    Places block_places;
    for (int64_t i = 0; i < rows; ++i) {
      block_places[static_cast<size_t>(i)] = places[i] + channel;
    }
    return finish(
        how_,
        Block<Sum>{
            sums, panels.columns(), rows, columns_of(panels), block_places.data(), column, channel, terms, nullptr});
  }

  const Conv2d& conv_;
  const Correlation& part_;
  const Source& source_;
  const Target& target_;
  const Finish& how_;
};

} // namespace torch_odt::kernels::int8
