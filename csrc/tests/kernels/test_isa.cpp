// The instruction set that is in use: what the environment's cap allows, and what csrc/tests/run meant to test.

#include <cstdio>
#include <cstdlib>
#include <string>

#include "../../kernels/isa.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

TEST(the_set_in_use_is_the_expected_one) {
  std::printf("kernels: %s\n", kernels::name_of(kernels::isa()));
  const char* const expected = std::getenv("TORCH_ODT_EXPECTED_ISA");
  if (expected != nullptr) {
    const Context here(std::string(kernels::name_of(kernels::isa())) + " for " + expected);
    CHECK(kernels::isa_named(expected) == kernels::isa());
  }
}

TEST(the_environment_caps_the_set) {
  const char* const word = std::getenv("TORCH_ODT_ISA");
  if (word != nullptr) {
    CHECK(kernels::isa_named(word).has_value());
    CHECK(kernels::isa() <= kernels::isa_named(word).value_or(kernels::Isa::baseline));
  }
}

TEST(sets_have_names_and_other_words_name_none) {
  for (const kernels::Isa isa : kernels::kAllIsas) {
    CHECK(kernels::isa_named(kernels::name_of(isa)) == isa);
  }
  for (const char* const word : {"", "AVX2", "avx", "avx2 ", "neon"}) {
    CHECK(!kernels::isa_named(word).has_value());
  }
}

} // namespace
} // namespace torch_odt::tests
