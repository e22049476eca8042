#include "rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "lanes.h"
#include "memory.h"
#include "rows_avx512.h"

namespace torch_odt::kernels::int8 {

namespace {

// Rows that a thread takes at a time.
constexpr int64_t kGrainRows = 64;

// Reads some of a row's elements, with zeros behind the last of them.
template <typename Storage, int kBytes>
struct Elements {
  using L = Lanes<kBytes>;
  using Floats = typename L::Floats;
  using Ints = typename L::Ints;

  const Rows rows;
  const Storage* const values;
  const int64_t count; // of values
  const int64_t mask_bytes;

  TORCH_ODT_INLINE explicit Elements(const Rows& from)
      : rows(from),
        values(static_cast<const Storage*>(from.values)),
        count(from.count / from.repeats * from.columns),
        mask_bytes((from.count * from.columns + 7) / 8) {}

  TORCH_ODT_INLINE uint32_t bits(int64_t index) const {
    const int64_t byte = index / 8;
    uint32_t found = 0;
    if (byte + 4 <= mask_bytes) [[likely]] {
      __builtin_memcpy(&found, rows.mask + byte, 4);
    } else {
      for (int64_t i = 0; byte + i < mask_bytes; ++i) {
        found |= static_cast<uint32_t>(rows.mask[byte + i]) << (8 * i);
      }
    }
    return found >> (index % 8);
  }

  // `value` is where the element's is, and `lanes` are all of a vector where kAll.
  template <bool kAll, bool kMasked>
  TORCH_ODT_INLINE Floats at(int64_t value, int64_t index, int64_t lanes) const {
    Floats found;
    if (kAll || value + L::kCount <= count) {
      found = read(values + value);
    } else {
      Storage some[L::kCount] = {};
      for (int64_t i = 0; i < lanes; ++i) {
        some[i] = values[value + i];
      }
      found = read(some);
    }
    uint32_t kept = kAll ? ~0U : (1U << lanes) - 1;
    if constexpr (kMasked) {
      kept &= bits(index);
    }
    if constexpr (kMasked || !kAll) {
      const Ints set = (Ints{} + static_cast<int32_t>(kept)) & (1 << L::numbers());
      found = (Floats)((Ints)found & (set != 0));
    }
    return found;
  }

 private:
  TORCH_ODT_INLINE static Floats read(const Storage* from) {
    if constexpr (std::is_same_v<Storage, BFloat16>) {
      return L::from_bfloat16(L::template load<typename L::Halves>(from));
    } else {
      return L::template load<Floats>(from);
    }
  }
};

template <typename Storage, bool kMasked>
struct Scan {
  template <int kBytes>
  struct Body {
    using L = Lanes<kBytes>;
    using Floats = typename L::Floats;
    using Ints = typename L::Ints;

    // kVectors side by side, which do not wait for each other; or, where not kAll, some lanes of one.
    template <int kVectors, bool kAll>
    TORCH_ODT_INLINE static void
    columns(const Elements<Storage, kBytes>& from, const ScannedRows& chunk, int64_t column, int64_t lanes) {
      Ints largest[kVectors] = {};
      Floats sums[kVectors] = {};
      for (int64_t row = chunk.begin; row < chunk.end; ++row) {
        const int64_t value = chunk.rows.first_value(row) + column;
        const int64_t index = row * chunk.rows.columns + column;
        for (int v = 0; v < kVectors; ++v) {
          const Floats values = from.template at<kAll, kMasked>(value + v * L::kCount, index + v * L::kCount, lanes);
          // As bits, magnitudes are ordered as their numbers are, and NaN is above all of them.
          const Ints magnitude = (Ints)values & 0x7fffffff;
          largest[v] = largest[v] < magnitude ? magnitude : largest[v];
          sums[v] += values;
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        store_lanes((Floats)largest[v], lanes, chunk.largest + column + v * L::kCount);
        store_lanes(sums[v], lanes, chunk.sums + column + v * L::kCount);
      }
    }

    TORCH_ODT_INLINE static void run(const ScannedRows* of) {
      const ScannedRows chunk = *of;
      const Elements<Storage, kBytes> from(chunk.rows);
      constexpr int64_t kCount = L::kCount;
      constexpr int kWide = 4;
      int64_t column = 0;
      for (; column + kWide * kCount <= chunk.rows.columns; column += kWide * kCount) {
        columns<kWide, true>(from, chunk, column, kCount);
      }
      for (; column + kCount <= chunk.rows.columns; column += kCount) {
        columns<1, true>(from, chunk, column, kCount);
      }
      if (column < chunk.rows.columns) {
        columns<1, false>(from, chunk, column, chunk.rows.columns - column);
      }
    }
  };
};

void scan_chunk(const ScannedRows& chunk) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (isa() >= Isa::avx512) {
    scan_rows_avx512(chunk);
    return;
  }
#endif
  with_storage(chunk.rows, [&]<typename Storage>() {
    if (chunk.rows.mask == nullptr) {
      run_with_vectors<Scan<Storage, false>::template Body>(&chunk);
    } else {
      run_with_vectors<Scan<Storage, true>::template Body>(&chunk);
    }
  });
}

template <typename Storage, bool kMasked, bool kScaled, bool kTwo>
struct Round {
  template <int kBytes>
  struct Body {
    using L = Lanes<kBytes>;
    using Floats = typename L::Floats;
    using Ints = typename L::Ints;

