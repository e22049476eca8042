// Random draws. Shapes for tracing are registered in torch_odt/ops.

#include <cstring>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/bernoulli.h"
#include "kernels/bits.h"

namespace {

using namespace torch_odt;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// How torch.Generator.get_state() begins on a CPU.
struct GeneratorState {
  uint64_t seed;
  // Words that are left, plus one; 1 in a generator that has just been seeded, too.
  int32_t left;
  int32_t seeded;
  uint64_t next;
  uint64_t words[kernels::kTwisterWords];
};

kernels::Twister read(const GeneratorState& state) {
  kernels::Twister twister;
  for (int64_t i = 0; i < kernels::kTwisterWords; ++i) {
    twister.words[i] = static_cast<uint32_t>(state.words[i]);
  }
  twister.used = state.left == 1 ? kernels::kTwisterWords : static_cast<int64_t>(state.next);
  return twister;
}

void write(const kernels::Twister& twister, GeneratorState& state) {
  for (int64_t i = 0; i < kernels::kTwisterWords; ++i) {
    state.words[i] = twister.words[i];
  }
  state.left = static_cast<int32_t>(kernels::kTwisterWords + 1 - twister.used);
  state.next = static_cast<uint64_t>(twister.used);
}

Tensor draw_bits(Tensor generator_state, int64_t count, double probability) {
  STD_TORCH_CHECK(
      generator_state.scalar_type() == ScalarType::Byte && generator_state.is_contiguous() &&
          generator_state.numel() >= static_cast<int64_t>(sizeof(GeneratorState)),
      "draw_bits: the state must be that of a torch.Generator of the CPU");
  STD_TORCH_CHECK(probability >= 0 && probability <= 1, "draw_bits: the probability must lie between 0 and 1");
  STD_TORCH_CHECK(count >= 0, "draw_bits: the count must not be negative");
  GeneratorState state;
  std::memcpy(&state, generator_state.const_data_ptr(), sizeof(state));
  STD_TORCH_CHECK(
      state.left >= 1 && state.left <= kernels::kTwisterWords && state.next <= kernels::kTwisterWords,
      "draw_bits: the state must be that of a torch.Generator of the CPU");
  Tensor packed = torch::stable::new_empty(generator_state, {kernels::packed_bytes(count)}, ScalarType::Byte);
  if (count == 0) {
    return packed;
  }
  kernels::Twister twister = read(state);
  kernels::draw_bits(twister, probability, count, static_cast<uint8_t*>(packed.mutable_data_ptr()));
  write(twister, state);
  std::memcpy(generator_state.mutable_data_ptr(), &state, sizeof(state));
  return packed;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(torch_odt, m) {
  m.def("draw_bits(Tensor(a!) generator_state, int count, float probability) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torch_odt, CPU, m) {
  m.impl("draw_bits", TORCH_BOX(&draw_bits));
}
