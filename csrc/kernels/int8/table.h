// Products of int8 matrices, summed in int32: one table of kernels per instruction set, all with the same results.
#pragma once

#include <cstdint>

#include "../isa.h"

namespace torch_odt::kernels::int8 {

// Columns of a panel: the right operand is packed as [panel][step][column][4 bytes], a step being the values of the
// summed axis (the depth) that share four bytes of a column.
inline constexpr int64_t kPanelColumns = 16;
inline constexpr int64_t kStepBytes = 4;
inline constexpr int64_t kPanelStepBytes = kPanelColumns * kStepBytes;
// Kernels work on whole tiles, whose rows are so many at most, AMX's: behind those that are asked for, the left operand
// and the sums have as many more, whose contents do not matter.
inline constexpr int64_t kTileRows = 16;
// Two of AMX's tiles, which it multiplies together: the least rows of a block, and what a weight's gradient keeps behind
// its rows.
inline constexpr int64_t kSlackRows = 2 * kTileRows;
inline constexpr int64_t kSlackValues = 15;
// The most terms whose sum fits into int32, whatever they are: 2^31 over 128 * 255, a difference from a zero point, or
// what left_offset makes of a byte. Longer sums are cut into parts, which are added up in 64 bits.
inline constexpr int64_t kMostDepth = 65535;
// The most weights of a sum at all: those are added up by themselves as well, in int32.
inline constexpr int64_t kMostTerms = int64_t{1} << 24;

// sums[row][column] = the sum over all steps of left[row][step] * right[step][column], or that added to what is there.
// Arithmetic is modulo 2^32.
struct Product {
  const void* left;
  int64_t left_row_bytes;
  int64_t left_step_bytes;
  int64_t rows;
  const void* right;
  int64_t panel_bytes;
  int64_t panels;
  int64_t steps;
  int32_t* sums;
  int64_t sums_stride; // in elements, kPanelColumns for each panel at least
  bool accumulate;
  // What sums begin with that do not accumulate, for each column of whole panels, by a table that says it does so; or
  // null, for zeros.
  const int32_t* start = nullptr;
  // Where a row of the left operand lies in segments: so many steps side by side, a whole number of the table's depth
  // multiples, and the next ones so many bytes after them. By a table that says it does so; or 0, where it is in one.
  int64_t left_segment_steps = 0;
  int64_t left_segment_bytes = 0;
};

// What sums become where they are fp32 at once: (sum + column term + row term) * multiplier.
struct Floats {
  float* output;
  int64_t stride; // from one row to the next
  int64_t columns; // of the panels, all that are written
  const int32_t* column_terms; // for whole panels; zeros where there is no left_offset
  const int32_t* row_terms;
  const float* row_multipliers; // or null, where there is one for all
  float multiplier;
};

// Where four rows of the depth become one step: rows[4 * step + i][column] goes to byte i of
// to[column / 16 * block_bytes + step * step_bytes + column % 16 * 4]. Columns are filled up with zeros to whole blocks.
// Where the table says that it adds up columns, the sum of each one's values is added to `sums`, which has room for whole
// blocks, unless that is null.
struct Interleaving {
  const int8_t* const* rows; // as many as the steps hold
  int64_t steps;
  int64_t columns;
  void* to;
  int64_t block_bytes;
  int64_t step_bytes;
  int32_t* sums = nullptr;
  // Allows each whole 64 columns to be left in the order of lanes, see lane_of(), by a table that says it does so.
  bool by_lanes = false;
};

// Of 64 columns in the order of lanes, which vectors of 64 bytes interleave without dealing them first: where a column
// is, and which column is at a place.
inline int64_t lane_of(int64_t column) {
  return column / 64 * 64 + column % 16 / 4 * 16 + column % 64 / 16 * 4 + column % 4;
}

// Values of several rows of the left operand, each of which lies side by side.
struct LeftRows {
  const int8_t* from;
  const int8_t* end; // of memory that may be read
  int64_t from_stride;
  int64_t rows;
  int64_t count; // of values in each row
  void* to;
  int64_t to_stride; // in bytes
};

struct Table {
  const char* name;
  // Values as they are packed: int8, or int16 where the set multiplies no bytes.
  int64_t value_bytes;
  // The depth is filled up with zeros of the right operand to a multiple of this.
  int64_t depth_multiple;
  // The left operand is packed as unsigned bytes, each value greater by this.
  int32_t left_offset;
  // The left operand has to be packed with its steps side by side, rather than with its rows.
  bool left_by_rows;

  // Up to kSlackValues behind those of a row may be overwritten: rows are packed from their beginning to their end.
  void (*pack_left_rows)(const LeftRows& rows);
  // Packs a left operand whose rows are columns in memory, side by side. Where left_by_rows holds, `block_bytes` are
  // those of a row, `step_bytes` are kStepBytes, and the steps must be a multiple of 16.
  void (*pack_left_columns)(const Interleaving& interleaving);
  void (*pack_right)(const Interleaving& interleaving);
  void (*multiply)(const Product& product);
  // Adds the sum of each column of a panel to 16 sums; null where there is no left_offset.
  void (*add_column_sums)(const void* panel, int64_t steps, int32_t* sums) = nullptr;
  // The product as fp32, with the bits of finish(), for short sums, of which writing is most of the work; returns the
  // largest absolute value. Nothing is written behind the last row. Null where a set has no such function.
  float (*multiply_to_floats)(const Product& product, const Floats& to) = nullptr;
  // Whether packing columns adds them up on the way, see Interleaving.
  bool adds_columns = false;
  // Whether packing leaves columns in the order of lanes where it may.
  bool packs_by_lanes = false;
  // Whether sums begin with what they are told to, see Product.
  bool starts_sums = false;
  // Whether rows of the left operand may lie in segments, see Product, and overlap: only a set that needs no packing.
  bool left_in_segments = false;
  // Where writing sums takes longer than few terms' products: how many are written before they are finished, so that
  // they stay in the first cache; a multiple of kSlackRows * kPanelColumns. 0 where a block's are written first.
  int64_t sums_at_once = 0;
  // What a thread does before its products and after them, or null.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;

  int64_t step_values() const {
    return kStepBytes / value_bytes;
  }
  int64_t padded(int64_t depth) const {
    return (depth + depth_multiple - 1) / depth_multiple * depth_multiple;
  }
  int64_t steps(int64_t depth) const {
    return padded(depth) / step_values();
  }
};

// For as long as it lives, its thread may multiply by a table.
class Multiplying {
 public:
  explicit Multiplying(const Table& table) : end_(table.end) {
    if (table.begin != nullptr) {
      table.begin();
    }
  }
  ~Multiplying() {
    if (end_ != nullptr) {
      end_();
    }
  }
  Multiplying(const Multiplying&) = delete;
  Multiplying& operator=(const Multiplying&) = delete;

 private:
  void (*const end_)();
};

// The table of the set that kernels use, see isa(): the best of those that the set holds.
const Table& table();
// The one for sums of so many terms: of a set that multiplies many at a time, short sums are left to another.
const Table& table_for_depth(int64_t depth);

const Table& scalar_table();
#if defined(__x86_64__) && defined(__GNUC__)
const Table& avx2_table();
const Table& avx_vnni_table();
const Table& avx512_vnni_table();
const Table& amx_table();
#elif defined(__aarch64__)
const Table& neon_table();
const Table& neon_dotprod_table();
const Table& neon_i8mm_table();
#endif

} // namespace torch_odt::kernels::int8
