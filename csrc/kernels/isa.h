// Which instruction sets the kernels may use on this machine, and how a kernel is compiled for each of them.
#pragma once

#define TORCH_ODT_INLINE [[gnu::always_inline]] inline
#if defined(__x86_64__) && defined(__GNUC__)
#define TORCH_ODT_AVX2 [[gnu::target("avx2,fma")]]
#else
#define TORCH_ODT_AVX2
#endif

namespace torch_odt::kernels {

// The environment variable TORCH_ODT_ISA=baseline keeps everything above the architecture's baseline switched off, so
// that the other paths can be tested on any machine. It is read once.
bool may_use_avx2();

template <auto body, typename... Arguments>
TORCH_ODT_AVX2 void run_with_avx2(Arguments... arguments) {
  body(arguments...);
}

// Runs a body, a function declared TORCH_ODT_INLINE, that is thereby compiled twice: for the baseline, and for AVX2
// with fused multiply-adds. The fused form is chosen wherever torch's own kernels choose it, so that an output that is
// recomputed has the bits of theirs.
template <auto body, typename... Arguments>
void run(Arguments... arguments) {
  if (may_use_avx2()) {
    run_with_avx2<body>(arguments...);
  } else {
    body(arguments...);
  }
}

} // namespace torch_odt::kernels
