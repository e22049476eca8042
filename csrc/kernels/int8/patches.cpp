#include "patches.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "correlation.h"
#include "finish_pixels.h"
#include "lanes.h"
#include "left.h"

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kMostRows = Correlation::kMostRows;
constexpr int64_t kMostColumns = 64; // of a patch
constexpr int64_t kMostStrides = 4; // along a side of it
constexpr int64_t kLineColumns = 64; // of a line of pixels, finished as a row
// What vectors read and write behind the end of a run.
constexpr int64_t kSlackSums = 16;

int64_t floor_divided(int64_t count, int64_t by) {
  return count >= 0 ? count / by : -((by - 1 - count) / by);
}

// Patches along an axis, of some whole strides each. Their taps are those that any of their pixels sees.
struct PatchAxis {
  WindowAxis axis;
  int64_t pixels;

  Taps taps() const {
    const int64_t start = -floor_divided((axis.kernel - 1) * axis.dilation - axis.padding, axis.stride);
    const int64_t count = floor_divided(pixels - 1 + axis.padding, axis.stride) - start + 1;
    return {axis.output, start, pixels / axis.stride, 1, count, divided(axis.input, pixels), 0, pixels, 0, 0};
  }

  // The element of the kernel through which a pixel of a patch sees a tap, if any.
  std::optional<int64_t> element(int64_t pixel, int64_t tap) const {
    const int64_t distance = pixel + axis.padding - (taps().start + tap) * axis.stride;
    const bool sees = distance >= 0 && distance % axis.dilation == 0 && distance / axis.dilation < axis.kernel;
    return sees ? std::optional(distance / axis.dilation) : std::nullopt;
  }
};

struct Patch {
  PatchAxis rows;
  PatchAxis columns;
  int64_t channels;
  int64_t depth; // of a tap

  Patch(const Conv2d& conv, int64_t pixel_rows, int64_t pixel_columns)
      : rows{conv.rows, pixel_rows},
        columns{conv.columns, pixel_columns},
        channels(conv.in_channels),
        depth(conv.out_channels) {}

  // Columns of one row of its pixels.
  int64_t width() const {
    return columns.pixels * channels;
  }
  Correlation correlation() const {
    return {rows.taps(), columns.taps(), depth, rows.pixels * width()};
  }
};

// What a row of a product costs, in steps of a panel: its own, filled up, and what gathering and finishing it takes.
struct Cost {
  int64_t steps = 0;
  int64_t all = 0;

  Cost& operator+=(const Correlation& part) {
    constexpr int64_t kRowSteps = 16;
    steps += part.steps() * part.panels();
    all += part.steps() * part.panels() + kRowSteps;
    return *this;
  }
};

// For as many pixels as there are phases.
Cost cost_of_phases(const Conv2d& conv) {
  Cost cost;
  for (int64_t phase = 0; phase < phases_of(conv, Pass::grad_input); ++phase) {
    cost += correlation_of(conv, Pass::grad_input, phase);
  }
  return cost;
}

// The patch that makes the least work for each pixel, if there is any that makes less than phases do. Without a stride
// these gather and finish pixels in the same way: only where patches save steps as well are they worth what they waste
// on small images. Weights are packed without knowing an image, and this goes by them alone.
std::optional<Patch> patch_of(const Conv2d& conv) {
  const int64_t channels = conv.in_channels;
  const int64_t phases = phases_of(conv, Pass::grad_input);
  if (conv.groups != 1 || channels == 0 || channels > kMostPixelChannels || phases * channels > kMostColumns) {
    return std::nullopt;
  }
  std::optional<Patch> best;
  const Cost pixelwise = cost_of_phases(conv);
  Cost least = pixelwise;
  int64_t least_pixels = phases;
  for (int64_t i = 0; i < kMostStrides * kMostStrides; ++i) {
    const int64_t rows = (1 + i / kMostStrides) * conv.rows.stride;
    const int64_t columns = (1 + i % kMostStrides) * conv.columns.stride;
    if (rows * columns * channels > kMostColumns) {
      continue;
    }
    const Patch patch(conv, rows, columns);
    const Correlation part = patch.correlation();
    Cost cost;
    cost += part;
    const int64_t pixels = rows * columns;
    const bool saves = phases > 1 || cost.steps < pixelwise.steps * pixels;
    if (saves && part.depth() <= std::min(part.chunk(), kMostDepth) && cost.all * least_pixels < least.all * pixels) {
      best.emplace(patch);
      least = cost;
      least_pixels = pixels;
    }
  }
  return best;
}

// A thread's own memory.
struct Workspace {
  Pieces pieces;
  int32_t* sums;
  int32_t* lines; // the same, each row of pixels by itself
  char* left;

  Workspace(const Correlation& part, void* at) : pieces(at) {
    sums = pieces.take<int32_t>((kMostRows + kTileRows) * part.panels() * kPanelColumns);
    lines = pieces.take<int32_t>(kMostRows * part.target_depth + kSlackSums);
    left = pieces.take<char>(part.left_bytes(kMostRows));
  }
};

