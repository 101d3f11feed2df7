#include "pipeline/segment_layout.h"

#include <algorithm>
#include <cassert>
#include <charconv>
#include <limits>
#include <unordered_map>
#include <utility>

#include "core/crc32c.h"
#include "core/error.h"

namespace cpr_ext {

namespace {

constexpr char kNoChecksum[] = "00000000";  // in the place of a header's own, as it is computed

void append(std::string* text, int64_t number) {
  char digits[24];
  *text += std::string(digits, std::to_chars(digits, digits + sizeof(digits), number).ptr);
}

void append_hex(std::string* text, uint32_t checksum) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (int shift = 28; shift >= 0; shift -= 4) text->push_back(kDigits[(checksum >> shift) & 15]);
}

template <class... Parts>
void append_list(std::string* text, const Parts&... parts) {
  text->push_back('[');
  const size_t begin = text->size();
  ((text->size() > begin ? text->push_back(',') : void(), append(text, parts)), ...);
  text->push_back(']');
}

// A JSON text as the value of a JSON string. REQUIRES: it is ASCII without control characters.
void append_quoted(std::string* text, const std::string& json) {
  text->push_back('"');
  for (const char letter : json) {
    if (letter == '"' || letter == '\\') text->push_back('\\');
    text->push_back(letter);
  }
  text->push_back('"');
}

void append_entry(std::string* text, const std::string& name, const std::string& dtype,
                  const std::string& shape, int64_t begin, int64_t end) {
  *text += ',';
  *text += name;
  *text += ":{\"dtype\":\"";
  *text += dtype;
  *text += "\",\"shape\":[";
  *text += shape;
  *text += "],\"data_offsets\":";
  append_list(text, begin, end);
  *text += '}';
}

int64_t block_bytes_for(const std::vector<PlannedTable>& tables) {
  int64_t rows_bytes = 0;
  int64_t padding = 0;
  const auto add = [&](int64_t bytes) {
    rows_bytes += bytes;
    padding += align_up(bytes) - bytes;
  };
  for (const auto& [rows, text] : tables) {
    if (!rows->is_range()) add(rows->num_rows * kRowIdBytes);
    for (const SegmentArray& array : rows->arrays) add(rows->num_rows * array.file_row_bytes());
  }
  return padding * 64 <= rows_bytes ? kAlignment : kSmallBlock;
}

}  // namespace

SegmentLayout::SegmentLayout(const std::vector<PlannedTable>& tables, std::string metadata,
                             int64_t slot_bytes, int64_t max_chunk_bytes, int64_t block_bytes)
    : metadata_(std::move(metadata)),
      block_bytes_(block_bytes == 0 ? block_bytes_for(tables) : block_bytes) {
  for (const auto& [rows, text] : tables) {
    tables_.push_back({*rows, text});
    tables_.back().rows.block_bytes = block_bytes_;
  }
  place_at(0);
  const std::vector<Chunk> widest = widest_chunks(slot_bytes, max_chunk_bytes);
  header_bytes_ = align_up(static_cast<int64_t>(8 + text(widest).size()), block_bytes_);
  if (header_bytes_ > kMaxHeaderBytes) {
    throw UsageError("the segment's header would take " + std::to_string(header_bytes_) +
                     " bytes of " + std::to_string(kMaxHeaderBytes) +
                     "; make slot_bytes larger, or give large extra state as tensors");
  }
  place_at(header_bytes_);
  for (size_t i = 0; i < tables.size(); ++i) {
    check_table(tables_[i].rows);
    *tables[i].rows = tables_[i].rows;
    for (SegmentArray& array : tables_[i].rows.arrays) array.rows.data = nullptr;
  }
}

void SegmentLayout::place_at(int64_t start) {
  int64_t offset = start;
  const auto take = [&](int64_t bytes) {
    return std::exchange(offset, offset + align_up(bytes, block_bytes_));
  };
  for (auto& [rows, text] : tables_) {
    if (!rows.is_range()) rows.row_ids_offset = take(rows.num_rows * kRowIdBytes);
    for (SegmentArray& array : rows.arrays) {
      array.file_offset = take(rows.num_rows * array.file_row_bytes());
    }
  }
  file_bytes_ = offset;
}

