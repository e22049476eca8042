// One block of a weight's gradient: both operands packed, multiplied, finished.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "finish.h"
#include "gather.h"
#include "grad_weight_blocks.h"
#include "short_rows.h"
#include "sums.h"

namespace torch_odt::kernels::int8 {

struct Operands {
  const int8_t* grad_output;
  const int8_t* input;
  int32_t zero_point;
};

// One block of one group.
class BlockGradient {
 public:
  BlockGradient(const Conv2d& conv, const GradientCut& cut, const Operands& operands, char* workspace)
      : conv_(conv),
        cut_(cut),
        operands_(operands),
        own_(cut, workspace),
        rows_taps_(forward_taps(conv.rows)),
        columns_taps_(forward_taps(conv.columns)) {
    std::memset(own_.zeros, 0, static_cast<size_t>(std::max(cut.block_rows, cut.block_columns()) + kAlignment));
    std::memset(own_.padding, operands.zero_point, static_cast<size_t>(cut.block_columns() + kAlignment));
  }

  float operator()(int64_t group, int64_t row_block, int64_t column_block, int64_t* grad_bias, const Finish& how) {
    // One chunk of pixels is packed once for all blocks of the same columns, which come one after another.
    right_is_packed_ = conv_.out_pixels() <= cut_.chunk_pixels && group == group_ && column_block == column_block_;
    group_ = group;
    column_block_ = column_block;
    first_row_ = row_block * cut_.block_rows;
    rows_ = std::min(cut_.block_rows, conv_.out_depth() - first_row_);
    first_column_ = column_block * cut_.block_columns();
    columns_ = std::min(cut_.block_columns(), conv_.taps() * conv_.in_depth() - first_column_);
    sums_rows_ = column_block == 0 || operands_.zero_point != 0;
    std::fill_n(own_.wide_row_sums, rows_, 0);
    const float largest = cut_.wide ? sum_wide(how) : sum_narrow(how);
    if (column_block == 0) {
      std::copy_n(own_.wide_row_sums, rows_, grad_bias + group * conv_.out_depth() + first_row_);
    }
    return largest;
  }

  // Where pixels are shared: sums over some, to be added up with those of others before rows are finished.
  void sum_pixels(int64_t begin, int64_t end) {
    rows_ = conv_.out_depth();
    columns_ = conv_.taps() * conv_.in_depth();
    sums_rows_ = true;
    std::fill_n(own_.wide_row_sums, rows_, 0);
    cut_.wide ? sum_wide(begin, end) : sum(begin, end);
  }

  void add_terms(const BlockGradient& other) {
    add(own_.column_sums, other.own_.column_sums, columns_);
    add(own_.wide_row_sums, other.own_.wide_row_sums, rows_);
  }

  void add_rows_of(const BlockGradient& other, int64_t first, int64_t count) {
    const int64_t at = first * cut_.block_columns();
    if (cut_.wide) {
      add(own_.wide_sums + at, other.own_.wide_sums + at, count * cut_.block_columns());
    } else {
      add(own_.sums + at, other.own_.sums + at, count * cut_.block_columns());
    }
  }

  float finish_rows(int64_t first, int64_t count, const Finish& how) const {
    const int64_t at = first * cut_.block_columns();
    return cut_.wide ? finish_rows(own_.wide_sums + at, first, count, how)
                     : finish_rows(own_.sums + at, first, count, how);
  }

  const int64_t* bias() const {
    return own_.wide_row_sums;
  }

 private:
  static constexpr int64_t kRowsAtOnce = 64;

