#include "depthwise.h"

#include <algorithm>

#include "float_vectors.h"

namespace torch_odt::kernels {

namespace {

// Pixels that are summed up side by side.
constexpr int kPixels = 4;

// The products that a pixel is the sum of, in one axis: elements of the source and of the window that go together.
struct Terms {
  int64_t source;
  int64_t tap;
  int64_t count;
};

// Pixels along an axis that are made of the same taps: every `step`-th from `first` on, of sources that begin `advance`
// further on for each.
struct Run {
  int64_t first;
  int64_t count;
  int64_t step;
  int64_t advance;
  Terms terms;
};

// The output's axis: a pixel is made of its window.
struct OfOutput {
  TORCH_ODT_INLINE static int64_t tap_step(const WindowAxis&) {
    return 1;
  }
  TORCH_ODT_INLINE static int64_t places(const WindowAxis& axis) {
    return axis.output;
  }
  TORCH_ODT_INLINE static int64_t sources(const WindowAxis& axis) {
    return axis.input;
  }
  TORCH_ODT_INLINE static Terms at(const WindowAxis& axis, int64_t place) {
    const int64_t first = axis.first(place);
    return {axis.position(place, first), first, std::max<int64_t>(0, axis.last(place) - first)};
  }
  // Windows inside of the image are from `begin` to `end`.
  TORCH_ODT_INLINE static int64_t begin(const WindowAxis& axis) {
    return axis.first_window(0);
  }
  TORCH_ODT_INLINE static int64_t end(const WindowAxis& axis) {
    return axis.last_window(axis.kernel - 1);
  }
  TORCH_ODT_INLINE static int64_t phases(const WindowAxis&) {
    return 1;
  }
  TORCH_ODT_INLINE static int64_t advance(const WindowAxis& axis) {
    return axis.stride;
  }
};

// The input's axis: a pixel is made of the windows that reach over it, each with another of its elements.
struct OfInput {
  TORCH_ODT_INLINE static int64_t tap_step(const WindowAxis& axis) {
    return -axis.stride;
  }
  TORCH_ODT_INLINE static int64_t places(const WindowAxis& axis) {
    return axis.input;
  }
  TORCH_ODT_INLINE static int64_t sources(const WindowAxis& axis) {
    return axis.output;
  }
  TORCH_ODT_INLINE static Terms at(const WindowAxis& axis, int64_t place) {
    const int64_t first = axis.first_over(place);
    return {first, place + axis.padding - first * axis.stride, std::max<int64_t>(0, axis.last_over(place) - first)};
  }
  // All windows that could reach over a pixel are there from `begin` to `end`.
  TORCH_ODT_INLINE static int64_t begin(const WindowAxis& axis) {
    return std::clamp<int64_t>(axis.kernel - 1 - axis.padding, 0, axis.input);
  }
  TORCH_ODT_INLINE static int64_t end(const WindowAxis& axis) {
    return std::clamp<int64_t>(axis.output * axis.stride - axis.padding, 0, axis.input);
  }
  TORCH_ODT_INLINE static int64_t phases(const WindowAxis& axis) {
    return axis.stride;
  }
  TORCH_ODT_INLINE static int64_t advance(const WindowAxis&) {
    return 1;
  }
};

// Calls function(run) for all pixels along an axis.
template <typename Side, typename Function>
TORCH_ODT_INLINE void for_runs(const WindowAxis& axis, const Function& function) {
  const int64_t begin = Side::begin(axis);
  const int64_t end = std::max(begin, Side::end(axis));
  const int64_t step = Side::phases(axis);
  for (int64_t place = 0; place < begin; ++place) {
    function(Run{place, 1, 1, 0, Side::at(axis, place)});
  }
  for (int64_t place = begin; place < std::min(end, begin + step); ++place) {
    function(Run{place, (end - place + step - 1) / step, step, Side::advance(axis), Side::at(axis, place)});
  }
  for (int64_t place = end; place < Side::places(axis); ++place) {
    function(Run{place, 1, 1, 0, Side::at(axis, place)});
  }
}

// How far apart things lie, in elements.
struct Steps {
  int64_t source_pixel;
  int64_t source_row;
  int64_t source_column;
  int64_t tap_row;
  int64_t tap_column;
  int64_t result_pixel;
};

// Pixels of a run, in some channels: the first term of the first one is `source[0] * taps[0]`. What neighbours have in
// common is loaded once where `kColumns`, the terms of a row, and `kAdvance` are known; 0 are others.
template <int kBytes, int kVectors, int kCount, int kColumns, int kAdvance>
TORCH_ODT_INLINE void sum_pixels(
    const float* source,
    const float* taps,
    const float* start,
    const Steps& steps,
    int64_t rows,
    int64_t columns,
    float* result) {
  using Vector = FloatVector<kBytes>;
  typename Vector::Type sums[kCount][kVectors];
  for (int v = 0; v < kVectors; ++v) {
    for (int pixel = 0; pixel < kCount; ++pixel) {
      sums[pixel][v] = start == nullptr ? typename Vector::Type{} : Vector::load(start + v * Vector::kCount);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = source + row * steps.source_row;
    const float* const by = taps + row * steps.tap_row;
    if constexpr (kColumns > 0 && kAdvance > 0) {
      constexpr int kSources = (kCount - 1) * kAdvance + kColumns;
      for (int v = 0; v < kVectors; ++v) {
        typename Vector::Type sources[kSources];
        for (int i = 0; i < kSources; ++i) {
          sources[i] = Vector::load(from + i * steps.source_column + v * Vector::kCount);
        }
        for (int column = 0; column < kColumns; ++column) {
          const auto tap = Vector::load(by + column * steps.tap_column + v * Vector::kCount);
          for (int pixel = 0; pixel < kCount; ++pixel) {
            sums[pixel][v] += sources[pixel * kAdvance + column] * tap;
          }
        }
      }
    } else {
      for (int64_t column = 0; column < columns; ++column) {
        for (int v = 0; v < kVectors; ++v) {
          const auto tap = Vector::load(by + column * steps.tap_column + v * Vector::kCount);
          for (int pixel = 0; pixel < kCount; ++pixel) {
            const float* const at = from + pixel * steps.source_pixel + column * steps.source_column;
            sums[pixel][v] += Vector::load(at + v * Vector::kCount) * tap;
          }
        }
      }
    }
  }
  for (int pixel = 0; pixel < kCount; ++pixel) {
    for (int v = 0; v < kVectors; ++v) {
      Vector::store(sums[pixel][v], result + pixel * steps.result_pixel + v * Vector::kCount);
    }
  }
}

// A run of pixels in some channels.
template <int kBytes, int kVectors, int kColumns, int kAdvance>
TORCH_ODT_INLINE void sum_run(
    const float* source,
    const float* taps,
    const float* start,
    const Steps& steps,
    int64_t rows,
    const Run& run,
    float* result) {
  int64_t pixel = 0;
  for (; pixel + kPixels <= run.count; pixel += kPixels) {
    sum_pixels<kBytes, kVectors, kPixels, kColumns, kAdvance>(
        source + pixel * steps.source_pixel,
        taps,
        start,
        steps,
        rows,
        run.terms.count,
        result + pixel * steps.result_pixel);
  }
  for (; pixel < run.count; ++pixel) {
    sum_pixels<kBytes, kVectors, 1, kColumns, kAdvance>(
        source + pixel * steps.source_pixel,
        taps,
        start,
        steps,
        rows,
        run.terms.count,
        result + pixel * steps.result_pixel);
  }
}

// A row of pixels in some channels, which begin at `channel`.
template <int kBytes, int kVectors, typename Side>
TORCH_ODT_INLINE void sum_row(
    const float* source,
    const float* taps,
    const float* start,
    const Depthwise& conv,
    const Terms& rows,
    int64_t channel,
    float* result) {
  const int64_t channels = conv.channels;
  const WindowAxis& axis = conv.columns;
  const float* const first = start == nullptr ? nullptr : start + channel;
  for_runs<Side>(axis, [&](const Run& run) __attribute__((always_inline)) {
    const Steps steps{
        run.advance * channels,
        Side::sources(axis) * channels,
        channels,
        Side::tap_step(conv.rows) * axis.kernel * channels,
        Side::tap_step(axis) * channels,
        run.step * channels};
    const float* const from = source + rows.source * steps.source_row + run.terms.source * channels + channel;
    const float* const by = taps + (rows.tap * axis.kernel + run.terms.tap) * channels + channel;
    float* const to = result + run.first * channels + channel;
    if (run.advance == 1 && run.terms.count == 3) {
      sum_run<kBytes, kVectors, 3, 1>(from, by, first, steps, rows.count, run, to);
    } else if (run.advance == 2 && run.terms.count == 3) {
      sum_run<kBytes, kVectors, 3, 2>(from, by, first, steps, rows.count, run, to);
    } else if (run.advance == 1 && run.terms.count == 5) {
      sum_run<kBytes, kVectors, 5, 1>(from, by, first, steps, rows.count, run, to);
    } else if (run.advance == 1 && run.terms.count == 7) {
      sum_run<kBytes, kVectors, 7, 1>(from, by, first, steps, rows.count, run, to);
    } else {
      sum_run<kBytes, kVectors, 0, 0>(from, by, first, steps, rows.count, run, to);
    }
  });
}

// Rows of pixels, some channels at a time. Where the last ones do not fill vectors, these overlap the ones before.
template <int kBytes, typename Side>
TORCH_ODT_INLINE void sum_rows(
    const float* source,
    const float* taps,
    const float* start,
    const Depthwise& conv,
    int64_t begin,
    int64_t end,
    float* result) {
  constexpr int64_t kCount = FloatVector<kBytes>::kCount;
  const int64_t channels = conv.channels;
  const int64_t source_plane = Side::sources(conv.rows) * Side::sources(conv.columns) * channels;
  const int64_t result_row = Side::places(conv.columns) * channels;
  for (int64_t index = begin; index < end; ++index) {
    const float* const plane = source + index / Side::places(conv.rows) * source_plane;
    const Terms rows = Side::at(conv.rows, index % Side::places(conv.rows));
    float* const to = result + index * result_row;
    int64_t channel = 0;
    for (; channel + 2 * kCount <= channels; channel += 2 * kCount) {
      sum_row<kBytes, 2, Side>(plane, taps, start, conv, rows, channel, to);
    }
    for (; channel < channels; channel += kCount) {
      sum_row<kBytes, 1, Side>(plane, taps, start, conv, rows, std::min(channel, channels - kCount), to);
    }
  }
}

// Vectors that some channels fill: whether narrower ones are needed.
template <int kBytes>
TORCH_ODT_INLINE bool are_too_wide(int64_t channels) {
  return kBytes > 4 && channels < FloatVector<kBytes>::kCount;
}

template <int kBytes>
struct Forward {
  TORCH_ODT_INLINE static void run(
      const float* input,
      const float* taps,
      const float* bias,
      const Depthwise* conv,
      int64_t begin,
      int64_t end,
      float* output) {
    if constexpr (kBytes > 4) {
      if (are_too_wide<kBytes>(conv->channels)) {
        Forward<kNarrower<kBytes>>::run(input, taps, bias, conv, begin, end, output);
        return;
      }
    }
    sum_rows<kBytes, OfOutput>(input, taps, bias, *conv, begin, end, output);
  }
};

template <int kBytes>
struct GradInput {
  TORCH_ODT_INLINE static void run(
      const float* grad_output,
      const float* taps,
      const Depthwise* conv,
      int64_t begin,
      int64_t end,
      float* grad_input) {
    if constexpr (kBytes > 4) {
      if (are_too_wide<kBytes>(conv->channels)) {
        GradInput<kNarrower<kBytes>>::run(grad_output, taps, conv, begin, end, grad_input);
        return;
      }
    }
    sum_rows<kBytes, OfInput>(grad_output, taps, nullptr, *conv, begin, end, grad_input);
  }
};

// Products of a row of the output's gradient with the row of the input that meets a row of the window, for the pixels
// whose windows lie inside: `kColumns` taps at once.
template <int kBytes, int kVectors, int kColumns>
TORCH_ODT_INLINE void add_products(
    const float* gradient, const float* input, int64_t channels, int64_t stride, int64_t count, float* grad_taps) {
  using Vector = FloatVector<kBytes>;
  typename Vector::Type sums[kColumns][kVectors] = {};
  for (int64_t pixel = 0; pixel < count; ++pixel) {
    for (int v = 0; v < kVectors; ++v) {
      const auto of_pixel = Vector::load(gradient + pixel * channels + v * Vector::kCount);
      for (int tap = 0; tap < kColumns; ++tap) {
        const float* const from = input + (pixel * stride + tap) * channels + v * Vector::kCount;
        sums[tap][v] += of_pixel * Vector::load(from);
      }
    }
  }
  for (int tap = 0; tap < kColumns; ++tap) {
    for (int v = 0; v < kVectors; ++v) {
      float* const to = grad_taps + tap * channels + v * Vector::kCount;
      Vector::store(Vector::load(to) + sums[tap][v], to);
    }
  }
}

// The same for the taps `first` to `last` of one pixel.
template <int kBytes, int kVectors>
TORCH_ODT_INLINE void add_pixel(
    const float* gradient, const float* input, int64_t channels, int64_t first, int64_t last, float* grad_taps) {
  using Vector = FloatVector<kBytes>;
  for (int64_t tap = first; tap < last; ++tap) {
    for (int v = 0; v < kVectors; ++v) {
      float* const to = grad_taps + tap * channels + v * Vector::kCount;
      const auto product = Vector::load(gradient + v * Vector::kCount) *
          Vector::load(input + (tap - first) * channels + v * Vector::kCount);
      Vector::store(Vector::load(to) + product, to);
    }
  }
}

template <int kBytes, int kVectors>
TORCH_ODT_INLINE void add_row(
    const float* gradient, const float* input, const WindowAxis& axis, int64_t channels, float* grad_taps) {
  int64_t column = 0;
  const auto add_borders = [&](int64_t until) __attribute__((always_inline)) {
    for (; column < until; ++column) {
      const int64_t first = axis.first(column);
      const float* const from = input + axis.position(column, first) * channels;
      add_pixel<kBytes, kVectors>(gradient + column * channels, from, channels, first, axis.last(column), grad_taps);
    }
  };
  const int64_t inside = OfOutput::begin(axis);
  const int64_t count = OfOutput::end(axis) - inside;
  if (count > 0 && (axis.kernel == 3 || axis.kernel == 5 || axis.kernel == 7)) {
    add_borders(inside);
    const float* const of_pixels = gradient + column * channels;
    const float* const from = input + axis.position(column, 0) * channels;
    if (axis.kernel == 3) {
      add_products<kBytes, kVectors, 3>(of_pixels, from, channels, axis.stride, count, grad_taps);
    } else if (axis.kernel == 5) {
      add_products<kBytes, kVectors, 5>(of_pixels, from, channels, axis.stride, count, grad_taps);
    } else {
      add_products<kBytes, kVectors, 7>(of_pixels, from, channels, axis.stride, count, grad_taps);
    }
    column += count;
  }
  add_borders(axis.output);
}

template <int kBytes, int kVectors>
TORCH_ODT_INLINE void grad_weight_of(
    const float* grad_output, const float* input, const Depthwise& conv, int64_t samples, float* grad_taps) {
  using Vector = FloatVector<kBytes>;
  const int64_t channels = conv.channels;
  for (int64_t tap = 0; tap < conv.taps(); ++tap) {
    for (int v = 0; v < kVectors; ++v) {
      Vector::store(typename Vector::Type{}, grad_taps + tap * channels + v * Vector::kCount);
    }
  }
  const WindowAxis& rows = conv.rows;
  for (int64_t sample = 0; sample < samples; ++sample) {
    for (int64_t row = 0; row < rows.output; ++row) {
      const float* const gradient = grad_output + (sample * rows.output + row) * conv.columns.output * channels;
      for (int64_t y = rows.first(row); y < rows.last(row); ++y) {
        const int64_t line = sample * rows.input + rows.position(row, y);
        add_row<kBytes, kVectors>(
            gradient,
            input + line * conv.columns.input * channels,
            conv.columns,
            channels,
            grad_taps + y * conv.columns.kernel * channels);
      }
    }
  }
}

template <int kBytes>
struct GradWeight {
  TORCH_ODT_INLINE static void run(
      const float* grad_output,
      const float* input,
      const Depthwise* conv,
      int64_t samples,
      int64_t begin,
      int64_t end,
      float* grad_taps) {
    if constexpr (kBytes > 4) {
      if (are_too_wide<kBytes>(end - begin)) {
        GradWeight<kNarrower<kBytes>>::run(grad_output, input, conv, samples, begin, end, grad_taps);
        return;
      }
    }
    constexpr int64_t kCount = FloatVector<kBytes>::kCount;
    int64_t channel = begin;
    for (; channel + 2 * kCount <= end; channel += 2 * kCount) {
      grad_weight_of<kBytes, 2>(grad_output + channel, input + channel, *conv, samples, grad_taps + channel);
    }
    for (; channel < end; channel += kCount) {
      const int64_t first = std::min(channel, end - kCount);
      grad_weight_of<kBytes, 1>(grad_output + first, input + first, *conv, samples, grad_taps + first);
    }
  }
};

} // namespace

void depthwise_rows(
    const float* input,
    const float* taps,
    const float* bias,
    const Depthwise& conv,
    int64_t begin,
    int64_t end,
    float* output) {
  run_with_vectors<Forward>(input, taps, bias, &conv, begin, end, output);
}

void depthwise_grad_input_rows(
    const float* grad_output, const float* taps, const Depthwise& conv, int64_t begin, int64_t end, float* grad_input) {
  run_with_vectors<GradInput>(grad_output, taps, &conv, begin, end, grad_input);
}

void depthwise_grad_weight_channels(
    const float* grad_output,
    const float* input,
    const Depthwise& conv,
    int64_t samples,
    int64_t begin,
    int64_t end,
    float* grad_taps) {
  run_with_vectors<GradWeight>(grad_output, input, &conv, samples, begin, end, grad_taps);
}

} // namespace torch_odt::kernels
