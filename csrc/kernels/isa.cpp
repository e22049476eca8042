#include "isa.h"

#include <algorithm>
#include <cstdlib>

namespace torch_odt::kernels {

namespace {

Isa isa_of_processor() {
#if defined(__x86_64__) && defined(__GNUC__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return !has_avx2 ? Isa::baseline : !has_avx512 ? Isa::avx2 : Isa::avx512;
#else
  return Isa::baseline;
#endif
}

} // namespace

Isa isa() {
  static const Isa result = [] {
    const char* const word = std::getenv("TORCH_ODT_ISA");
    const std::optional<Isa> cap = word == nullptr ? std::nullopt : isa_named(word);
    return std::min(isa_of_processor(), cap.value_or(Isa::avx512));
  }();
  return result;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::baseline:
      break;
  }
  return "baseline";
}

std::optional<Isa> isa_named(std::string_view name) {
  for (const Isa isa : kAllIsas) {
    if (name == name_of(isa)) {
      return isa;
    }
  }
  return std::nullopt;
}

} // namespace torch_odt::kernels
