// How channels lie in a dense tensor, and how work on it is cut for threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torch_odt::kernels {

// The layouts that are dense with the channel as one axis: [outer][channels][inner].
struct ChannelLayout {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  int64_t elements() const {
    return outer * channels * inner;
  }
  // How many values a channel has.
  int64_t count() const {
    return outer * inner;
  }
};

// Sums over a channel are taken for slices of the outer axis, and added up in the slices' order. How many slices there
// are depends on the layout alone, so that the number of threads changes no bit.
struct Slices {
  ChannelLayout layout;
  int64_t number;

  explicit Slices(const ChannelLayout& of) : layout(of) {
    constexpr int64_t kElements = 65536;
    constexpr int64_t kMost = 64;
    number = std::max<int64_t>(1, std::min({kMost, of.outer, of.elements() / kElements}));
  }
  int64_t begin(int64_t slice) const {
    return layout.outer * slice / number;
  }
  // How many values of each channel lie in a slice.
  int64_t count(int64_t slice) const {
    return (begin(slice + 1) - begin(slice)) * layout.inner;
  }
  // A task is all channels of a slice where inner is 1, and one channel of a slice otherwise: a run of memory, or runs
  // at equal distances. Tasks are numbered slice by slice.
  int64_t tasks() const {
    return layout.inner == 1 ? number : number * layout.channels;
  }
};

} // namespace torch_odt::kernels
