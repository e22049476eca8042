#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace torch_odt::kernels {

#if defined(__x86_64__) && defined(__GNUC__)

bool may_use_avx2() {
  static const bool result = [] {
    const char* const cap = std::getenv("TORCH_ODT_ISA");
    if (cap != nullptr && std::strcmp(cap, "baseline") == 0) {
      return false;
    }
    return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  }();
  return result;
}

#else

bool may_use_avx2() {
  return false;
}

#endif

} // namespace torch_odt::kernels
