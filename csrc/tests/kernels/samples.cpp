#include "samples.h"

#include <random>

namespace torch_odt::tests {

std::vector<ChannelLayout> layouts() {
  std::vector<ChannelLayout> result;
  for (const int64_t channels : {1, 3, 7, 8, 9, 33}) {
    for (const int64_t positions : {1, 2, 7, 15, 40}) {
      result.push_back({positions, channels, 1});
    }
    for (const int64_t run : {2, 9, 16, 33}) {
      result.push_back({2, channels, run});
    }
  }
  // More channels than are summed at once.
  result.push_back({17, 513, 1});
  result.push_back({3, 1030, 1});
  for (const int64_t channels : {3, 9}) {
    result.push_back({2, channels, 245});
  }
  return result;
}

std::vector<ChannelLayout> sliced_layouts() {
  return {{4001, 33, 1}, {5, 33, 801}};
}

std::string text_of(const ChannelLayout& layout) {
  return std::to_string(layout.outer) + " x " + std::to_string(layout.channels) + " x " + std::to_string(layout.inner);
}

template <typename S, typename P>
Sample<S, P>::Sample(const ChannelLayout& of) : layout(of) {
  std::mt19937 engine(2024);
  const auto between = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(engine()) / 0x1p32;
  };
  for (int64_t c = 0; c < layout.channels; ++c) {
    mean.push_back(static_cast<Parameter>(between(-3, 3)));
    invstd.push_back(static_cast<Parameter>(between(0.5, 2)));
    weight.push_back(static_cast<Parameter>(between(-2, 2)));
    bias.push_back(static_cast<Parameter>(between(-1, 1)));
  }
  for (int64_t i = 0; i < layout.elements(); ++i) {
    // Drifting, so that no part of a channel has the channel's mean.
    const double drift = 2.0 * static_cast<double>(i) / static_cast<double>(layout.elements());
    const auto c = static_cast<size_t>(channel_of(layout, i));
    input.push_back(stored<Storage>(mean[c] + drift + between(-2, 2)));
    gradient.push_back(stored<Storage>(between(-1, 1)));
  }
  scale.resize(mean.size());
  shift.resize(mean.size());
  kernels::normalisation_factors(
      mean.data(), invstd.data(), weight.data(), bias.data(), layout.channels, scale.data(), shift.data());
}

template struct Sample<float, float>;
template struct Sample<double, double>;
template struct Sample<BFloat16, float>;

} // namespace torch_odt::tests
