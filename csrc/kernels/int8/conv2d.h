// Convolutions of int8 images [batch][rows][columns][channels] with weights [out_channels][rows][columns][depth], and
// their gradients: as products of matrices whose rows are gathered a few at a time, see table.h.
#pragma once

#include <cstdint>

#include "../window_axis.h"
#include "finish.h"
#include "table.h"
#include "threads.h"

namespace torch_odt::kernels::int8 {

struct Conv2d {
  int64_t batch;
  WindowAxis rows;
  WindowAxis columns;
  int64_t in_channels;
  int64_t out_channels;
  int64_t groups;

  // Channels of a group.
  int64_t in_depth() const {
    return in_channels / groups;
  }
  int64_t out_depth() const {
    return out_channels / groups;
  }
  int64_t taps() const {
    return rows.kernel * columns.kernel;
  }
  int64_t in_pixels() const {
    return batch * rows.input * columns.input;
  }
  int64_t out_pixels() const {
    return batch * rows.output * columns.output;
  }
  bool depthwise() const {
    return groups == in_channels && groups == out_channels;
  }
};

// What a convolution's weights are needed for.
enum class Pass { forward, grad_input };

// Weights as the right operands of a pass. They depend on the instruction set, and have to be packed anew when the
// weights change.
int64_t packed_bytes(const Conv2d& conv, Pass pass);
void pack_weight(const Conv2d& conv, Pass pass, const int8_t* weight, const Threads& threads, void* packed);

// Sums of their own that a pass consists of, see taps.h.
inline int64_t phases_of(const Conv2d& conv, Pass pass) {
  return pass == Pass::forward ? 1 : conv.rows.stride * conv.columns.stride;
}

// Bytes that a pass needs for each thread, beside packed weights: kMostWorkspaceBytes at most, whatever the shape.
inline constexpr int64_t kMostWorkspaceBytes = 2000000;
int64_t workspace_bytes(const Conv2d& conv, Pass pass);

// The output from an input whose zero is `zero_point`; `bias` is in units of the sums, or null.
// Returns the largest absolute value, or whether sums fit, see finish().
float forward(
    const Conv2d& conv,
    const int8_t* input,
    int32_t zero_point,
    const void* packed,
    const int32_t* bias,
    const Finish& how,
    const Threads& threads,
    void* workspace);

// The input's gradient from the output's.
float grad_input(
    const Conv2d& conv,
    const int8_t* grad_output,
    const void* packed,
    const Finish& how,
    const Threads& threads,
    void* workspace);

// Both from weights as they are, which are packed on the way: where there are so few pixels that packed weights are used
// once, and would be written to memory and read again for that alone. Others need more workspace than is promised.
bool packs_on_the_way(const Conv2d& conv, Pass pass);
int64_t packing_workspace_bytes(const Conv2d& conv, Pass pass);
float forward_packing(
    const Conv2d& conv,
    const int8_t* input,
    int32_t zero_point,
    const int8_t* weight,
    const int32_t* bias,
    const Finish& how,
    const Threads& threads,
    void* workspace);
float grad_input_packing(
    const Conv2d& conv,
    const int8_t* grad_output,
    const int8_t* weight,
    const Finish& how,
    const Threads& threads,
    void* workspace);

// The weight's gradient, or an update of the weight with it; and the bias's, the sum of the output's over all pixels.
// Bytes are those of each thread, within the same bound.
int64_t grad_weight_workspace_bytes(const Conv2d& conv, const Threads& threads);
// Whether members of threads that run already can each do their part, see Threads: where nothing is added up in the end.
// So they can of the other passes, without a mask.
bool grad_weight_parts_are_independent(const Conv2d& conv, const Threads& threads);
float grad_weight(
    const Conv2d& conv,
    const int8_t* grad_output,
    const int8_t* input,
    int32_t zero_point,
    int64_t* grad_bias,
    const Finish& how,
    const Threads& threads,
    void* workspace);

} // namespace torch_odt::kernels::int8
