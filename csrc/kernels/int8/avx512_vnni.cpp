// AVX-512 with VNNI: vpdpbusd multiplies unsigned bytes, the left operand's, by signed ones.
#if defined(__x86_64__) && defined(__GNUC__)

#include "avx512.h"
#include "intrinsics_x86.h"
#include "short_rows.h"
#include "table.h"

#define TORCH_ODT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]]
#define TORCH_ODT_TARGET_INLINE \
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"), gnu::always_inline]] static inline

namespace torch_odt::kernels::int8 {

namespace {

constexpr int8_t kFlip = -128;

TORCH_ODT_TARGET void pack_left_rows(const LeftRows& of) {
  copy_rows_avx512(rows_from(of, copy_short_rows(of, kFlip)), kFlip);
}

TORCH_ODT_TARGET void pack_left_columns(const Interleaving& of) {
  interleave_bytes_avx512<true>(of);
}

TORCH_ODT_TARGET void pack_right(const Interleaving& of) {
  interleave_bytes_avx512<false>(of);
}

// What of the 32 registers is left after sums is for a step of the right operand and one value of the left.
template <int kRows, int kPanels>
TORCH_ODT_TARGET_INLINE void add_steps(
    const Product& of, const char* left, const char* right, __m512i (&tile)[kRows][kPanels]) {
  for (int64_t step = 0; step < of.steps; ++step) {
    __m512i columns[kPanels];
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) {
      columns[panel] = _mm512_loadu_si512(right + panel * of.panel_bytes);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      int32_t values;
      __builtin_memcpy(&values, left + row * of.left_row_bytes, sizeof(values));
      const __m512i everywhere = _mm512_set1_epi32(values);
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel) {
        tile[row][panel] = _mm512_dpbusd_epi32(tile[row][panel], everywhere, columns[panel]);
      }
    }
    left += of.left_step_bytes;
    right += kPanelStepBytes;
  }
}

template <int kRows, int kPanels>
TORCH_ODT_TARGET void multiply_tile(
    const Product& of, const char* left, const char* right, const int32_t* start, int32_t* sums) {
  __m512i tile[kRows][kPanels];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) {
      if (of.accumulate) {
        tile[row][panel] = _mm512_loadu_si512(sums + row * of.sums_stride + panel * kPanelColumns);
      } else if (start != nullptr) {
        tile[row][panel] = _mm512_loadu_si512(start + panel * kPanelColumns);
      } else {
        tile[row][panel] = _mm512_setzero_si512();
      }
    }
  }
  add_steps<kRows, kPanels>(of, left, right, tile);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) {
      _mm512_storeu_si512(sums + row * of.sums_stride + panel * kPanelColumns, tile[row][panel]);
    }
  }
}

template <int kRows, int kPanels>
void multiply_panels(const Product& of, int64_t panel) {
  const char* const right = static_cast<const char*>(of.right) + panel * of.panel_bytes;
  const int32_t* const start = of.start == nullptr ? nullptr : of.start + panel * kPanelColumns;
  for (int64_t row = 0; row < of.rows; row += kRows) {
    const char* const left = static_cast<const char*>(of.left) + row * of.left_row_bytes;
    multiply_tile<kRows, kPanels>(of, left, right, start, of.sums + row * of.sums_stride + panel * kPanelColumns);
  }
}

void multiply(const Product& of) {
  int64_t panel = 0;
  while (panel < of.panels) {
    switch (const int64_t left = of.panels - panel; left) {
      case 1:
        multiply_panels<14, 1>(of, panel);
        return;
      case 2:
        multiply_panels<12, 2>(of, panel);
        return;
      case 4:
        multiply_panels<6, 4>(of, panel);
        return;
      default:
        multiply_panels<8, 3>(of, panel);
        panel += 3;
    }
  }
}

