#include "staging/row_copy.h"

#include <algorithm>
#include <cstring>

#include "core/avx512.h"
#include "staging/row_blocks.h"

namespace cpr_ext {

namespace {

// Copies of a size known at compile time become a few vector moves; others call memcpy.
template <int64_t kRowBytes>
void copy_row(std::byte* to, const std::byte* from, int64_t row_bytes) {
  std::memcpy(to, from, kRowBytes > 0 ? kRowBytes : row_bytes);
}

template <int64_t kRowBytes>
void gather_block(const RowArray& source, const int64_t* row_ids, int64_t begin, int64_t end,
                  std::byte* out) {
  const int64_t ahead = rows_ahead(source.row_bytes);
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) prefetch_row(source.row(row_ids[i + ahead]), source.row_bytes);
    copy_row<kRowBytes>(out + i * source.row_bytes, source.row(row_ids[i]), source.row_bytes);
  }
}

#if CPR_EXT_HAS_AVX512

// Whole cache lines go to memory without being read from it first.
// REQUIRES: can_stream(target).
CPR_EXT_AVX512 void stream_block(const std::byte* packed, const int64_t* row_ids, int64_t begin,
                                 int64_t end, const RowArray& target) {
  const int64_t row_bytes = target.row_bytes;
  for (int64_t i = begin; i < end; ++i) {
    const std::byte* from = packed + i * row_bytes;
    std::byte* to = target.row(row_ids[i]);
    for (int64_t offset = 0; offset < row_bytes; offset += kCacheLine) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + offset),
                          _mm512_loadu_si512(from + offset));
    }
  }
  _mm_sfence();  // before whoever is told that the rows are there
}

bool can_stream(const RowArray& target) {
  const auto address = reinterpret_cast<uintptr_t>(target.data);
  return instruction_set() == InstructionSet::kAvx512 && address % kCacheLine == 0 &&
         target.row_bytes % kCacheLine == 0 && target.row_stride_bytes % kCacheLine == 0;
}

#endif

template <int64_t kRowBytes>
void scatter_block(const std::byte* packed, const int64_t* row_ids, int64_t begin, int64_t end,
                   const RowArray& target) {
#if CPR_EXT_HAS_AVX512
  if (can_stream(target)) return stream_block(packed, row_ids, begin, end, target);
#endif
  const int64_t ahead = rows_ahead(target.row_bytes);
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) prefetch_row(target.row(row_ids[i + ahead]), target.row_bytes);
    copy_row<kRowBytes>(target.row(row_ids[i]), packed + i * target.row_bytes, target.row_bytes);
  }
}

// Calls visit.template operator()<N>() with N the row size if it is a usual one, else 0.
template <typename Visit>
void with_row_bytes(int64_t row_bytes, const Visit& visit) {
  switch (row_bytes) {
    case 4:
      return visit(std::integral_constant<int64_t, 4>{});
    case 8:
      return visit(std::integral_constant<int64_t, 8>{});
    case 16:
      return visit(std::integral_constant<int64_t, 16>{});
    case 32:
      return visit(std::integral_constant<int64_t, 32>{});
    case 64:
      return visit(std::integral_constant<int64_t, 64>{});
    case 128:
      return visit(std::integral_constant<int64_t, 128>{});
    case 256:
      return visit(std::integral_constant<int64_t, 256>{});
    default:
      return visit(std::integral_constant<int64_t, 0>{});
  }
}

// Cuts `count` rows into blocks and runs body(begin, end) on each.
bool is_packed(const RowArray& array) { return array.row_stride_bytes == array.row_bytes; }

}  // namespace

void gather_rows(const RowArray& source, const int64_t* row_ids, int64_t count, std::byte* out,
                 ThreadPool* pool) {
  with_row_bytes(source.row_bytes, [&](auto row_bytes) {
    for_blocks(count, source.row_bytes, pool, [&](int64_t begin, int64_t end) {
      gather_block<decltype(row_bytes)::value>(source, row_ids, begin, end, out);
    });
  });
}

void scatter_rows(const std::byte* packed, const int64_t* row_ids, int64_t count,
                  const RowArray& target, ThreadPool* pool) {
  with_row_bytes(target.row_bytes, [&](auto row_bytes) {
    for_blocks(count, target.row_bytes, pool, [&](int64_t begin, int64_t end) {
      scatter_block<decltype(row_bytes)::value>(packed, row_ids, begin, end, target);
    });
  });
}

void gather_range(const RowArray& source, int64_t first_row_id, int64_t count, std::byte* out,
                  ThreadPool* pool) {
  const int64_t row_bytes = source.row_bytes;
  for_blocks(count, row_bytes, pool, [&](int64_t begin, int64_t end) {
    if (is_packed(source)) {
      std::memcpy(out + begin * row_bytes, source.row(first_row_id + begin),
                  (end - begin) * row_bytes);
      return;
    }
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(out + i * row_bytes, source.row(first_row_id + i), row_bytes);
    }
  });
}

void scatter_range(const std::byte* packed, int64_t first_row_id, int64_t count,
                   const RowArray& target, ThreadPool* pool) {
  const int64_t row_bytes = target.row_bytes;
  for_blocks(count, row_bytes, pool, [&](int64_t begin, int64_t end) {
    if (is_packed(target)) {
      std::memcpy(target.row(first_row_id + begin), packed + begin * row_bytes,
                  (end - begin) * row_bytes);
      return;
    }
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(target.row(first_row_id + i), packed + i * row_bytes, row_bytes);
    }
  });
}

}  // namespace cpr_ext
