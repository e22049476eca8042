// Slices: they cover the outer axis once, and their number follows from the layout alone.

#include "samples.h"

namespace torch_odt::tests {
namespace {

TEST(slices_cover_every_value_once) {
  std::vector<ChannelLayout> all = layouts();
  for (const ChannelLayout& layout : sliced_layouts()) {
    all.push_back(layout);
  }
  all.push_back({1, 1, 1 << 24});
  all.push_back({1 << 24, 1, 1});
  for (const ChannelLayout& layout : all) {
    const Context here(text_of(layout));
    const kernels::Slices slices(layout);
    CHECK(slices.number >= 1 && slices.number <= 64);
    CHECK_EQUAL(slices.begin(0), 0);
    CHECK_EQUAL(slices.begin(slices.number), layout.outer);
    int64_t values = 0;
    for (int64_t slice = 0; slice < slices.number; ++slice) {
      CHECK(slices.begin(slice) < slices.begin(slice + 1));
      values += slices.count(slice);
    }
    CHECK_EQUAL(values, layout.count());
    CHECK_EQUAL(slices.tasks(), slices.number * (layout.inner == 1 ? 1 : layout.channels));
  }
}

TEST(small_tensors_are_one_slice_and_large_ones_are_several) {
  for (const ChannelLayout& layout : layouts()) {
    CHECK_EQUAL(kernels::Slices(layout).number, 1);
  }
  for (const ChannelLayout& layout : sliced_layouts()) {
    CHECK(kernels::Slices(layout).number > 1);
  }
}

} // namespace
} // namespace torch_odt::tests