  template <typename Sum>
  static void add(Sum* to, const Sum* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] += from[i];
    }
  }

  float sum_narrow(const Finish& how) {
    const int64_t pixels = conv_.out_pixels();
    const bool by_columns = how.per_channel && !how.channels_are_rows;
    if (how.result == Result::floats && !by_columns && cut_.kernels->multiply_to_floats != nullptr && pixels > 0 &&
        pixels <= std::min(kFewGradientPixels, cut_.chunk_pixels)) {
      return sum_to_floats(how);
    }
    if (pixels > 0 && pixels <= cut_.chunk_pixels) {
      return sum_few_rows(how);
    }
    sum(0, pixels);
    return finish_rows(own_.sums, 0, rows_, how);
  }

  // Where all pixels are packed at once, a few rows at a time, whose sums stay in a cache near the processor.
  float sum_few_rows(const Finish& how) {
    begin_sums();
    pack(0, conv_.out_pixels());
    end_sums();
    float largest = 0;
    for (int64_t row = 0; row < rows_; row += kRowsAtOnce) {
      const int64_t rows = std::min(kRowsAtOnce, rows_ - row);
      Product product = product_of(conv_.out_pixels(), false);
      product.left = own_.left + row * cut_.left_row_bytes();
      product.rows = rows;
      cut_.kernels->multiply(product);
      largest = std::max(largest, finish_rows(own_.sums, row, rows, how));
    }
    return largest;
  }

  // Where there are few pixels, sums go where they belong as soon as they are there.
  float sum_to_floats(const Finish& how) {
    const int64_t pixels = conv_.out_pixels();
    begin_sums();
    pack(0, pixels);
    end_sums();
    std::array<int32_t, kMostGradientRows> row_terms;
    for (int64_t row = 0; row < rows_; ++row) {
      row_terms[static_cast<size_t>(row)] = row_term<int32_t>(row);
    }
    alignas(kAlignment) std::array<int32_t, kMostGradientColumns> column_terms;
    for (int64_t column = 0; column < cut_.block_columns(); ++column) {
      column_terms[static_cast<size_t>(column)] = column_term(column);
    }
    const int64_t channel = group_ * conv_.out_depth() + first_row_;
    const int64_t width = conv_.taps() * conv_.in_depth();
    return cut_.kernels->multiply_to_floats(
        product_of(pixels, false),
        {static_cast<float*>(how.output) + channel * width + first_column_,
         width,
         columns_,
         column_terms.data(),
         row_terms.data(),
         how.per_channel ? how.multipliers + channel : nullptr,
         *how.multipliers});
  }

  float sum_wide(const Finish& how) {
    sum_wide(0, conv_.out_pixels());
    return finish_rows(own_.wide_sums, 0, rows_, how);
  }

  void sum_wide(int64_t begin, int64_t end) {
    const int64_t part = kMostDepth / cut_.chunk_pixels * cut_.chunk_pixels;
    std::fill_n(own_.wide_sums, rows_ * cut_.block_columns(), 0);
    for (; begin < end; begin += part) {
      sum(begin, std::min(end, begin + part));
      widen();
    }
    std::fill_n(own_.column_sums, cut_.block_columns(), 0);
  }

  void sum(int64_t begin, int64_t end) {
    begin_sums();
    if (begin == end) {
      std::fill_n(own_.sums, rows_ * cut_.block_columns(), 0);
    }
    for (int64_t pixel = begin; pixel < end; pixel += cut_.chunk_pixels) {
      const int64_t count = std::min(cut_.chunk_pixels, end - pixel);
      pack(pixel, count);
      cut_.kernels->multiply(product_of(count, pixel > begin));
    }
    end_sums();
  }

  void begin_sums() {
    if (!right_is_packed_) {
      std::fill_n(own_.column_sums, cut_.block_columns(), 0);
    }
    std::fill_n(own_.row_sums, rows_, 0);
  }

  void pack(int64_t first, int64_t count) {
    pack_left(first, count);
    if (!right_is_packed_) {
      pack_right(first, count);
    }
  }

  Product product_of(int64_t pixels, bool accumulate) const {
    return {
        own_.left,
        cut_.left_row_bytes(),
        cut_.left_step_bytes(),
        rows_,
        own_.right,
        cut_.panel_bytes(),
        divided(columns_, kPanelColumns),
        cut_.kernels->steps(pixels),
        own_.sums,
        cut_.block_columns(),
        accumulate};
  }

  void end_sums() {
    for (int64_t row = 0; row < rows_; ++row) {
      own_.wide_row_sums[row] += own_.row_sums[row];
    }
  }

  // What takes the offsets of both operands off a sum: that of a row, and that of a column.
  template <typename Sum>
  Sum row_term(int64_t row) const {
    return static_cast<Sum>(-operands_.zero_point * own_.wide_row_sums[row]);
  }
  int32_t column_term(int64_t column) const {
    const auto offset = static_cast<uint32_t>(cut_.kernels->left_offset);
    return static_cast<int32_t>(0 - offset * static_cast<uint32_t>(own_.column_sums[column]));
  }

  void pack_left(int64_t first, int64_t count) {
    const int64_t channel = group_ * conv_.out_depth() + first_row_;
    const int8_t* from = operands_.grad_output + first * conv_.out_channels + channel;
    for (int64_t i = 0; i < count; ++i, from += conv_.out_channels) {
      own_.left_rows[i] = from;
    }
    const bool adds = cut_.kernels->adds_columns;
    if (sums_rows_ && !adds) {
      add_rows(own_.left_rows, count, rows_, own_.row_sums);
    }
    std::fill(own_.left_rows + count, own_.left_rows + cut_.kernels->padded(count), own_.zeros);
    const bool by_rows = cut_.kernels->left_by_rows;
    cut_.kernels->pack_left_columns(
        {own_.left_rows,
         cut_.kernels->steps(count),
         rows_,
         own_.left,
         by_rows ? cut_.left_row_bytes() : kPanelStepBytes,
         cut_.left_step_bytes(),
         sums_rows_ && adds ? own_.row_sums : nullptr});
  }

  void pack_right(int64_t first, int64_t count) {
    if (!cut_.by_taps) {
      gather_rows(first, count);
      pack_panels(count, 0, columns_);
      return;
    }
    // Columns of the block, tap by tap.
    for (int64_t column = 0; column < columns_;) {
      const int64_t tap = (first_column_ + column) / conv_.in_depth();
      const int64_t channel = (first_column_ + column) % conv_.in_depth();
      const int64_t width = std::min(columns_ - column, conv_.in_depth() - channel);
      find_rows(first, count, tap, channel);
      pack_panels(count, column, width);
      column += width;
    }
  }

  void pack_panels(int64_t count, int64_t column, int64_t width) {
    std::fill(own_.right_rows + count, own_.right_rows + cut_.kernels->padded(count), own_.zeros);
    char* const to = own_.right + column / kPanelColumns * cut_.panel_bytes();
    // Needed where the left operand has an offset.
    const bool sums = cut_.kernels->add_column_sums != nullptr;
    int32_t* const added = sums && cut_.kernels->adds_columns ? own_.column_sums + column : nullptr;
    cut_.kernels->pack_right({own_.right_rows, cut_.kernels->steps(count), width, to, cut_.panel_bytes(), kPanelStepBytes, added});
    if (sums && added == nullptr) {
      for (int64_t panel = 0; panel * kPanelColumns < width; ++panel) {
        cut_.kernels->add_column_sums(
            to + panel * cut_.panel_bytes(), cut_.kernels->steps(count), own_.column_sums + column + panel * kPanelColumns);
      }
    }
  }

  // Where the channels lie that a tap sees from each output.
  void find_rows(int64_t first, int64_t count, int64_t tap, int64_t channel) {
    const int64_t tap_row = tap / conv_.columns.kernel;
    const int64_t tap_column = tap % conv_.columns.kernel;
    const int8_t* const image = operands_.input + group_ * conv_.in_depth() + channel;
    const int64_t first_inside = conv_.columns.first_window(tap_column);
    const int64_t last_inside = std::max(first_inside, conv_.columns.last_window(tap_column));
    const int64_t stride = conv_.columns.stride * conv_.in_channels;
    Pixel pixel(first, rows_taps_, columns_taps_);
    for (int64_t i = 0; i < count;) {
      const int64_t length = std::min(count - i, conv_.columns.output - pixel.column);
      const int8_t** const to = own_.right_rows + i;
      const int64_t row = conv_.rows.position(pixel.row, tap_row);
      if (row < 0 || row >= conv_.rows.input) {
        std::fill_n(to, length, own_.padding);
      } else {
        const int64_t position = conv_.columns.position(pixel.column, tap_column);
        const int8_t* const line = image +
            ((pixel.sample * conv_.rows.input + row) * conv_.columns.input + position) * conv_.in_channels;
        for (int64_t j = 0; j < length; ++j) {
          const bool inside = pixel.column + j >= first_inside && pixel.column + j < last_inside;
          to[j] = inside ? line + j * stride : own_.padding;
        }
      }
      i += length;
      pixel.column += length - 1;
      pixel.advance(rows_taps_, columns_taps_);
    }
  }

  // The block's columns for each output side by side, where a tap has too few channels for a panel.
  void gather_rows(int64_t first, int64_t count) {
    const Image image{
        operands_.input,
        operands_.input + conv_.in_pixels() * conv_.in_channels,
        conv_.in_channels,
        group_ * conv_.in_depth(),
        conv_.in_depth(),
        static_cast<int8_t>(operands_.zero_point)};
    const Range block{first_column_, columns_};
    const int64_t row_bytes = cut_.gathered_row_bytes();
    const auto copy = [&](int64_t row, int64_t rows, const int8_t* from, int64_t stride, int64_t values, int64_t at) {
      const LeftRows all{from, image.end, stride, rows, values, own_.gathered + row * row_bytes + at, row_bytes};
      copy_rows(rows_from(all, copy_short_rows(all, 0)));
    };
    const auto fill = [&](int64_t row, int64_t values, int64_t at) {
      std::memset(own_.gathered + row * row_bytes + at, image.padding, static_cast<size_t>(values));
    };
    gather(image, rows_taps_, columns_taps_, block, copy, fill, first, first + count);
    for (int64_t i = 0; i < count; ++i) {
      own_.right_rows[i] = own_.gathered + i * row_bytes;
    }
  }

  void widen() {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t column = 0; column < columns_; ++column) {
        const int64_t at = row * cut_.block_columns() + column;
        const auto offset = static_cast<uint32_t>(cut_.kernels->left_offset * own_.column_sums[column]);
        own_.wide_sums[at] += static_cast<int32_t>(static_cast<uint32_t>(own_.sums[at]) - offset);
      }
    }
  }

  // Some of the block's rows, kMostGradientRows at most, whose sums these are.
  template <typename Sum>
  float finish_rows(const Sum* sums, int64_t first_row, int64_t rows, const Finish& how) const {
    const int64_t width = conv_.taps() * conv_.in_depth();
    const int64_t channel = group_ * conv_.out_depth() + first_row_ + first_row;
    std::array<Sum, kMostGradientRows> row_terms;
    std::array<int64_t, kMostGradientRows> places;
    float largest = 0;
    for (int64_t first = 0; first < columns_; first += kBlockColumns) {
      const int64_t columns = std::min(kBlockColumns, columns_ - first);
      for (int64_t row = 0; row < rows; ++row) {
        const auto at = static_cast<size_t>(row);
        row_terms[at] = row_term<Sum>(first_row + row);
        places[at] = (channel + row) * width + first_column_ + first;
      }
      std::array<int32_t, kBlockColumns> column_terms;
      for (int64_t i = 0; i < columns; ++i) {
        column_terms[static_cast<size_t>(i)] = column_term(first + i);
      }
      largest = std::max(
          largest,
          finish(
              how,
              Block<Sum>{
                  sums + first,
                  cut_.block_columns(),
                  rows,
                  columns,
                  places.data(),
                  first_column_ + first,
                  channel,
                  column_terms.data(),
                  row_terms.data()}));
    }
    return largest;
  }

  const Conv2d& conv_;
  const GradientCut& cut_;
  const Operands& operands_;
  const GradientWorkspace own_;
  const Taps rows_taps_;
  const Taps columns_taps_;
  int64_t group_ = 0;
  int64_t column_block_ = -1;
  bool right_is_packed_ = false;
  int64_t first_row_ = 0;
  int64_t rows_ = 0;
  int64_t first_column_ = 0;
  int64_t columns_ = 0;
  bool sums_rows_ = false;
};

} // namespace torch_odt::kernels::int8
