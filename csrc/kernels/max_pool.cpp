#include "max_pool.h"

#include <cstring>
#include <limits>
#include <type_traits>

namespace torch_odt::kernels {

namespace {

// Windows that are pooled side by side: what is known of them stays in the first-level cache.
constexpr int64_t kLanes = 128;

template <typename Storage>
using ValueOf = decltype(load(Storage{}));

// Below all values, or equal to the lowest.
template <typename Value>
constexpr Value kLowest = std::is_integral_v<Value> ? std::numeric_limits<Value>::lowest()
                                                    : -std::numeric_limits<Value>::infinity();

// Windows side by side, with offsets as wide as values, so that one vector mask selects among both.
template <typename Storage>
struct Lanes {
  using Value = ValueOf<Storage>;
  using Offset = std::conditional_t<
      std::is_same_v<Value, double>,
      uint64_t,
      std::conditional_t<std::is_same_v<Value, int8_t>, uint8_t, uint32_t>>;

  Value largest[kLanes];
  Offset offset[kLanes];

  // One more element of each of `count` windows; they lie `step` apart.
  template <int64_t kStep>
  TORCH_ODT_INLINE void compare(const Storage* element, int64_t first, int64_t last, int64_t step, Offset candidate) {
    const int64_t apart = kStep == 0 ? step : kStep;
    for (int64_t i = first; i < last; ++i) {
      const Value value = load(element[(i - first) * apart]);
      const bool is_taken = (value > largest[i]) | (value != value);
      largest[i] = is_taken ? value : largest[i];
      offset[i] = is_taken ? candidate : offset[i];
    }
  }

