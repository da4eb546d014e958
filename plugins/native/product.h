// x times an int8 matrix, cut into tasks for any number of threads.
#pragma once

#include <cstring>

#include "kernels.h"

namespace grok1 {

constexpr size_t kBytesPerPart = 1536 * 1024;  // of a matrix that is read as streams
constexpr size_t kMostParts = 16;
constexpr size_t kMostTileRows = 16;  // of any variant
constexpr size_t kColumnsPerTask = 2048;  // of work that costs little per column

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
inline size_t pieces(size_t whole, size_t piece) { return (whole + piece - 1) / piece; }

// Memory of one call: first asked for, then given.
class Scratch {
 public:
  template <class T>
  size_t ask(size_t count) {
    const size_t place = size_;
    size_ += (count * sizeof(T) + 63) / 64 * 64;
    return place;
  }
  void allocate(int use) { memory_ = thread_scratch(use, size_); }
  template <class T>
  T* at(size_t place) const {
    return reinterpret_cast<T*>(memory_ + place);
  }

 private:
  size_t size_ = 0;
  char* memory_ = nullptr;
};

// Rows of activations, all of x or those that an expert was chosen for, as products take them.
class Rows {
 public:
  Rows(const float* x, size_t columns, const size_t* chosen, size_t count, size_t groups,
       Scratch& scratch)
      : x_(x), chosen_(chosen), packed_{nullptr, nullptr, count, columns, groups} {
    if (!streamed()) {
      data_ = scratch.ask<char>(count * packed_.stride() * variant().element_bytes);
      factors_ = scratch.ask<float>(count * packed_.blocks() * variant().block_factors);
    } else if (copied()) {
      data_ = scratch.ask<float>(count * columns);
    }
  }

  bool streamed() const { return packed_.count <= kStreamRows; }
  size_t count() const { return packed_.count; }

  void place(const Scratch& scratch) {
    if (!streamed()) {
      packed_.data = scratch.at<char>(data_);
      packed_.factors = scratch.at<float>(factors_);
    } else if (!copied()) {
      streamed_ = row_of(0);
    } else {
      float* copy = scratch.at<float>(data_);
      for (size_t row = 0; row < packed_.count; row++)
        memcpy(copy + row * packed_.columns, row_of(row), packed_.columns * sizeof *copy);
      streamed_ = copy;
    }
  }

  // Work before the first product.
  size_t pack_tasks() const {
    return streamed() ? 0 : pieces(packed_.count, variant().tile_rows);
  }

  void pack(size_t task) const {
    const float* rows[kMostTileRows];
    const size_t tile = variant().tile_rows, first = task * tile;
    const size_t count = smaller(packed_.count - first, tile);
    for (size_t row = 0; row < count; row++) rows[row] = row_of(first + row);
    variant().pack_tile(rows, first, count, packed_);
  }

  const PackedRows& packed() const { return packed_; }
  const float* streamed_rows() const { return streamed_; }

 private:
  // A few rows that do not follow each other are copied.
  bool copied() const { return chosen_ && packed_.count > 1; }

  const float* row_of(size_t row) const {
    return x_ + (chosen_ ? chosen_[row] : row) * packed_.columns;
  }

  const float* x_;
  const float* streamed_ = nullptr;
  const size_t* chosen_;
  PackedRows packed_;
  size_t data_ = 0, factors_ = 0;
};

// One matrix times some rows. Few rows: tasks are ranges of the matrix's rows, whose sums are added
// up in `finish`; that reads the matrix in long streams. Many rows: tasks are blocks of columns.
class Product {
 public:
  // y [count, N] may be null: then the result lies in scratch.
  Product(const Rows& rows, const Matrix& matrix, float* y, Scratch& scratch)
      : rows_(&rows), matrix_(matrix), y_(y) {
    if (rows.streamed()) {
      const size_t parts =
          smaller(pieces(matrix.rows * matrix.columns, kBytesPerPart), kMostParts);
      parts_per_group_ = pieces(parts, matrix.groups);
      if (parts_per_group_ > matrix.group_rows()) parts_per_group_ = 1;
      partial_ = scratch.ask<float>(parts_count() * rows.count() * matrix.columns);
    }
    if (!y) result_ = scratch.ask<float>(rows.count() * matrix.columns);
  }

  void place(const Scratch& scratch) {
    partials_ = scratch.at<float>(partial_);
    if (!y_) y_ = scratch.at<float>(result_);
  }

  size_t tasks() const {
    return rows_->streamed() ? parts_count() : pieces(matrix_.columns, columns_per_block());
  }

  void run(size_t task) const {
    if (rows_->streamed()) {
      const size_t first = row_of(task), end = row_of(task + 1);
      variant().streams(rows_->streamed_rows() + first, matrix_.rows,
                        rows_->count(), matrix_.codes + first * matrix_.columns, end - first,
                        matrix_.columns, partials_ + task * part_size());
      return;
    }
    const size_t first = task * columns_per_block();
    const size_t end = smaller(first + columns_per_block(), matrix_.columns);
    const size_t bytes = variant().block_scratch(rows_->count(), end - first);
    variant().block(rows_->packed(), matrix_, first, end, y_, matrix_.columns,
                    thread_scratch(0, bytes));
  }

  // After all tasks: the finished columns [first, end) of a row, as a pointer to column 0.
  const float* finish(size_t row, size_t first, size_t end) const {
    float* y = y_ + row * matrix_.columns;
    if (rows_->streamed())
      variant().sum_parts(partials_ + row * matrix_.columns, parts_per_group_, part_size(),
                          matrix_, first, end, y);
    return y;
  }

  float* row(size_t row) const { return y_ + row * matrix_.columns; }
  size_t columns() const { return matrix_.columns; }

 private:
  size_t parts_count() const { return parts_per_group_ * matrix_.groups; }
  size_t part_size() const { return rows_->count() * matrix_.columns; }

  size_t row_of(size_t part) const {
    const size_t group = part / parts_per_group_, within = part % parts_per_group_;
    return group * matrix_.group_rows() + within * matrix_.group_rows() / parts_per_group_;
  }

  // A few rows wait for memory, which likes long pieces; many compute, and want the cache.
  size_t columns_per_block() const { return rows_->count() <= 64 ? 256 : 128; }

  const Rows* rows_;
  Matrix matrix_;
  float* y_;
  float* partials_ = nullptr;
  size_t parts_per_group_ = 1, partial_ = 0, result_ = 0;
};

}  // namespace grok1
