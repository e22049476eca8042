// Which instruction sets the kernels may use on this machine, and how a kernel is compiled for each of them.
#pragma once

#include <optional>
#include <string_view>

#define TORCH_ODT_INLINE [[gnu::always_inline]] inline

namespace torch_odt::kernels {

// Each set holds those before it. The baseline is what every processor of an architecture has: SSE2 or NEON.
enum class Isa { baseline, avx2, avx512 };
inline constexpr Isa kAllIsas[] = {Isa::baseline, Isa::avx2, Isa::avx512};

// The set that kernels use: the most that the processor has, and no more than TORCH_ODT_ISA names, so that the other
// paths can be tested on any machine. The variable is read once; a word that names no set is no cap.
Isa isa();

const char* name_of(Isa isa);
std::optional<Isa> isa_named(std::string_view name);

#if defined(__x86_64__) && defined(__GNUC__)

// Compilers think of processors whose clocks fall under wide vectors, and take half of them where nobody asks for more.
// Clang does so for named processors alone, and does not know the word.
#if defined(__clang__)
#define TORCH_ODT_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,fma"
#else
#define TORCH_ODT_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"
#endif

template <auto body, typename... Arguments>
[[gnu::target("avx2,fma")]] void run_with_avx2(Arguments... arguments) {
  body(arguments...);
}

template <auto body, typename... Arguments>
[[gnu::target(TORCH_ODT_AVX512)]] void run_with_avx512(Arguments... arguments) {
  body(arguments...);
}

#undef TORCH_ODT_AVX512

// Runs a body, a function declared TORCH_ODT_INLINE, that is thereby compiled once for each set. Above the baseline
// multiply-adds are fused: that is the form wherever torch's own kernels choose it, so that an output that is
// recomputed has the bits of theirs. The width of vectors must change no bit.
template <auto body, typename... Arguments>
void run(Arguments... arguments) {
  switch (isa()) {
    case Isa::avx512:
      return run_with_avx512<body>(arguments...);
    case Isa::avx2:
      return run_with_avx2<body>(arguments...);
    case Isa::baseline:
      return body(arguments...);
  }
}

#else

template <auto body, typename... Arguments>
void run(Arguments... arguments) {
  body(arguments...);
}

#endif

} // namespace torch_odt::kernels
