// Many rows of x times a block of a matrix's columns: the block's bytes are read once.
//
// Up to kBlockRows rows of the block are unpacked into strips of two vectors, in the cache next to
// the core, and each strip meets all rows of x, a tile of them at a time. What a strip holds is a
// class of its own, FloatStrips or another, with
//
//     Element          what a strip is made of
//     kTile            rows of x in a tile
//     kElementBytes    bytes of a packed activation
//     kFactors         floats that are kept for a row's block of activations
//     padded(n)        columns that unpacking n columns fills
//     elements(k, n)   Elements of k rows and n padded columns
//     unpack           int8 rows -> strips
//     tile<M>          sums[m] += x[m] . strip
//     finished         sums in the order of columns
//     pack             rows of x -> a tile
#pragma once

#include "kernels.h"
#include "streams.h"

namespace {

constexpr size_t kStrip = 2 * W;  // columns

template <class Strips, size_t M>
struct Tiles {
  template <class... Args>
  static void run(size_t count, Args... args) {
    if (count == M)
      Strips::template tile<M>(args...);
    else
      Tiles<Strips, M - 1>::run(count, args...);
  }
};

template <class Strips>
struct Tiles<Strips, 0> {
  template <class... Args>
  static void run(size_t, Args...) {}
};

inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <class Strips>
size_t strips_bytes(size_t columns) {
  return aligned(Strips::elements(grok1::kBlockRows, Strips::padded(columns)) *
                 sizeof(typename Strips::Element));
}

template <class Strips>
size_t block_scratch(size_t rows, size_t columns) {
  return strips_bytes<Strips>(columns) + rows * Strips::padded(columns) * sizeof(float);
}

// y = (or +=) scale * sums, for one row's columns of one group.
template <class Strips>
void scale_row(const float* sums, const grok1::Matrix& matrix, size_t scale, size_t columns,
               bool add, float* y) {
  size_t n = 0;
  for (; n + W <= columns; n += W) {
    const Vec scaled = Strips::finished(sums, n) * scale_at(matrix, scale + n);
    store(y + n, add ? load(y + n) + scaled : scaled);
  }
  if (n == columns) return;
  const Vec rest = Strips::finished(sums, n);
  for (size_t i = 0; n + i < columns; i++) {
    const float scaled = rest[i] * scale_of(matrix, scale + n + i);
    y[n + i] = add ? y[n + i] + scaled : scaled;
  }
}

// Asks for the rows that are unpacked next, a few lines at a time: asked for at once they would fill
// the queue to memory, and unpacking would wait for it.
class Ahead {
 public:
  Ahead(const int8_t* from, size_t stride, size_t rows, size_t columns, size_t steps)
      : row_(from), stride_(stride), rows_(rows), columns_(columns) {
    at_once_ = (rows * ((columns + 63) / 64) + steps - 1) / steps;
  }

  void step() {
    for (size_t i = 0; i < at_once_ && rows_; i++) {
      __builtin_prefetch(row_ + column_, 0, 2);
      column_ += 64;
      if (column_ < columns_) continue;
      column_ = 0;
      row_ += stride_;
      rows_--;
    }
  }

 private:
  const int8_t* row_;
  size_t stride_, rows_, columns_, at_once_, column_ = 0;
};

template <class Strips>
void block(const grok1::PackedRows& x, const grok1::Matrix& matrix, size_t first, size_t end,
           float* y, size_t y_stride, char* scratch) {
  typedef typename Strips::Element Element;
  const size_t columns = end - first, padded = Strips::padded(columns);
  const size_t group_rows = matrix.group_rows(), group_stride = x.stride() / x.groups;
  const size_t factors_stride = x.blocks() * Strips::kFactors;
  Element* strips = reinterpret_cast<Element*>(scratch);
  float* sums = reinterpret_cast<float*>(scratch + strips_bytes<Strips>(columns));
  for (size_t g = 0; g < matrix.groups; g++) {
    memset(sums, 0, x.count * padded * sizeof *sums);
    for (size_t k = 0; k < group_rows; k += grok1::kBlockRows) {
      const size_t rows = group_rows - k < grok1::kBlockRows ? group_rows - k : grok1::kBlockRows;
      const size_t number = g * x.blocks_per_group() + k / grok1::kBlockRows;
      const int8_t* w = matrix.codes + (g * group_rows + k) * matrix.columns + first;
      Strips::unpack(w, matrix.columns, rows, columns, strips);
      const size_t left = matrix.rows - g * group_rows - k - rows;
      const size_t tiles = (x.count + Strips::kTile - 1) / Strips::kTile;
      Ahead ahead(w + rows * matrix.columns, matrix.columns,
                  left < grok1::kBlockRows ? left : grok1::kBlockRows, columns,
                  padded / kStrip * tiles);
      for (size_t n = 0; n < padded; n += kStrip) {
        const Element* strip = strips + n / kStrip * Strips::elements(rows, kStrip);
        for (size_t m = 0; m < x.count; m += Strips::kTile) {
          const size_t tile = x.count - m < Strips::kTile ? x.count - m : Strips::kTile;
          ahead.step();
          const size_t place = m * x.stride() + (g * group_stride + k) * tile;
          Tiles<Strips, Strips::kTile>::run(
              tile, x.data + place * Strips::kElementBytes,
              x.factors + m * factors_stride + number * Strips::kFactors, factors_stride, strip,
              rows, sums + m * padded + n, padded);
        }
      }
    }
    for (size_t m = 0; m < x.count; m++)
      scale_row<Strips>(sums + m * padded, matrix, g * matrix.columns + first, columns, g > 0,
                        y + m * y_stride + first);
  }
}

}  // namespace