// Runs of a product's columns, to which their terms are added: run i of each row goes to line i, behind that of the row
// before.
struct Lines {
  const int32_t* sums;
  int64_t stride;
  int64_t rows;
  const int32_t* terms;
  int64_t count; // of lines
  int64_t width; // of a run
  int32_t* to;
};

template <int kBytes>
struct SortLines {
  TORCH_ODT_INLINE static void run(const Lines* of) {
    using L = Lanes<kBytes>;
    using Bits = typename L::Bits;
    // What a run writes behind its end is overwritten by the next one; that behind the line, by the next line.
    for (int64_t line = 0; line < of->count; ++line) {
      int32_t* to = of->to + line * of->rows * of->width;
      const int32_t* const terms = of->terms + line * of->width;
      const int32_t* from = of->sums + line * of->width;
      for (int64_t row = 0; row < of->rows; ++row, from += of->stride, to += of->width) {
        for (int64_t i = 0; i < of->width; i += L::kCount) {
          const Bits sum = L::template load<Bits>(from + i) + L::template load<Bits>(terms + i);
          __builtin_memcpy(to + i, &sum, sizeof(sum));
        }
      }
    }
  }
};

class Task {
 public:
  Task(const Conv2d& conv, const Patch& patch, const int8_t* grad_output, const void* packed, const Finish& how)
      : conv_(conv),
        patch_(patch),
        part_(patch.correlation()),
        image_{
            grad_output,
            grad_output + conv.out_pixels() * conv.out_channels,
            conv.out_channels,
            0,
            conv.out_channels,
            0},
        packed_(static_cast<const char*>(packed)),
        how_(how),
        draws_(conv.in_channels) {
    const auto* const sums = reinterpret_cast<const int32_t*>(packed_ + part_.panels() * part_.panel_bytes());
    for (int64_t column = 0; column < part_.target_depth; ++column) {
      terms_[static_cast<size_t>(column)] = -part_.kernels().left_offset * sums[column];
    }
  }

  // Patches from `begin` up to but without `end` of a line of them.
  float operator()(int64_t line, int64_t begin, int64_t end, const Workspace& own) const {
    const int64_t rows = end - begin;
    const int64_t in_line = part_.columns.outputs;
    const Outputs outputs{line * in_line + begin, line * in_line + end, conv_.batch * part_.rows.outputs * in_line};
    const Left left = gather_left(
        part_.kernels(), image_, part_.rows, part_.columns, {0, part_.depth()}, outputs, part_.left_row_bytes(), own.left);
    const int64_t stride = part_.panels() * kPanelColumns;
    part_.kernels().multiply(
        {left.data,
         left.row_bytes,
         kStepBytes,
         rows,
         packed_,
         part_.panel_bytes(),
         part_.panels(),
         part_.steps(),
         own.sums,
         stride,
         false});
    const int64_t width = patch_.width();
    const Lines lines{own.sums, stride, rows, terms_.data(), patch_.rows.pixels, width, own.lines};
    run_with_vectors<SortLines>(&lines);
    const int64_t sample = line / part_.rows.outputs;
    const int64_t first_row = line % part_.rows.outputs * patch_.rows.pixels;
    const int64_t last_row = std::min(conv_.rows.input, first_row + patch_.rows.pixels);
    const int64_t first_column = begin * patch_.columns.pixels;
    const int64_t last_column = std::min(conv_.columns.input, end * patch_.columns.pixels);
    float largest = 0;
    for (int64_t row = first_row; row < last_row; ++row) {
      const int64_t pixel = (sample * conv_.rows.input + row) * conv_.columns.input + first_column;
      const int32_t* const sums = own.lines + (row - first_row) * rows * width;
      const int64_t count = (last_column - first_column) * conv_.in_channels;
      largest = std::max(largest, finish_line(sums, pixel * conv_.in_channels, count));
    }
    return largest;
  }

 private:
  // Pixels side by side. Where draws or multipliers are each pixel's own, it is one of the rows to be finished.
  float finish_line(const int32_t* sums, int64_t place, int64_t count) const {
    if (has_finish_pixels(how_) && place >> 32 == (place + count - 1) >> 32) {
      return finish_pixels(how_, draws_, sums, place, count);
    }
    const bool draws = how_.result == Result::int8 && how_.rounding == Rounding::stochastic;
    const bool by_pixels = how_.per_channel || draws;
    const int64_t width = by_pixels ? conv_.in_channels : kLineColumns;
    constexpr int64_t kRowsAtOnce = 512;
    std::array<int64_t, kRowsAtOnce> places;
    float largest = 0;
    for (int64_t first = 0; first < count;) {
      const int64_t columns = std::min(width, count - first);
      const int64_t rows = std::min(kRowsAtOnce, (count - first) / columns);
      for (int64_t row = 0; row < rows; ++row) {
        places[static_cast<size_t>(row)] = place + first + row * width;
      }
      const Block<int32_t> block{sums + first, width, rows, columns, places.data(), 0, 0, nullptr, nullptr};
      largest = std::max(largest, finish(how_, block));
      first += rows * columns;
    }
    return largest;
  }

