// Which instruction sets the kernels may use on this machine.
#pragma once

namespace torch_odt::kernels {

// The environment variable TORCH_ODT_ISA=baseline keeps everything above the architecture's baseline switched off, so
// that the other paths can be tested on any machine. It is read once.
bool may_use_avx2();

} // namespace torch_odt::kernels
