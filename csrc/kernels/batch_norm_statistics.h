// The statistics of batch normalisation in one pass over the input.
#pragma once

#include <cstdint>

#include "channel_layout.h"
#include "storage.h"

namespace torch_odt::kernels {

// Deviations from a number near the mean: arrays of [slices][channels].
template <typename Parameter>
struct Moments {
  Parameter* centre;
  double* sum;
  double* square;
};

// Exponential averages; `mean` and `variance` are read, the new ones are written.
template <typename Parameter>
struct RunningAverages {
  double momentum;
  const Parameter* mean;
  const Parameter* variance;
  Parameter* new_mean;
  Parameter* new_variance;
};

// Works on the tasks from begin up to end.
template <typename Storage, typename Parameter>
void take_moments(
    const Storage* input, const Slices& slices, int64_t begin, int64_t end, const Moments<Parameter>& moments);

// Once all tasks are done.
template <typename Parameter>
void finish_statistics(
    const Moments<Parameter>& moments,
    const Slices& slices,
    double eps,
    const RunningAverages<Parameter>& averages,
    Parameter* mean,
    Parameter* invstd);

} // namespace torch_odt::kernels
