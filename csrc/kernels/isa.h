// Which instruction sets the kernels may use on this machine, and how a kernel is compiled for each of them.
#pragma once

#include <optional>
#include <string_view>

#define TORCH_ODT_INLINE [[gnu::always_inline]] inline

namespace torch_odt::kernels {

// In the order of preference. The baseline is what every processor of an architecture has: SSE2 or NEON; `scalar` is the
// same but for the int8 kernels, which use no vectors then. A processor may lack a set between two that it has.
enum class Isa { scalar, baseline, neon_dotprod, neon_i8mm, avx2, avx_vnni, avx512, avx512_vnni, amx };
inline constexpr Isa kAllIsas[] = {
    Isa::scalar,
    Isa::baseline,
    Isa::neon_dotprod,
    Isa::neon_i8mm,
    Isa::avx2,
    Isa::avx_vnni,
    Isa::avx512,
    Isa::avx512_vnni,
    Isa::amx};

// The set that kernels use: the last that the processor has, and none behind the one that TORCH_ODT_ISA names, so that
// the other paths can be tested on any machine. The variable is read once; a word that names no set is no cap.
Isa isa();

bool processor_has(Isa isa);

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

// Runs a body, a function declared TORCH_ODT_INLINE, that is thereby compiled for the baseline, AVX2 and AVX-512. Above the baseline
// multiply-adds are fused: that is the form wherever torch's own kernels choose it, so that an output that is
// recomputed has the bits of theirs. The width of vectors must change no bit.
template <auto body, typename... Arguments>
void run(Arguments... arguments) {
  const Isa used = isa();
  if (used >= Isa::avx512) {
    run_with_avx512<body>(arguments...);
  } else if (used >= Isa::avx2) {
    run_with_avx2<body>(arguments...);
  } else {
    body(arguments...);
  }
}

// Runs Body<bytes>::run, declared TORCH_ODT_INLINE, with the bytes of the set's vectors: for bodies that are written with
// vectors (GCC's vector_size), where compilers do not find them in plain loops.
template <template <int> class Body, typename... Arguments>
void run_with_vectors(Arguments... arguments) {
  const Isa used = isa();
  if (used >= Isa::avx512) {
    run_with_avx512<Body<64>::run>(arguments...);
  } else if (used >= Isa::avx2) {
    run_with_avx2<Body<32>::run>(arguments...);
  } else {
    Body<16>::run(arguments...);
  }
}

#else

template <auto body, typename... Arguments>
void run(Arguments... arguments) {
  body(arguments...);
}

template <template <int> class Body, typename... Arguments>
void run_with_vectors(Arguments... arguments) {
  Body<16>::run(arguments...);
}

#endif

} // namespace torch_odt::kernels
