// Sums of two tensors in NITI's arithmetic, see `added` in torch_odt/quant/niti_numbers.py.

#include <array>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "ops_niti.h"

namespace {

using namespace torch_odt;

constexpr int64_t kMostUp = 16; // so that int32 holds the sums

// The same bytes in the order of another tensor's memory, which is channels_last or contiguous.
Tensor ordered(const Tensor& carrier, bool in_channels_last) {
  return in_channels_last ? channels_last(carrier) : as_contiguous(carrier);
}

using Piece = std::array<int8_t, static_cast<size_t>(kWholeAtOnce)>;

// How far mantissas are moved up, and those of the finer scale down, so that int32 holds their sums.
struct Apart {
  int64_t up;
  int64_t down;

  explicit Apart(int64_t exponents)
      : up(std::min(exponents, kMostUp)), down(std::min(exponents - up, kernels::int8::kLargestShift)) {}

  // Some mantissas of the finer scale. How far they go down is known from the numbers alone, so that memory of their
  // own for all of them would be memory that no plan can know of.
  const int8_t* moved_down(const int8_t* from, int64_t count, Piece& piece) const {
    if (down == 0) {
      return from;
    }
    for (int64_t i = 0; i < count; ++i) {
      piece[static_cast<size_t>(i)] =
          static_cast<int8_t>(std::nearbyint(std::ldexp(static_cast<float>(from[i]), static_cast<int>(-down))));
    }
    return piece.data();
  }
};

template <typename Function>
void in_pieces(int64_t begin, int64_t end, const Function& function) {
  for (int64_t at = begin; at < end; at += kWholeAtOnce) {
    function(at, std::min(kWholeAtOnce, end - at));
  }
}

// The sum of two tensors of different scales, see `added` in torch_odt/quant/niti_numbers.py.
std::tuple<Tensor, Tensor> add(
    const Tensor& first,
    const Tensor& first_exponent,
    const Tensor& second,
    const Tensor& second_exponent,
    int64_t rounding) {
  constexpr char kName[] = "niti_add";
  STD_TORCH_CHECK(
      are_mantissas(first) && are_mantissas(second) && first.dim() == second.dim(),
      kName,
      ": both must be mantissas of the same shape on the CPU");
  Pair sizes;
  for (int64_t i = 0; i < first.dim(); ++i) {
    STD_TORCH_CHECK(first.size(i) == second.size(i), kName, ": both must have the same shape");
    sizes.push_back(first.size(i));
  }
  check_rounding(rounding, kName);
  const bool in_channels_last =
      first.dim() == 4 && (!first.is_contiguous() || (first.stride(1) == 1 && first.stride(3) == first.size(1)));
  const int64_t one = exponent_of(first_exponent, "first_exponent");
  const int64_t other = exponent_of(second_exponent, "second_exponent");
  const bool first_is_coarse = one >= other;
  const Tensor coarse = ordered(first_is_coarse ? first : second, in_channels_last);
  const Tensor fine = ordered(first_is_coarse ? second : first, in_channels_last);
  const int64_t distance = std::max(one, other) - std::min(one, other);
  const Apart apart(distance);
  const int64_t count = coarse.numel();
  const int8_t* const upper = bytes_of(coarse);
  const int8_t* const lower = bytes_of(fine);
  const auto blocks = count / kGrainElements + 1;
  std::vector<int32_t> largest(static_cast<size_t>(blocks), 0);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t place = block * kGrainElements;
      const int64_t some = std::min(kGrainElements, count - place);
      int32_t& most_of_block = largest[static_cast<size_t>(block)];
      in_pieces(place, place + some, [&](int64_t at, int64_t few) {
        Piece moved;
        most_of_block = std::max(
            most_of_block,
            kernels::int8::largest_sum(upper + at, apart.moved_down(lower + at, few, moved), few, apart.up));
      });
    }
  });
  const auto most = static_cast<double>(*std::max_element(largest.begin(), largest.end()));
  const int64_t shift = std::max<int64_t>(0, kernels::int8::bits_of(most) - kMantissaBits);
  Tensor result = in_channels_last ? empty_image(sizes, kCarrier, first) : empty_contiguous(sizes, kCarrier, first);
  auto* const to = static_cast<int8_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, count, kGrainElements, [&](int64_t begin, int64_t end) {
    alignas(64) std::array<int32_t, kWholeAtOnce> sums;
    in_pieces(begin, end, [&](int64_t at, int64_t few) {
      Piece moved;
      kernels::int8::add_shifted(upper + at, apart.moved_down(lower + at, few, moved), few, apart.up, sums.data());
      kernels::int8::shift_to_int8(sums.data(), few, shift, static_cast<kernels::int8::Rounding>(rounding), to + at);
    });
  });
  const int64_t exponent = std::max(one, other) - apart.up + shift;
  return {result, one_number(static_cast<float>(exponent), first)};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def(
      "niti_add(Tensor first, Tensor first_exponent, Tensor second, Tensor second_exponent, int rounding) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("niti_add", TORCH_BOX(&add));
}
