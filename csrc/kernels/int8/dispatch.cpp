#include "depthwise_tables.h"
#include "table.h"

namespace torch_odt::kernels::int8 {

const Table& table() {
  static const Table& result = []() -> const Table& {
    switch (isa()) {
#if defined(__x86_64__) && defined(__GNUC__)
      case Isa::amx:
        return amx_table();
      case Isa::avx512_vnni:
        return avx512_vnni_table();
      case Isa::avx512:
        return processor_has(Isa::avx_vnni) ? avx_vnni_table() : avx2_table();
      case Isa::avx_vnni:
        return avx_vnni_table();
      case Isa::avx2:
        return avx2_table();
#elif defined(__aarch64__)
      case Isa::neon_i8mm:
        return neon_i8mm_table();
      case Isa::neon_dotprod:
        return neon_dotprod_table();
      case Isa::baseline:
        return neon_table();
#endif
      default:
        return scalar_table();
    }
  }();
  return result;
}

const Table& table_for_depth(int64_t depth) {
#if defined(__x86_64__) && defined(__GNUC__)
  // AMX multiplies 64 terms at a time. Filled up with zeros, 24 take it less time than other sets, 16 more (measured).
  constexpr int64_t kLeastTerms = 24;
  if (depth < kLeastTerms && isa() == Isa::amx) {
    return avx512_vnni_table();
  }
#else
  static_cast<void>(depth);
#endif
  return table();
}

const DepthwiseTable& depthwise_table() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (isa() >= Isa::avx512_vnni) {
    return depthwise_avx512_vnni();
  }
  if (isa() >= Isa::avx2) {
    return depthwise_avx2();
  }
#endif
  return depthwise_plain();
}

} // namespace torch_odt::kernels::int8