// Some rows and panels of the product from `row` and `panel` on.
template <int kRows, int kPanels>
TORCH_ODT_TARGET_INLINE void tile_to_floats(
    const Product& of, const Floats& to, int64_t row, int64_t panel, __m512& largest) {
  __m512i tile[kRows][kPanels];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kPanels; ++j) {
      tile[i][j] = _mm512_setzero_si512();
    }
  }
  add_steps<kRows, kPanels>(
      of,
      static_cast<const char*>(of.left) + row * of.left_row_bytes,
      static_cast<const char*>(of.right) + panel * of.panel_bytes,
      tile);
  const int64_t column = panel * kPanelColumns;
  const int64_t left = to.columns - column - (kPanels - 1) * kPanelColumns; // of the last panel
  const auto last = static_cast<__mmask16>(left >= kPanelColumns ? 0xffff : (1U << left) - 1);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    if (row + i >= of.rows) {
      return;
    }
    float* const output = to.output + (row + i) * to.stride + column;
    const __m512i row_term = _mm512_set1_epi32(to.row_terms[row + i]);
    const __m512 multiplier =
        _mm512_set1_ps(to.row_multipliers == nullptr ? to.multiplier : to.row_multipliers[row + i]);
#pragma GCC unroll 3
    for (int j = 0; j < kPanels; ++j) {
      const __mmask16 inside = j + 1 == kPanels ? last : static_cast<__mmask16>(0xffff);
      const __m512i terms = _mm512_add_epi32(row_term, _mm512_loadu_si512(to.column_terms + column + j * kPanelColumns));
      const __m512 sums = _mm512_cvtepi32_ps(_mm512_add_epi32(tile[i][j], terms));
      const __m512 values = _mm512_maskz_mul_ps(inside, sums, multiplier);
      largest = _mm512_range_ps(largest, values, 0xb);
      _mm512_mask_storeu_ps(output + j * kPanelColumns, inside, values);
    }
  }
}

TORCH_ODT_TARGET float multiply_to_floats(const Product& of, const Floats& to) {
  constexpr int kRows = 8;
  __m512 largest = _mm512_setzero_ps();
  for (int64_t row = 0; row < of.rows; row += kRows) {
    int64_t panel = 0;
    for (; panel + 3 <= of.panels; panel += 3) {
      tile_to_floats<kRows, 3>(of, to, row, panel, largest);
    }
    for (; panel < of.panels; ++panel) {
      tile_to_floats<kRows, 1>(of, to, row, panel, largest);
    }
  }
  return _mm512_reduce_max_ps(_mm512_abs_ps(largest));
}

TORCH_ODT_TARGET void add_column_sums(const void* panel, int64_t steps, int32_t* sums) {
  const auto* const bytes = static_cast<const char*>(panel);
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i even = _mm512_loadu_si512(sums);
  __m512i odd = _mm512_setzero_si512();
  int64_t step = 0;
  for (; step + 2 <= steps; step += 2) {
    even = _mm512_dpbusd_epi32(even, ones, _mm512_loadu_si512(bytes + step * kPanelStepBytes));
    odd = _mm512_dpbusd_epi32(odd, ones, _mm512_loadu_si512(bytes + (step + 1) * kPanelStepBytes));
  }
  if (step < steps) {
    even = _mm512_dpbusd_epi32(even, ones, _mm512_loadu_si512(bytes + step * kPanelStepBytes));
  }
  _mm512_storeu_si512(sums, _mm512_add_epi32(even, odd));
}

} // namespace

const Table& avx512_vnni_table() {
  static constexpr Table result = {
      .name = "avx512_vnni",
      .value_bytes = 1,
      .depth_multiple = 4,
      .left_offset = 128,
      .left_by_rows = false,
      .pack_left_rows = pack_left_rows,
      .pack_left_columns = pack_left_columns,
      .pack_right = pack_right,
      .multiply = multiply,
      .add_column_sums = add_column_sums,
      .multiply_to_floats = multiply_to_floats,
      .adds_columns = true,
      .packs_by_lanes = true,
      .starts_sums = true,
  };
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