std::vector<Chunk> SegmentLayout::widest_chunks(int64_t slot_bytes, int64_t max_chunk_bytes) const {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < tables_.size(); ++i) {
    const SegmentTable& rows = tables_[i].rows;
    const int64_t most = rows_per_chunk(rows, slot_bytes, max_chunk_bytes);
    const size_t pieces = !rows.is_range() + rows.arrays.size();
    for (int64_t first = 0; first < rows.num_rows; first += most) {
      chunks.push_back({static_cast<int>(i), first, std::min(most, rows.num_rows - first),
                        std::numeric_limits<int64_t>::max(), std::vector<uint32_t>(pieces)});
    }
  }
  return chunks;
}

std::string SegmentLayout::header(const std::vector<Chunk>& chunks) const {
  const std::string json = text(chunks);
  assert(static_cast<int64_t>(8 + json.size()) <= header_bytes_ && "it outgrew its planned size");
  std::string block;
  block.reserve(static_cast<size_t>(header_bytes_));
  for (int byte = 0; byte < 8; ++byte) {
    block.push_back(static_cast<char>((header_bytes_ - 8) >> (8 * byte)));
  }
  block += json;
  block.resize(static_cast<size_t>(header_bytes_), ' ');
  std::string checksum;
  append_hex(&checksum, crc32c(block.data(), block.size()));
  // The first of its kind: names that come from users follow later.
  const std::string before = "\"header_crc32c\":\"";
  return block.replace(block.find(before) + before.size(), checksum.size(), checksum);
}

std::string SegmentLayout::text(const std::vector<Chunk>& chunks) const {
  std::string json = "{\"__metadata__\":{\"format\":\"cpr_ext.segment\",\"format_version\":\"" +
                     std::to_string(kSegmentVersion) + "\",\"header_crc32c\":\"" + kNoChecksum +
                     "\",\"cpr_ext\":";
  append_quoted(&json, metadata_text(chunks));
  return json + '}' + entries_text() + '}';
}

std::string SegmentLayout::metadata_text(const std::vector<Chunk>& chunks) const {
  std::string json = metadata_;
  json.pop_back();
  json += ",\"block_bytes\":" + std::to_string(block_bytes_) + ",\"arrays\":[";
  std::unordered_map<std::string, int64_t> kinds;
  for (const auto& [rows, text] : tables_) {
    if (!kinds.emplace(text->arrays, kinds.size()).second) continue;
    if (kinds.size() > 1) json += ',';
    json += text->arrays;
  }
  json += "],\"tables\":[";
  for (const auto& [rows, text] : tables_) {
    json += "{\"name\":" + text->name + ",\"num_rows\":";
    append(&json, rows.num_rows);
    json += ",\"arrays\":";
    append(&json, kinds.at(text->arrays));
    if (rows.is_range()) {
      json += ",\"range_begin\":";
      append(&json, rows.range_begin);
    }
    if (text->is_tensor) json += ",\"shape\":[" + text->shape + ']';
    json += "},";
  }
  if (json.back() == ',') json.pop_back();
  json += "],\"chunks\":[";
  for (const Chunk& chunk : chunks) {
    append_list(&json, static_cast<int64_t>(chunk.table), chunk.first, chunk.count, chunk.step);
    json.back() = ',';
    json += '[';
    for (const uint32_t checksum : chunk.checksums) {
      json += '"';
      append_hex(&json, checksum);
      json += "\",";
    }
    if (json.back() == ',') json.pop_back();
    json += "]],";
  }
  if (json.back() == ',') json.pop_back();
  json += ']';
  return json + '}';
}

std::string SegmentLayout::entries_text() const {
  std::string json;
  int64_t pads = 0;
  int64_t start = header_bytes_;
  const auto add = [&](const ArrayText& array, int64_t num_rows, const TableText& table,
                       int64_t offset, int64_t bytes) {
    const int64_t begin = offset - start, end = begin + bytes;
    const std::string shape =
        table.is_tensor ? table.shape : std::to_string(num_rows) + array.row_shape;
    append_entry(&json, array.name, array.dtype, shape, begin, end);
    // safetensors allows no holes: what aligns the next array is a tensor, too.
    const int64_t pad = align_up(end, block_bytes_) - end;
    if (pad == 0) return;
    append_entry(&json, "\"__pad." + std::to_string(pads++) + '"', "U8", std::to_string(pad), end,
                 end + pad);
  };
  for (const auto& [rows, text] : tables_) {
    auto array = text->stored.begin();
    if (!rows.is_range()) {
      add(*array, rows.num_rows, *text, rows.row_ids_offset, rows.num_rows * kRowIdBytes);
    }
    ++array;
    for (const SegmentArray& each : rows.arrays) {
      add(*array++, rows.num_rows, *text, each.file_offset, rows.num_rows * each.file_row_bytes());
    }
  }
  return json;
}

}  // namespace cpr_ext
