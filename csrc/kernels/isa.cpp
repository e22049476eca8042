#include "isa.h"

#include <cstdlib>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace torch_odt::kernels {

namespace {

#if defined(__x86_64__) && defined(__GNUC__)

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#if defined(__linux__)

// Compilers differ in which of the newer sets they can ask for by name.
unsigned feature_bits(unsigned subleaf, unsigned which) {
  unsigned registers[4] = {};
  const bool known = __get_cpuid_count(7, subleaf, &registers[0], &registers[1], &registers[2], &registers[3]) != 0;
  return known ? registers[which] : 0;
}

bool has_avx_vnni() {
  return has_avx2() && (feature_bits(1, 0) >> 4 & 1) != 0;
}

// The system saves a thread's tiles only for a process that has asked for it.
bool has_amx() {
  constexpr unsigned kTileAndInt8 = 1U << 24 | 1U << 25;
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return (feature_bits(0, 3) & kTileAndInt8) == kTileAndInt8 &&
      syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool has_avx_vnni() {
  return false;
}

bool has_amx() {
  return false;
}

#endif

#endif

} // namespace

bool processor_has(Isa isa) {
  switch (isa) {
    case Isa::scalar:
    case Isa::baseline:
      return true;
#if defined(__x86_64__) && defined(__GNUC__)
    case Isa::avx2:
      return has_avx2();
    case Isa::avx_vnni:
      return has_avx_vnni();
    case Isa::avx512:
      return has_avx512();
    case Isa::avx512_vnni:
      return has_avx512() && __builtin_cpu_supports("avx512vnni");
    case Isa::amx:
      return has_avx512() && __builtin_cpu_supports("avx512vnni") && has_amx();
#elif defined(__aarch64__) && defined(__linux__)
    case Isa::neon_dotprod:
      return (getauxval(AT_HWCAP) >> 20 & 1) != 0;
    case Isa::neon_i8mm:
      return (getauxval(AT_HWCAP) >> 20 & 1) != 0 && (getauxval(AT_HWCAP2) >> 13 & 1) != 0;
#endif
    default:
      return false;
  }
}

Isa isa() {
  static const Isa result = [] {
    const char* const word = std::getenv("TORCH_ODT_ISA");
    const std::optional<Isa> cap = word == nullptr ? std::nullopt : isa_named(word);
    Isa best = Isa::scalar;
    for (const Isa candidate : kAllIsas) {
      if (candidate <= cap.value_or(Isa::amx) && processor_has(candidate)) {
        best = candidate;
      }
    }
    return best;
  }();
  return result;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::neon_dotprod:
      return "neon_dotprod";
    case Isa::neon_i8mm:
      return "neon_i8mm";
    case Isa::avx2:
      return "avx2";
    case Isa::avx_vnni:
      return "avx_vnni";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_vnni:
      return "avx512_vnni";
    case Isa::amx:
      return "amx";
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
