// The environment's cap on instruction sets, without which the baseline would go untested on newer machines.

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "../../kernels/isa.h"
#include "../check.h"

namespace torch_odt::tests {
namespace {

TEST(the_environment_keeps_avx2_switched_off) {
  std::printf("kernels for %s\n", kernels::may_use_avx2() ? "AVX2" : "the baseline");
  const char* const cap = std::getenv("TORCH_ODT_ISA");
  if (cap != nullptr && std::string_view(cap) == "baseline") {
    CHECK(!kernels::may_use_avx2());
  }
}

} // namespace
} // namespace torch_odt::tests
