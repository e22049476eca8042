// AMX: tiles of 16 rows of 64 bytes, signed by signed.
#if defined(__x86_64__) && defined(__GNUC__)

#include "avx512.h"
#include "intrinsics_x86.h"
#include "short_rows.h"
#include "table.h"

#define TORCH_ODT_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8")]]

namespace torch_odt::kernels::int8 {

namespace {

constexpr int64_t kTileSteps = 16;
constexpr int64_t kTileRowBytes = kTileSteps * kStepBytes;

struct TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

TORCH_ODT_TARGET void pack_left_rows(const LeftRows& of) {
  copy_rows_avx512(rows_from(of, copy_short_rows(of, 0)), 0);
}

TORCH_ODT_TARGET void pack_right(const Interleaving& of) {
  interleave_bytes_avx512<false>(of);
}

// 16 rows of 16 words, turned.
TORCH_ODT_TARGET void transpose_words(const __m512i* from, char* to, int64_t to_row_bytes) {
  __m512i pairs[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    pairs[2 * i] = _mm512_unpacklo_epi32(from[2 * i], from[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_unpackhi_epi32(from[2 * i], from[2 * i + 1]);
  }
  __m512i fours[16];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    fours[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
    fours[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
    fours[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    fours[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
  }
  // fours[4 * i + j] holds, in lane l, column 4 * l + j of the rows 4 * i to 4 * i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i low01 = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xee);
    _mm512_storeu_si512(to + j * to_row_bytes, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_storeu_si512(to + (4 + j) * to_row_bytes, _mm512_shuffle_i32x4(low01, low23, 0xdd));
    _mm512_storeu_si512(to + (8 + j) * to_row_bytes, _mm512_shuffle_i32x4(high01, high23, 0x88));
    _mm512_storeu_si512(to + (12 + j) * to_row_bytes, _mm512_shuffle_i32x4(high01, high23, 0xdd));
  }
}

// As steps for 64 columns at a time, and those turned.
TORCH_ODT_TARGET void pack_left_columns(const Interleaving& of) {
  constexpr int64_t kBlocks = 4;
  for (int64_t step = 0; step < of.steps; step += kTileSteps) {
    for (int64_t column = 0; column < of.columns; column += kBlocks * kPanelColumns) {
      __m512i words[kBlocks][kTileSteps];
      const int64_t columns = of.columns - column < kBlocks * kPanelColumns ? of.columns - column : kBlocks * kPanelColumns;
      const int8_t* rows[4 * kTileSteps];
      for (int64_t i = 0; i < 4 * kTileSteps; ++i) {
        rows[i] = of.rows[4 * step + i] + column;
      }
      int32_t* const sums = of.sums == nullptr ? nullptr : of.sums + column;
      interleave_bytes_avx512<false>({rows, kTileSteps, columns, words, sizeof(words[0]), kPanelStepBytes, sums});
      for (int64_t block = 0; block * kPanelColumns < columns; ++block) {
        char* const to =
            static_cast<char*>(of.to) + (column + block * kPanelColumns) * of.block_bytes + step * kStepBytes;
        transpose_words(words[block], to, of.block_bytes);
      }
    }
  }
}

// Of the right operand, for one segment of the left one.
TORCH_ODT_TARGET int64_t segment_bytes(const Product& of) {
  return (of.left_segment_steps == 0 ? of.steps : of.left_segment_steps) * kPanelStepBytes;
}

// One tile of rows or two, by one panel or two. Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 panels.
template <bool kTwoRows, bool kTwoPanels>
TORCH_ODT_TARGET void multiply_tiles(const Product& of, const char* left, const char* right, int32_t* sums) {
  const int64_t sums_bytes = of.sums_stride * 4;
  int32_t* const lower = sums + kTileRows * of.sums_stride;
  if (of.accumulate) {
    _tile_loadd(0, sums, sums_bytes);
    if constexpr (kTwoPanels) {
      _tile_loadd(1, sums + kPanelColumns, sums_bytes);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(2, lower, sums_bytes);
    }
    if constexpr (kTwoRows && kTwoPanels) {
      _tile_loadd(3, lower + kPanelColumns, sums_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (const char* const end = right + of.steps * kPanelStepBytes; right < end; left += of.left_segment_bytes) {
    const char* from = left;
    for (const char* const segment_end = right + segment_bytes(of); right < segment_end; from += kTileRowBytes) {
      _tile_loadd(4, from, of.left_row_bytes);
      _tile_loadd(6, right, kPanelStepBytes);
      _tile_dpbssd(0, 4, 6);
      if constexpr (kTwoPanels) {
        _tile_loadd(7, right + of.panel_bytes, kPanelStepBytes);
        _tile_dpbssd(1, 4, 7);
      }
      if constexpr (kTwoRows) {
        _tile_loadd(5, from + kTileRows * of.left_row_bytes, of.left_row_bytes);
        _tile_dpbssd(2, 5, 6);
      }
      if constexpr (kTwoRows && kTwoPanels) {
        _tile_dpbssd(3, 5, 7);
      }
      right += kTileSteps * kPanelStepBytes;
    }
  }
  _tile_stored(0, sums, sums_bytes);
  if constexpr (kTwoPanels) {
    _tile_stored(1, sums + kPanelColumns, sums_bytes);
  }
  if constexpr (kTwoRows) {
    _tile_stored(2, lower, sums_bytes);
  }
  if constexpr (kTwoRows && kTwoPanels) {
    _tile_stored(3, lower + kPanelColumns, sums_bytes);
  }
}

// Configuring tiles takes as long as a small product.
TORCH_ODT_TARGET void begin() {
  static constexpr TileConfiguration kConfiguration;
  _tile_loadconfig(&kConfiguration);
}

// The system keeps the tiles of threads that have any.
TORCH_ODT_TARGET void end() {
  _tile_release();
}

TORCH_ODT_TARGET void multiply(const Product& of) {
  for (int64_t panel = 0; panel < of.panels; panel += 2) {
    const char* const right = static_cast<const char*>(of.right) + panel * of.panel_bytes;
    for (int64_t row = 0; row < of.rows; row += 2 * kTileRows) {
      const char* const left = static_cast<const char*>(of.left) + row * of.left_row_bytes;
      int32_t* const sums = of.sums + row * of.sums_stride + panel * kPanelColumns;
      const bool two_rows = row + kTileRows < of.rows;
      if (panel + 1 < of.panels) {
        two_rows ? multiply_tiles<true, true>(of, left, right, sums)
                 : multiply_tiles<false, true>(of, left, right, sums);
      } else {
        two_rows ? multiply_tiles<true, false>(of, left, right, sums)
                 : multiply_tiles<false, false>(of, left, right, sums);
      }
    }
  }
}

} // namespace

const Table& amx_table() {
  static constexpr Table result = {
      .name = "amx",
      .value_bytes = 1,
      .depth_multiple = 64,
      .left_offset = 0,
      .left_by_rows = true,
      .pack_left_rows = pack_left_rows,
      .pack_left_columns = pack_left_columns,
      .pack_right = pack_right,
      .multiply = multiply,
      .adds_columns = true,
      .left_in_segments = true,
      .sums_at_once = 4096,
      .begin = begin,
      .end = end,
  };
  return result;
}

} // namespace torch_odt::kernels::int8

#endif