  const Conv2d& conv_;
  const Patch& patch_;
  const Correlation part_;
  const Image image_;
  const char* packed_;
  const Finish& how_;
  const PixelDraws draws_;
  std::array<int32_t, kMostColumns + kSlackSums> terms_{};
};

} // namespace

bool goes_by_patches(const Conv2d& conv, Pass pass) {
  return pass == Pass::grad_input && patch_of(conv).has_value();
}

int64_t patches_packed_bytes(const Conv2d& conv) {
  return patch_of(conv)->correlation().group_bytes();
}

void patches_pack_weight(const Conv2d& conv, const int8_t* weight, void* packed) {
  const Patch patch = *patch_of(conv);
  const Correlation part = patch.correlation();
  constexpr int64_t kRowsAtOnce = 256; // a multiple of every table's depth_multiple
  std::array<int8_t, kRowsAtOnce * kMostColumns> values;
  std::array<const int8_t*, kRowsAtOnce> rows;
  for (int64_t i = 0; i < kRowsAtOnce; ++i) {
    rows[static_cast<size_t>(i)] = values.data() + i * kMostColumns;
  }
  auto* const panels = static_cast<char*>(packed);
  auto* const sums = reinterpret_cast<int32_t*>(panels + part.panels() * part.panel_bytes());
  std::fill_n(sums, part.panels() * kPanelColumns, 0);
  const int64_t channels = patch.channels;
  const int64_t out_stride = conv.taps() * channels;
  const Table& kernels = part.kernels();
  for (int64_t first = 0; first < part.depth(); first += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, part.depth() - first);
    values.fill(0);
    for (int64_t row = 0; row < patch.rows.pixels; ++row) {
      for (int64_t column = 0; column < patch.columns.pixels; ++column) {
        int8_t* const to = values.data() + row * patch.width() + column * channels;
        for (int64_t i = 0; i < count;) {
          const int64_t tap = (first + i) / patch.depth;
          const int64_t out = (first + i) % patch.depth;
          const int64_t last = std::min(count, i + patch.depth - out);
          const auto in_row = patch.rows.element(row, tap / part.columns.count);
          const auto in_column = patch.columns.element(column, tap % part.columns.count);
          if (in_row && in_column) {
            const int8_t* from = weight + out * out_stride + (*in_row * conv.columns.kernel + *in_column) * channels;
            for (int64_t j = i; j < last; ++j, from += out_stride) {
              std::copy_n(from, channels, to + j * kMostColumns);
            }
          }
          i = last;
        }
      }
    }
    const int64_t steps = kernels.steps(count);
    char* const to = panels + kernels.steps(first) * kPanelStepBytes;
    kernels.pack_right({rows.data(), steps, part.target_depth, to, part.panel_bytes(), kPanelStepBytes});
    for (int64_t panel = 0; kernels.add_column_sums != nullptr && panel < part.panels(); ++panel) {
      kernels.add_column_sums(to + panel * part.panel_bytes(), steps, sums + panel * kPanelColumns);
    }
  }
}

int64_t patches_workspace_bytes(const Conv2d& conv) {
  return Workspace(patch_of(conv)->correlation(), nullptr).pieces.bytes();
}

float patches_grad_input(
    const Conv2d& conv,
    const int8_t* grad_output,
    const void* packed,
    const Finish& how,
    const Threads& threads,
    void* workspace) {
  const Patch patch = *patch_of(conv);
  const Correlation part = patch.correlation();
  const Task task(conv, patch, grad_output, packed, how);
  const int64_t thread_bytes = Workspace(part, nullptr).pieces.bytes();
  const int64_t in_line = part.columns.outputs;
  const int64_t cuts = divided(in_line, part.block_rows());
  // Lines begin within a byte of a mask, which only one thread may write.
  const Threads one;
  const Threads& used = how.mask == nullptr ? threads : one;
  std::vector<float> largest(static_cast<size_t>(used.count), 0.0F);
  used.share(conv.batch * part.rows.outputs * cuts, [&](int64_t thread, int64_t begin, int64_t end) {
    const Multiplying multiplying(part.kernels());
    const Workspace own(part, static_cast<char*>(workspace) + thread * thread_bytes);
    float& most = largest[static_cast<size_t>(thread)];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t cut = item % cuts;
      most = std::max(most, task(item / cuts, in_line * cut / cuts, in_line * (cut + 1) / cuts, own));
    }
  });
  return *std::max_element(largest.begin(), largest.end());
}

} // namespace torch_odt::kernels::int8
