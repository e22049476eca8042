// Rows of an image as depthwise convolutions need them: packed in steps, see depthwise_tables.h, and kept from one row of
// outputs to the next where both see them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "depthwise_columns.h"
#include "depthwise_tables.h"
#include "memory.h"

namespace torch_odt::kernels::int8 {

// Rows in a step.
inline int64_t rows_of_step() {
  return depthwise_table().packing().step_values();
}

// Which rows outputs see, as steps: value `i` of step `j` is row `start + j * between + i * spacing`, and the next outputs
// start `advance` rows later.
struct RowSteps {
  int64_t count;
  int64_t between;
  int64_t spacing;
  int64_t advance;

  // Steps that the next outputs see and these do not.
  int64_t fresh() const {
    return advance % between == 0 ? std::min(count, advance / between) : count;
  }
};

class PackedRows {
 public:
  // `by_lanes`: see Interleaving.
  PackedRows(const RowSteps& steps, int64_t most_width, int64_t most_channels, bool by_lanes, Pieces& pieces)
      : steps_(steps),
        by_lanes_(by_lanes),
        slot_bytes_(divided(most_channels, kPanelColumns) * most_width * kPanelStepBytes),
        pixels_(rows_of_step(), steps.spacing, most_width, pieces),
        places_(pieces.take<const char*>(steps.count)),
        packed_(pieces.take<char>(steps.count * slot_bytes_)) {}

  // Packs the steps that begin with row `start`, or what the last call did not if this one `continues` it. Around the
  // image lies what `padding` points to. `sums`: see Interleaving.
  template <bool kAsPixels>
  void move_to(const Strip& strip, int64_t start, bool continues, const int8_t* padding, int32_t* sums = nullptr) {
    const int64_t fresh = continues ? steps_.fresh() : steps_.count;
    first_slot_ = continues ? (first_slot_ + fresh) % std::max<int64_t>(1, steps_.count) : 0;
    for (int64_t step = steps_.count - fresh; step < steps_.count; ++step) {
      pack<kAsPixels>(strip, start + step * steps_.between, slot_of(step), padding, sums);
    }
    block_bytes_ = strip.width * kPanelStepBytes;
  }

  // Where the strip's first channels of each step lie; those of the next 16 are block_bytes() further on.
  const char* const* steps() const {
    for (int64_t step = 0; step < steps_.count; ++step) {
      places_[step] = slot_of(step);
    }
    return places_;
  }
  int64_t block_bytes() const {
    return block_bytes_;
  }

 private:
  char* slot_of(int64_t step) const {
    return packed_ + (first_slot_ + step) % steps_.count * slot_bytes_;
  }

  template <bool kAsPixels>
  void pack(const Strip& strip, int64_t start, char* to, const int8_t* padding, int32_t* sums) const {
    const int8_t* const* const pixels = pixels_.find(strip, start, padding);
    const Table& packing = depthwise_table().packing();
    const auto function = kAsPixels ? packing.pack_left_columns : packing.pack_right;
    function({pixels, strip.width, strip.channels, to, strip.width * kPanelStepBytes, kPanelStepBytes, sums, by_lanes_});
  }

  const RowSteps steps_;
  const bool by_lanes_;
  const int64_t slot_bytes_;
  const PixelColumns pixels_;
  const char** const places_;
  char* const packed_;
  int64_t first_slot_ = 0;
  int64_t block_bytes_ = 0;
};

} // namespace torch_odt::kernels::int8
