#include "left.h"

#include <algorithm>
#include <cstring>

namespace torch_odt::kernels::int8 {

namespace {

// Pixels as they lie in memory, one for each row.
Left pack_pixels(
    const Table& kernels, const Image& image, const Range& depth, const Outputs& outputs, int64_t row_bytes, char* to) {
  const int64_t rows = outputs.end - outputs.begin;
  const int8_t* const first = image.data + outputs.begin * image.channels + image.first_channel + depth.first;
  // What lies behind a row's own values is multiplied by zeros; but something has to lie there.
  const bool inside = (outputs.all - outputs.end - kSlackRows) * image.channels >= kernels.depth_multiple;
  if (kernels.value_bytes == 1 && kernels.left_offset == 0 && inside) {
    return {first, image.channels};
  }
  const bool whole = depth.count % kernels.depth_multiple == 0;
  if (depth.count == image.channels && whole) {
    kernels.pack_left_rows({first, image.end, 0, 1, rows * image.depth, to, 0});
    return {to, image.depth * kernels.value_bytes};
  }
  kernels.pack_left_rows({first, image.end, image.channels, rows, depth.count, to, row_bytes});
  return {to, row_bytes};
}

} // namespace

Left gather_left(
    const Table& kernels,
    const Image& image,
    const Taps& rows,
    const Taps& columns,
    const Range& depth,
    const Outputs& outputs,
    int64_t row_bytes,
    char* to) {
  if (depth.count == 0) {
    return {to, row_bytes};
  }
  if (is_pointwise(rows, columns)) {
    return pack_pixels(kernels, image, depth, outputs, row_bytes, to);
  }
  const auto copy = [&](int64_t row, int64_t count, const int8_t* from, int64_t stride, int64_t values, int64_t at) {
    char* const place = to + row * row_bytes + at * kernels.value_bytes;
    kernels.pack_left_rows({from, image.end, stride, count, values, place, row_bytes});
  };
  const auto fill = [&](int64_t row, int64_t values, int64_t at) {
    char* const place = to + row * row_bytes;
    if (kernels.value_bytes == 2) {
      std::fill_n(reinterpret_cast<int16_t*>(place) + at, values, int16_t{image.padding});
    } else {
      std::memset(place + at, image.padding + kernels.left_offset, static_cast<size_t>(values));
    }
  };
  gather(image, rows, columns, depth, copy, fill, outputs.begin, outputs.end);
  return {to, row_bytes};
}

} // namespace torch_odt::kernels::int8
