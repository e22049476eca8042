#include "int8_samples.h"

namespace torch_odt::tests {

namespace {

std::vector<int8_t> numbers(int64_t count, Values values, uint32_t state) {
  std::vector<int8_t> result(static_cast<size_t>(count));
  for (int8_t& number : result) {
    state = state * 1664525U + 1013904223U;
    switch (values) {
      case Values::random:
        number = static_cast<int8_t>(state >> 24);
        break;
      case Values::lowest:
        number = -128;
        break;
      case Values::highest:
        number = 127;
        break;
      case Values::mixed_extremes:
        number = state >> 31 != 0 ? 127 : -128;
    }
  }
  return result;
}

} // namespace

Int8Sample::Int8Sample(const Conv2d& of, int32_t input_zero_point, Values values)
    : conv(of),
      zero_point(input_zero_point),
      input(numbers(of.in_pixels() * of.in_channels, values, 1)),
      weight(numbers(of.out_channels * of.taps() * of.in_depth(), values, 2)),
      grad_output(numbers(of.out_pixels() * of.out_channels, values, 3)) {}

template <typename Function>
void Int8Sample::for_each_product(const Function& function) const {
  for (int64_t pixel = 0; pixel < conv.out_pixels(); ++pixel) {
    const int64_t column = pixel % conv.columns.output;
    const int64_t row = pixel / conv.columns.output % conv.rows.output;
    const int64_t sample = pixel / conv.columns.output / conv.rows.output;
    for (int64_t out = 0; out < conv.out_channels; ++out) {
      for (int64_t tap = 0; tap < conv.taps(); ++tap) {
        const int64_t y = conv.rows.position(row, tap / conv.columns.kernel);
        const int64_t x = conv.columns.position(column, tap % conv.columns.kernel);
        const bool inside = y >= 0 && y < conv.rows.input && x >= 0 && x < conv.columns.input;
        const int64_t place = (sample * conv.rows.input + y) * conv.columns.input + x;
        for (int64_t channel = 0; channel < conv.in_depth(); ++channel) {
          const int64_t in = out / conv.out_depth() * conv.in_depth() + channel;
          function(
              inside ? place * conv.in_channels + in : -1,
              (out * conv.taps() + tap) * conv.in_depth() + channel,
              pixel * conv.out_channels + out);
        }
      }
    }
  }
}

std::vector<int64_t> Int8Sample::forward() const {
  std::vector<int64_t> result(grad_output.size());
  for_each_product([&](int64_t in, int64_t with, int64_t out) {
    if (in >= 0) {
      result[static_cast<size_t>(out)] +=
          int64_t{input[static_cast<size_t>(in)] - zero_point} * weight[static_cast<size_t>(with)];
    }
  });
  return result;
}

std::vector<int64_t> Int8Sample::grad_input() const {
  std::vector<int64_t> result(input.size());
  for_each_product([&](int64_t in, int64_t with, int64_t out) {
    if (in >= 0) {
      result[static_cast<size_t>(in)] +=
          int64_t{grad_output[static_cast<size_t>(out)]} * weight[static_cast<size_t>(with)];
    }
  });
  return result;
}

std::vector<int64_t> Int8Sample::grad_weight() const {
  std::vector<int64_t> result(weight.size());
  for_each_product([&](int64_t in, int64_t with, int64_t out) {
    if (in >= 0) {
      result[static_cast<size_t>(with)] +=
          int64_t{input[static_cast<size_t>(in)] - zero_point} * grad_output[static_cast<size_t>(out)];
    }
  });
  return result;
}

std::vector<int64_t> Int8Sample::grad_bias() const {
  std::vector<int64_t> result(static_cast<size_t>(conv.out_channels));
  for (size_t i = 0; i < grad_output.size(); ++i) {
    result[i % result.size()] += grad_output[i];
  }
  return result;
}

std::vector<Conv2d> int8_convolutions() {
  return {
      // Linear, with depths and widths around tiles.
      {1, axis(1, 1), axis(1, 1), 1, 1, 1},
      {8, axis(1, 1), axis(1, 1), 67, 33, 1},
      {33, axis(1, 1), axis(1, 1), 64, 130, 1},
      {0, axis(1, 1), axis(1, 1), 5, 3, 1},
      {3, axis(1, 1), axis(1, 1), 0, 5, 1},
      {1, axis(6, 3, 2, 1), axis(6, 3, 2, 1), 3, 0, 1},
      // Pointwise, enough pixels for several blocks.
      {2, axis(9, 1), axis(11, 1), 24, 40, 1},
      {1, axis(17, 1), axis(16, 1), 64, 17, 1},
      {2, axis(7, 1, 2), axis(7, 1, 2), 16, 20, 1},
      // Other kernels, with strides, padding and dilation.
      {1, axis(9, 3, 1, 1), axis(8, 3, 1, 1), 16, 35, 1},
      {2, axis(11, 3, 2, 1), axis(10, 3, 2, 1), 3, 18, 1},
      {1, axis(13, 7, 2, 3), axis(15, 7, 2, 3), 3, 9, 1},
      {1, axis(12, 3, 1, 2, 2), axis(12, 3, 1, 2, 2), 5, 6, 1},
      {1, axis(14, 3, 2, 3, 3), axis(13, 2, 3, 1, 2), 4, 5, 1},
      {1, axis(9, 1, 1, 1), axis(6, 5, 1, 2), 7, 4, 1},
      {1, axis(5, 2, 3), axis(6, 2, 4), 2, 3, 1},
      // Whole steps of channels: rows of the product may overlap in a padded copy, across lines, in lines longer than a
      // block, with taps spread over rows, padding wider than the kernel, and in phases of gradients.
      {2, axis(9, 3, 1, 1), axis(13, 3, 1, 1), 64, 3, 1},
      {2, axis(9, 3, 1, 1), axis(13, 3, 1, 1), 20, 64, 1},
      {1, axis(4, 3, 1, 2, 2), axis(110, 3, 1, 1), 64, 2, 1},
      {3, axis(4, 2, 1, 0), axis(9, 2, 1, 3), 128, 3, 1},
      {1, axis(6, 3, 2, 1), axis(18, 3, 2, 1), 20, 64, 1},
      // Few channels in: gradients whose rows are patches, of whole strides, that reach over the image's edges.
      {2, axis(15, 3, 2, 1), axis(17, 3, 2, 1), 3, 32, 1},
      {2, axis(14, 3, 2, 0), axis(13, 3, 2, 0), 3, 5, 1},
      {1, axis(23, 7, 2, 3), axis(230, 7, 2, 3), 3, 16, 1},
      {1, axis(19, 11, 4, 2), axis(22, 11, 4, 2), 3, 8, 1},
      {2, axis(10, 3, 3, 1), axis(11, 5, 3, 3), 2, 7, 1},
      {1, axis(10, 2, 3, 1), axis(12, 1, 2, 0), 3, 9, 1},
      {3, axis(9, 5, 1, 2), axis(10, 5, 1, 0), 1, 20, 1},
      {1, axis(12, 3, 1, 1), axis(13, 3, 1, 1), 3, 64, 1},
      {1, axis(9, 3, 2, 1), axis(8, 3, 1, 1), 8, 24, 1},
      {2, axis(6, 4, 2, 1), axis(7, 4, 2, 1), 16, 24, 1},
      {1, axis(17, 3, 2, 2, 2), axis(16, 3, 2, 1, 3), 3, 6, 1},
      {0, axis(9, 3, 2, 1), axis(9, 3, 2, 1), 3, 32, 1},
      // Groups.
      {2, axis(9, 3, 2, 1), axis(11, 3, 2, 1), 6, 32, 2},
      {2, axis(6, 3, 1, 1), axis(7, 3, 1, 1), 32, 32, 2},
      {1, axis(8, 3, 2, 1), axis(8, 3, 2, 1), 12, 18, 3},
      {1, axis(5, 1), axis(5, 1), 8, 20, 4},
      {1, axis(7, 3, 1, 1), axis(6, 3, 1, 1), 4, 8, 4},
      // Depthwise.
      {2, axis(7, 3, 1, 1), axis(9, 3, 1, 1), 40, 40, 40},
      {1, axis(9, 3, 2, 1), axis(8, 3, 2, 1), 19, 19, 19},
      {1, axis(9, 5, 2, 2), axis(11, 5, 1, 2), 96, 96, 96},
      {1, axis(9, 3, 1, 2, 2), axis(9, 3, 1, 2, 2), 16, 16, 16},
      {1, axis(4, 4, 1, 1), axis(3, 2, 3, 1), 3, 3, 3},
      {1, axis(2, 3, 1, 1), axis(1, 3, 1, 1), 70, 70, 70},
      // ... with more rows, columns and channels than are summed at a time.
      {2, axis(21, 3, 1, 1), axis(4, 3, 1, 1), 209, 209, 209},
      {1, axis(19, 3, 2, 1), axis(230, 3, 2, 1), 130, 130, 130},
      {1, axis(12, 7, 1, 3), axis(90, 7, 1, 3), 150, 150, 150},
      // ... three by three, with every padding, even and odd sizes, and whole and broken vectors of channels.
      {2, axis(14, 3, 2, 1), axis(14, 3, 2, 1), 64, 64, 64},
      {2, axis(8, 3, 2, 0), axis(10, 3, 2, 2), 144, 144, 144},
      {1, axis(11, 3, 2, 2), axis(7, 3, 2, 0), 112, 112, 112},
      {1, axis(9, 3, 1, 0), axis(6, 3, 1, 2), 112, 112, 112},
      {3, axis(5, 3, 1, 2), axis(5, 3, 1, 1), 32, 32, 32},
      {1, axis(6, 3, 2, 1), axis(9, 3, 1, 1), 65, 65, 65},
      {1, axis(3, 3, 2, 0), axis(3, 3, 2, 0), 16, 16, 16},
      {1, axis(1, 3, 2, 1), axis(2, 3, 2, 1), 40, 40, 40},
      {1, axis(1, 3, 2, 5), axis(4, 3, 2, 5), 24, 24, 24},
      {1, axis(6, 3, 2, 1), axis(50, 3, 2, 1), 209, 209, 209},
      // ... of one row, two and four; and with phases that are read where they lie beside others that are packed.
      {1, axis(9, 1), axis(9, 3, 1, 1), 80, 80, 80},
      {1, axis(9, 2), axis(9, 3, 1, 1), 80, 80, 80},
      {1, axis(9, 4), axis(9, 3, 1, 1), 80, 80, 80},
      {1, axis(11, 5, 2, 2), axis(12, 5, 2, 2), 80, 80, 80},
      {1, axis(11, 7, 2, 3), axis(12, 7, 2, 3), 80, 80, 80},
      // Many pixels, which threads share: of one tap and of several, and more than are packed at a time.
      {1, axis(45, 1), axis(70, 1), 3, 5, 1},
      {1, axis(74, 3, 1, 1), axis(73, 3, 1, 1), 1, 2, 1},
      // Few pixels, whose weights are packed on the way, more than once.
      {8, axis(1, 1), axis(1, 1), 209, 40, 1},
      {1, axis(2, 3, 2, 1), axis(2, 3, 2, 1), 400, 24, 1},
  };
}

std::string text_of(const Conv2d& conv) {
  const auto text = [](const WindowAxis& of) {
    return text_of(of.input) + " by " + text_of(of.kernel) + " stride " + text_of(of.stride) + " padding " +
        text_of(of.padding) + " dilation " + text_of(of.dilation);
  };
  return "batch " + text_of(conv.batch) + ", rows " + text(conv.rows) + ", columns " + text(conv.columns) + ", channels " +
      text_of(conv.in_channels) + " to " + text_of(conv.out_channels) + " in " + text_of(conv.groups);
}

float run_pass(const Int8Sample& sample, kernels::int8::Pass pass, const kernels::int8::Finish& how, int64_t threads) {
  using namespace kernels::int8;
  std::vector<char> packed(static_cast<size_t>(packed_bytes(sample.conv, pass)));
  std::vector<char> workspace(static_cast<size_t>(workspace_bytes(sample.conv, pass) * threads));
  const Threads all{threads};
  pack_weight(sample.conv, pass, sample.weight.data(), all, packed.data());
  if (pass == Pass::forward) {
    return forward(
        sample.conv, sample.input.data(), sample.zero_point, packed.data(), nullptr, how, all, workspace.data());
  }
  return grad_input(sample.conv, sample.grad_output.data(), packed.data(), how, all, workspace.data());
}

std::vector<int32_t> sums_by_members(const Int8Sample& sample, kernels::int8::Pass pass, int64_t threads) {
  using namespace kernels::int8;
  std::vector<char> packed(static_cast<size_t>(packed_bytes(sample.conv, pass)));
  pack_weight(sample.conv, pass, sample.weight.data(), Threads{}, packed.data());
  std::vector<char> workspace(static_cast<size_t>(workspace_bytes(sample.conv, pass) * threads));
  const bool is_forward = pass == Pass::forward;
  std::vector<int32_t> sums((is_forward ? sample.grad_output : sample.input).size(), 77);
  Finish how;
  how.output = sums.data();
  // Whatever order they run in.
  for (int64_t member = threads - 1; member >= 0; --member) {
    const Threads own{threads, nullptr, member};
    if (is_forward) {
      forward(sample.conv, sample.input.data(), sample.zero_point, packed.data(), nullptr, how, own, workspace.data());
    } else {
      grad_input(sample.conv, sample.grad_output.data(), packed.data(), how, own, workspace.data());
    }
  }
  return sums;
}

std::vector<int32_t> grad_weight_sums_by_members(
    const Int8Sample& sample, int64_t threads, std::vector<int64_t>& grad_bias) {
  using namespace kernels::int8;
  std::vector<int32_t> sums(sample.weight.size(), 77);
  grad_bias.assign(static_cast<size_t>(sample.conv.out_channels), 77);
  const Threads all{threads};
  std::vector<char> workspace(static_cast<size_t>(grad_weight_workspace_bytes(sample.conv, all) * threads), char{17});
  Finish how;
  how.output = sums.data();
  how.channels_are_rows = true;
  for (int64_t member = threads - 1; member >= 0; --member) {
    grad_weight(
        sample.conv,
        sample.grad_output.data(),
        sample.input.data(),
        sample.zero_point,
        grad_bias.data(),
        how,
        Threads{threads, nullptr, member},
        workspace.data());
  }
  return sums;
}

float run_packing(
    const Int8Sample& sample, kernels::int8::Pass pass, const kernels::int8::Finish& how, int64_t threads) {
  using namespace kernels::int8;
  std::vector<char> workspace(static_cast<size_t>(packing_workspace_bytes(sample.conv, pass) * threads));
  const int8_t* const weight = sample.weight.data();
  const Threads all{threads};
  return pass == Pass::forward
      ? forward_packing(
            sample.conv, sample.input.data(), sample.zero_point, weight, nullptr, how, all, workspace.data())
      : grad_input_packing(sample.conv, sample.grad_output.data(), weight, how, all, workspace.data());
}

float run_grad_weight(
    const Int8Sample& sample, const kernels::int8::Finish& how, int64_t threads, std::vector<int64_t>& grad_bias) {
  using namespace kernels::int8;
  grad_bias.assign(static_cast<size_t>(sample.conv.out_channels), 77);
  const Threads all{threads};
  std::vector<char> workspace(static_cast<size_t>(grad_weight_workspace_bytes(sample.conv, all) * threads), char{17});
  return grad_weight(
      sample.conv,
      sample.grad_output.data(),
      sample.input.data(),
      sample.zero_point,
      grad_bias.data(),
      how,
      all,
      workspace.data());
}

std::vector<int32_t> sums_of(const Int8Sample& sample, kernels::int8::Pass pass, int64_t threads) {
  const bool forward = pass == kernels::int8::Pass::forward;
  std::vector<int32_t> result(forward ? sample.grad_output.size() : sample.input.size(), 77);
  kernels::int8::Finish how;
  how.output = result.data();
  run_pass(sample, pass, how, threads);
  return result;
}

std::vector<int32_t> packing_sums_of(const Int8Sample& sample, kernels::int8::Pass pass, int64_t threads) {
  const bool forward = pass == kernels::int8::Pass::forward;
  std::vector<int32_t> result(forward ? sample.grad_output.size() : sample.input.size(), 77);
  kernels::int8::Finish how;
  how.output = result.data();
  run_packing(sample, pass, how, threads);
  return result;
}

std::vector<int32_t> grad_weight_sums_of(const Int8Sample& sample, int64_t threads, std::vector<int64_t>& grad_bias) {
  std::vector<int32_t> result(sample.weight.size(), 77);
  kernels::int8::Finish how;
  how.output = result.data();
  how.channels_are_rows = true;
  run_grad_weight(sample, how, threads, grad_bias);
  return result;
}

} // namespace torch_odt::tests
