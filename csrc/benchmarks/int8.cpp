// Seconds of the int8 kernels alone, without torch: int8 [rounds [part of a name]], for the set that TORCH_ODT_ISA allows. Prints for each
// layer the milliseconds of each pass, batch 8 on one thread, and billions of operations per second. Also for Arm.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../kernels/int8/conv2d.h"

namespace {

using namespace torch_odt::kernels;
using namespace torch_odt::kernels::int8;

WindowAxis axis(int64_t input, int64_t kernel, int64_t stride, int64_t padding) {
  return {input, (input + 2 * padding - kernel) / stride + 1, kernel, stride, padding, 1};
}

struct Layer {
  const char* name;
  int64_t batch, in, out, size, kernel, stride, groups;

  Conv2d conv() const {
    const WindowAxis both = axis(size, kernel, stride, kernel / 2);
    return {batch, both, both, in, out, groups};
  }
};

// The list that docs and targets speak of.
constexpr Layer kLayers[] = {
    {"stem 3->32 s2 @224", 8, 3, 32, 224, 3, 2, 1},
    {"stem 3->64 7x7 s2 @224", 8, 3, 64, 224, 7, 2, 1},
    {"pw 96->24 @56", 8, 96, 24, 56, 1, 1, 1},
    {"pw 24->144 @56", 8, 24, 144, 56, 1, 1, 1},
    {"pw 384->96 @14", 8, 384, 96, 14, 1, 1, 1},
    {"pw 96->576 @14", 8, 96, 576, 14, 1, 1, 1},
    {"pw 960->320 @7", 8, 960, 320, 7, 1, 1, 1},
    {"pw 320->1280 @7", 8, 320, 1280, 7, 1, 1, 1},
    {"dw3x3 144 @56", 8, 144, 144, 56, 3, 1, 144},
    {"dw3x3s2 144 @56", 8, 144, 144, 56, 3, 2, 144},
    {"dw3x3 384 @14", 8, 384, 384, 14, 3, 1, 384},
    {"dw3x3 960 @7", 8, 960, 960, 7, 3, 1, 960},
    {"c3x3 64 @56", 8, 64, 64, 56, 3, 1, 1},
    {"c3x3 128 @28", 8, 128, 128, 28, 3, 1, 1},
    {"c3x3 256 @14", 8, 256, 256, 14, 3, 1, 1},
    {"c3x3 512 @7", 8, 512, 512, 7, 3, 1, 1},
    {"linear 1280x1000 b8", 8, 1280, 1000, 1, 1, 1, 1},
    {"linear 1280x1000 b64", 64, 1280, 1000, 1, 1, 1, 1},
    {"linear 768x3072 b512", 512, 768, 3072, 1, 1, 1, 1},
};

// Memory as torch hands it out: at the beginning of a line of the cache.
struct Memory {
  explicit Memory(int64_t bytes) : data(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64))) {}
  ~Memory() {
    std::free(data);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* const data;
};

template <typename Function>
double least_seconds(int rounds, const Function& function) {
  double least = 1e9;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    function();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return least;
}

template <typename T>
std::vector<T> some(int64_t count) {
  std::vector<T> result(static_cast<size_t>(count));
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = static_cast<T>(static_cast<int8_t>(i * 2654435761U >> 13));
  }
  return result;
}

void measure(const Layer& layer, int rounds) {
  const Conv2d conv = layer.conv();
  const auto input = some<int8_t>(conv.in_pixels() * conv.in_channels);
  const auto weight = some<int8_t>(conv.out_channels * conv.taps() * conv.in_depth());
  const auto grad_output = some<int8_t>(conv.out_pixels() * conv.out_channels);
  auto output = grad_output;
  auto grad = input;
  std::vector<float> gradient(weight.size());
  std::vector<int64_t> grad_bias(static_cast<size_t>(conv.out_channels));
  const Threads one;
  const bool packs = packs_on_the_way(conv, Pass::grad_input);
  const int64_t bytes = std::max(
      {workspace_bytes(conv, Pass::forward),
       workspace_bytes(conv, Pass::grad_input),
       packs ? packing_workspace_bytes(conv, Pass::grad_input) : 0,
       grad_weight_workspace_bytes(conv, one)});
  const Memory workspace(bytes);
  const Memory packed(std::max(packed_bytes(conv, Pass::forward), packed_bytes(conv, Pass::grad_input)));
  const float multiplier = 0.001F;
  Finish to_bytes;
  to_bytes.result = Result::int8;
  to_bytes.multipliers = &multiplier;
  to_bytes.rounding = Rounding::stochastic;
  Finish to_floats = to_bytes;
  to_floats.result = Result::floats;
  to_floats.output = gradient.data();
  to_bytes.output = grad.data();
  const double packing = packs ? 0 : least_seconds(rounds, [&] {
    pack_weight(conv, Pass::grad_input, weight.data(), one, packed.data);
  });
  const double of_input = least_seconds(rounds, [&] {
    if (packs) {
      grad_input_packing(conv, grad_output.data(), weight.data(), to_bytes, one, workspace.data);
    } else {
      grad_input(conv, grad_output.data(), packed.data, to_bytes, one, workspace.data);
    }
  });
  const double of_weight = least_seconds(rounds, [&] {
    grad_weight(
        conv, grad_output.data(), input.data(), 0, grad_bias.data(), to_floats, one, workspace.data);
  });
  const double forward_packing = least_seconds(
      rounds, [&] { pack_weight(conv, Pass::forward, weight.data(), one, packed.data); });
  to_bytes.output = output.data();
  to_bytes.rounding = Rounding::nearest;
  const double of_output = least_seconds(rounds, [&] {
    forward(conv, input.data(), 0, packed.data, nullptr, to_bytes, one, workspace.data);
  });
  const double operations = 2.0 * static_cast<double>(conv.out_pixels() * conv.out_channels * conv.taps() * conv.in_depth());
  std::printf(
      "%-22s gI %7.3f + pack %6.3f (%5.0f) gW and gb %7.3f (%5.0f) both %7.3f | fwd %7.3f + pack %6.3f (%5.0f)\n",
      layer.name,
      of_input * 1e3,
      packing * 1e3,
      operations / of_input / 1e9,
      of_weight * 1e3,
      operations / of_weight / 1e9,
      (of_input + packing + of_weight) * 1e3,
      of_output * 1e3,
      forward_packing * 1e3,
      operations / of_output / 1e9);
}

} // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 20;
  std::printf("set: %s\n", name_of(isa()));
  for (const Layer& layer : kLayers) {
    if (argc > 2 && std::strstr(layer.name, argv[2]) == nullptr) {
      continue;
    }
    measure(layer, rounds);
  }
}
