#include "padded.h"

#include <algorithm>
#include <cstring>

namespace torch_odt::kernels::int8 {

bool goes_padded(const Table& kernels, const Taps& rows, const Taps& columns, int64_t channels) {
  const bool several = rows.count > 1 && columns.count > 1;
  const bool overlap = rows.step == 1 && columns.step == 1 && columns.spacing == 1;
  const bool long_lines = columns.outputs >= 4 * (columns.count - 1);
  return kernels.left_in_segments && several && overlap && long_lines && channels % kernels.depth_multiple == 0;
}

Left copy_padded(
    const Table& kernels,
    const Image& image,
    const Taps& rows,
    const Taps& columns,
    int64_t sample,
    int64_t begin,
    int64_t end,
    char* to) {
  const Padded padded(rows, columns);
  const int64_t channels = image.channels;
  const int64_t width = padded.width();
  const int64_t last = end + padded.reach();
  const auto place = [&](int64_t pixel) { return to + (pixel - begin) * channels; };
  const auto fill = [&](int64_t from, int64_t until) {
    if (from < until) {
      std::memset(place(from), image.padding, static_cast<size_t>((until - from) * channels));
    }
  };
  for (int64_t line = begin / width; line * width < last; ++line) {
    const int64_t first_pixel = std::max(line * width, begin);
    const int64_t last_pixel = std::min((line + 1) * width, last);
    const int64_t row = rows.start + line;
    // Where in the line the image's own pixels lie.
    const bool outside = row < 0 || row >= rows.source;
    const int64_t image_begin = line * width - columns.start;
    const int64_t from = outside ? last_pixel : std::clamp(image_begin, first_pixel, last_pixel);
    const int64_t until = std::clamp(image_begin + columns.source, from, last_pixel);
    fill(first_pixel, from);
    if (from < until) {
      const int64_t pixel = (sample * rows.source + row) * columns.source + from - image_begin;
      kernels.pack_left_rows(
          {image.data + pixel * channels, image.end, 0, 1, (until - from) * channels, place(from), 0});
    }
    fill(until, last_pixel);
  }
  return {to, channels, columns.count * channels / kernels.step_values(), rows.spacing * width * channels};
}

} // namespace torch_odt::kernels::int8