    template <bool kAll>
    TORCH_ODT_INLINE static void
    store(const RoundedRows& to, Floats values, Floats drawn, int64_t index, int64_t column, int64_t lanes, Ints& clamped) {
      // Not exact for numbers beyond 2^22, where everything is clamped.
      Floats whole;
      if constexpr (kScaled) {
        whole = L::floor_by_draws(L::product(values, L::template load<Floats>(to.factors + column)), drawn);
      } else {
        whole = L::floor_of(values + drawn);
      }
      const Floats inside = L::between(whole, Floats{} - 127.0F, Floats{} + 127.0F);
      clamped -= whole != inside;
      store_lanes(L::narrowed(__builtin_convertvector(inside, Ints)), kAll ? L::kCount : lanes, to.output + index);
    }

    TORCH_ODT_INLINE static void run(RowsPart* of) {
      const RowsPart part = *of;
      const Elements<Storage, kBytes> from(part.rows);
      constexpr int64_t kCount = L::kCount;
      Keys keys(part.seed);
      std::conditional_t<kScaled, ByteDraws<kBytes>, HalfDraws<kBytes>> draws;
      Ints clamped = {};
      Ints ignored = {};
      const int64_t columns = part.rows.columns;
      for (int64_t row = part.begin; row < part.end; ++row) {
        const int64_t begins = row * columns;
        const int64_t first_value = part.rows.first_value(row);
        const uint32_t key = keys.at(begins);
        const auto some = [&]<bool kAll>(int64_t column, int64_t lanes) __attribute__((always_inline)) {
          const int64_t index = begins + column;
          const Floats values = from.template at<kAll, kMasked>(first_value + column, index, lanes);
          Floats drawn;
          if constexpr (kScaled) {
            drawn = draws.at(key, index, column);
          } else {
            drawn = draws.at(key, index, column, column < 16);
          }
          store<kAll>(part.first, values, drawn, index, column, lanes, clamped);
          if constexpr (kTwo) {
            store<kAll>(part.second, values, drawn, index, column, lanes, ignored);
          }
        };
        int64_t column = 0;
        for (; column + kCount <= columns; column += kCount) {
          some.template operator()<true>(column, kCount);
        }
        if (column < columns) {
          some.template operator()<false>(column, columns - column);
        }
      }
      for (int i = 0; i < kCount; ++i) {
        of->clamped += kScaled ? 0 : clamped[i];
      }
    }
  };
};

template <bool kMasked>
void round_part(RowsPart& part) {
  if (part.first.factors == nullptr) {
    run_with_vectors<Round<float, kMasked, false, false>::template Body>(&part);
    return;
  }
  with_storage(part.rows, [&]<typename Storage>() {
    if (part.second.output == nullptr) {
      run_with_vectors<Round<Storage, kMasked, true, false>::template Body>(&part);
    } else {
      run_with_vectors<Round<Storage, kMasked, true, true>::template Body>(&part);
    }
  });
}

} // namespace

int64_t scan_workspace_bytes(const Rows& rows) {
  return 2 * divided(rows.count, kRowsOfSum) * rows.columns * static_cast<int64_t>(sizeof(float));
}

void scan(const Rows& rows, const Threads& threads, float* largest, float* sums, void* workspace) {
  const int64_t chunks = divided(rows.count, kRowsOfSum);
  float* const chunk_largest = static_cast<float*>(workspace);
  float* const chunk_sums = chunk_largest + chunks * rows.columns;
  threads.share(chunks, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      scan_chunk(
          {rows,
           i * kRowsOfSum,
           std::min((i + 1) * kRowsOfSum, rows.count),
           chunk_largest + i * rows.columns,
           chunk_sums + i * rows.columns});
    }
  });
  for (int64_t column = 0; column < rows.columns; ++column) {
    int32_t most = 0;
    double sum = 0;
    for (int64_t i = 0; i < chunks; ++i) {
      int32_t bits = 0;
      std::memcpy(&bits, chunk_largest + i * rows.columns + column, sizeof(bits));
      most = std::max(most, bits);
      sum += chunk_sums[i * rows.columns + column];
    }
    std::memcpy(largest + column, &most, sizeof(most));
    sums[column] = static_cast<float>(sum);
  }
}

int64_t round_rows(
    const Rows& rows, uint64_t seed, const RoundedRows& first, const RoundedRows* second, const Threads& threads) {
  std::atomic<int64_t> clamped = 0;
  threads.share(divided(rows.count, kGrainRows), [&](int64_t, int64_t begin, int64_t end) {
    RowsPart part{
        rows,
        begin * kGrainRows,
        std::min(end * kGrainRows, rows.count),
        seed,
        first,
        second == nullptr ? RoundedRows{nullptr} : *second,
        0};
#if defined(__x86_64__) && defined(__GNUC__)
    if (isa() >= Isa::avx512) {
      round_rows_avx512(part);
      clamped += part.clamped;
      return;
    }
#endif
    if (rows.mask == nullptr) {
      round_part<false>(part);
    } else {
      round_part<true>(part);
    }
    clamped += part.clamped;
  });
  return clamped;
}

} // namespace torch_odt::kernels::int8