  TORCH_ODT_INLINE void write(int64_t count, Storage* values, uint8_t* offsets) const {
    for (int64_t i = 0; i < count; ++i) {
      store(largest[i], values[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      offsets[i] = static_cast<uint8_t>(offset[i]);
    }
  }
};

// Where a row of the output has its windows.
struct Row {
  int64_t plane;
  int64_t window;

  TORCH_ODT_INLINE Row(int64_t row, int64_t rows) : plane(row / rows), window(row % rows) {}
};

// Lanes are neighbouring windows of a plane.
template <int64_t kStep, typename Storage>
TORCH_ODT_INLINE void pool_plane_row(
    const Storage* plane, const Pool* pool, int64_t window_row, Storage* output, uint8_t* offsets) {
  const WindowAxis rows = pool->rows;
  const WindowAxis columns = pool->columns;
  Lanes<Storage> lanes;
  for (int64_t start = 0; start < columns.output; start += kLanes) {
    const int64_t count = std::min(kLanes, columns.output - start);
    for (int64_t i = 0; i < count; ++i) {
      lanes.largest[i] = kLowest<ValueOf<Storage>>;
      lanes.offset[i] = static_cast<typename Lanes<Storage>::Offset>(
          rows.first(window_row) * columns.kernel + columns.first(start + i));
    }
    for (int64_t y = rows.first(window_row); y < rows.last(window_row); ++y) {
      const Storage* const line = plane + rows.position(window_row, y) * columns.input;
      for (int64_t x = 0; x < columns.kernel; ++x) {
        const int64_t first = std::max(start, columns.first_window(x));
        const int64_t last = std::min(start + count, columns.last_window(x));
        if (first < last) {
          lanes.template compare<kStep>(
              line + columns.position(first, x),
              first - start,
              last - start,
              columns.stride,
              static_cast<typename Lanes<Storage>::Offset>(y * columns.kernel + x));
        }
      }
    }
    lanes.write(count, output + start, offsets + start);
  }
}

// Lanes are neighbouring channels of a window.
template <typename Storage>
TORCH_ODT_INLINE void pool_channels(
    const Storage* sample,
    const Pool* pool,
    int64_t window_row,
    int64_t window_column,
    Storage* output,
    uint8_t* offsets) {
  using Offset = typename Lanes<Storage>::Offset;
  const WindowAxis rows = pool->rows;
  const WindowAxis columns = pool->columns;
  const int64_t channels = pool->channels;
  Lanes<Storage> lanes;
  for (int64_t start = 0; start < channels; start += kLanes) {
    const int64_t count = std::min(kLanes, channels - start);
    const int64_t first = rows.first(window_row) * columns.kernel + columns.first(window_column);
    for (int64_t i = 0; i < count; ++i) {
      lanes.largest[i] = kLowest<ValueOf<Storage>>;
      lanes.offset[i] = static_cast<Offset>(first);
    }
    for (int64_t y = rows.first(window_row); y < rows.last(window_row); ++y) {
      for (int64_t x = columns.first(window_column); x < columns.last(window_column); ++x) {
        const int64_t pixel = rows.position(window_row, y) * columns.input + columns.position(window_column, x);
        lanes.template compare<1>(
            sample + pixel * channels + start, 0, count, 1, static_cast<Offset>(y * columns.kernel + x));
      }
    }
    lanes.write(count, output + start, offsets + start);
  }
}

template <typename Storage>
TORCH_ODT_INLINE void pool_rows(
    const Storage* input, const Pool* pool, int64_t begin, int64_t end, Storage* output, uint8_t* offsets) {
  const WindowAxis rows = pool->rows;
  const WindowAxis columns = pool->columns;
  const int64_t channels = pool->channels;
  for (int64_t index = begin; index < end; ++index) {
    const Row row(index, rows.output);
    const Storage* const plane = input + row.plane * rows.input * columns.input * channels;
    const int64_t written = index * columns.output * channels;
    if (channels > 1) {
      for (int64_t column = 0; column < columns.output; ++column) {
        const int64_t place = written + column * channels;
        pool_channels(plane, pool, row.window, column, output + place, offsets + place);
      }
    } else if (columns.stride == 1) {
      pool_plane_row<1>(plane, pool, row.window, output + written, offsets + written);
    } else if (columns.stride == 2) {
      pool_plane_row<2>(plane, pool, row.window, output + written, offsets + written);
    } else {
      pool_plane_row<0>(plane, pool, row.window, output + written, offsets + written);
    }
  }
}

template <typename Value>
TORCH_ODT_INLINE Value sum(Value one, Value other) {
  return static_cast<Value>(one + other);
}

// How far the elements of a window lie behind its first one.
struct WindowTable {
  int64_t distance[kMostWindowElements];

  explicit WindowTable(const Pool& pool) : distance{} {
    for (int64_t k = 0; k < pool.window_elements(); ++k) {
      const int64_t row = k / pool.columns.kernel * pool.rows.dilation;
      const int64_t column = k % pool.columns.kernel * pool.columns.dilation;
      distance[k] = (row * pool.columns.input + column) * pool.channels;
    }
  }
};

// The rows `begin` to `end` of one plane of the gradient.
template <bool kHasOneChannel, typename Storage>
TORCH_ODT_INLINE void scatter(
    const Storage* grad_output,
    const uint8_t* offsets,
    const Pool* pool,
    const WindowTable* table,
    int64_t begin,
    int64_t end,
    Storage* grad_input) {
  const WindowAxis rows = pool->rows;
  const WindowAxis columns = pool->columns;
  const int64_t channels = kHasOneChannel ? 1 : pool->channels;
  const auto elements = static_cast<uint64_t>((end - begin) * columns.input * channels);
  std::memset(grad_input, 0, elements * sizeof(Storage));
  for (int64_t y = rows.first_over(begin); y < rows.last_over(end - 1); ++y) {
    int64_t i = y * columns.output * channels;
    int64_t corner = ((rows.position(y, 0) - begin) * columns.input - columns.padding) * channels;
    for (int64_t x = 0; x < columns.output; ++x, corner += columns.stride * channels) {
      for (int64_t c = 0; c < channels; ++c, ++i) {
        // What belongs to other rows fails this test.
        const auto element = static_cast<uint64_t>(corner + c + table->distance[offsets[i]]);
        if (element < elements) {
          store(sum(load(grad_input[element]), load(grad_output[i])), grad_input[element]);
        }
      }
    }
  }
}

// The same of windows that do not overlap, with channels side by side: each element belongs to one window at most.
template <typename Storage>
TORCH_ODT_INLINE void gather(
    const Storage* grad_output,
    const uint8_t* offsets,
    const Pool* pool,
    int64_t begin,
    int64_t end,
    Storage* grad_input) {
  const WindowAxis rows = pool->rows;
  const WindowAxis columns = pool->columns;
  const int64_t channels = pool->channels;
  for (int64_t y = begin; y < end; ++y) {
    const int64_t window_row = (y + rows.padding) / rows.stride;
    const int64_t row = (y + rows.padding) % rows.stride;
    for (int64_t x = 0; x < columns.input; ++x) {
      Storage* const to = grad_input + ((y - begin) * columns.input + x) * channels;
      const int64_t window_column = (x + columns.padding) / columns.stride;
      const int64_t column = (x + columns.padding) % columns.stride;
      if (window_row >= rows.output || row >= rows.kernel || window_column >= columns.output || column >= columns.kernel) {
        std::memset(to, 0, static_cast<size_t>(channels) * sizeof(Storage));
        continue;
      }
      const int64_t place = (window_row * columns.output + window_column) * channels;
      const auto number = static_cast<uint8_t>(row * columns.kernel + column);
      for (int64_t c = 0; c < channels; ++c) {
        const ValueOf<Storage> value = sum(ValueOf<Storage>{}, load(grad_output[place + c]));
        store(offsets[place + c] == number ? value : ValueOf<Storage>{}, to[c]);
      }
    }
  }
}

TORCH_ODT_INLINE void gather_bits(
    const uint8_t* bits,
    const uint8_t* offsets,
    const Pool* pool,
    const WindowTable* table,
    int64_t begin,
    int64_t end,
    uint8_t* pooled) {
  const WindowAxis rows = pool->rows;
  const WindowAxis columns = pool->columns;
  const int64_t channels = pool->channels;
  uint32_t byte = 0;
  for (int64_t pixel = begin; pixel < end; ++pixel) {
    const Row row(pixel / columns.output, rows.output);
    const int64_t line = row.plane * rows.input + rows.position(row.window, 0);
    const int64_t corner = (line * columns.input + columns.position(pixel % columns.output, 0)) * channels;
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t i = pixel * channels + c;
      const int64_t element = corner + c + table->distance[offsets[i]];
      byte |= (bits[element / 8] >> (element % 8) & 1U) << (i % 8);
      if (i % 8 == 7) {
        pooled[i / 8] = static_cast<uint8_t>(byte);
        byte = 0;
      }
    }
  }
  if (end * channels % 8 != 0) {
    pooled[end * channels / 8] = static_cast<uint8_t>(byte);
  }
}

} // namespace

template <typename Storage>
void max_pool_rows(
    const Storage* input, const Pool& pool, int64_t begin, int64_t end, Storage* output, uint8_t* offsets) {
  run<pool_rows<Storage>>(input, &pool, begin, end, output, offsets);
}

template <typename Storage>
void max_pool_backward_rows(
    const Storage* grad_output,
    const uint8_t* offsets,
    const Pool& pool,
    int64_t begin,
    int64_t end,
    Storage* grad_input) {
  const WindowTable table(pool);
  const int64_t rows = pool.rows.input;
  const int64_t output_elements = pool.rows.output * pool.columns.output * pool.channels;
  while (begin < end) {
    const int64_t plane = begin / rows;
    const int64_t plane_end = std::min(end, (plane + 1) * rows);
    const Storage* const gradient = grad_output + plane * output_elements;
    const uint8_t* const offset = offsets + plane * output_elements;
    Storage* const target = grad_input + begin * pool.columns.input * pool.channels;
    if (pool.channels > 1 && pool.rows.dilation == 1 && pool.columns.dilation == 1 && !pool.windows_overlap()) {
      run<gather<Storage>>(gradient, offset, &pool, begin - plane * rows, plane_end - plane * rows, target);
    } else if (pool.channels == 1) {
      scatter<true>(gradient, offset, &pool, &table, begin - plane * rows, plane_end - plane * rows, target);
    } else {
      scatter<false>(gradient, offset, &pool, &table, begin - plane * rows, plane_end - plane * rows, target);
    }
    begin = plane_end;
  }
}

void pooled_bits(
    const uint8_t* bits, const uint8_t* offsets, const Pool& pool, int64_t begin, int64_t end, uint8_t* pooled) {
  const WindowTable table(pool);
  gather_bits(bits, offsets, &pool, &table, begin, end, pooled);
}

#define TORCH_ODT_INSTANTIATE(STORAGE)                                                                                \
  template void max_pool_rows(const STORAGE*, const Pool&, int64_t, int64_t, STORAGE*, uint8_t*);                     \
  template void max_pool_backward_rows(const STORAGE*, const uint8_t*, const Pool&, int64_t, int64_t, STORAGE*);
TORCH_ODT_INSTANTIATE(float)
TORCH_ODT_INSTANTIATE(double)
TORCH_ODT_INSTANTIATE(BFloat16)
TORCH_ODT_INSTANTIATE(int8_t)
#undef TORCH_ODT_INSTANTIATE

} // namespace torch_odt::kernels
