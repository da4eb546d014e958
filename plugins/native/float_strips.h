// Strips of floats: products and sums in float32, on any instruction set. See block.h.
#pragma once

#include "block.h"
#include "kernels.h"

namespace {

struct FloatStrips {
  typedef float Element;
  static constexpr size_t kTile = W == 16 ? 14 : W == 8 ? 6 : 4;  // as many sums as registers
  static constexpr size_t kElementBytes = sizeof(float);
  static constexpr size_t kFactors = 0;

  static size_t padded(size_t columns) { return (columns + kStrip - 1) / kStrip * kStrip; }

  static size_t elements(size_t rows, size_t columns) { return rows * columns; }

  static Vec finished(const float* sums, size_t n) { return load(sums + n); }

  static void unpack(const int8_t* w, size_t stride, size_t rows, size_t columns, float* strips) {
    for (size_t k = 0; k < rows; k++) {
      const int8_t* row = w + k * stride;
      float* to = strips + k * kStrip;
      size_t n = 0;
      for (; n + kStrip <= columns; n += kStrip, to += rows * kStrip) {
        store(to, widen(row + n));
        store(to + W, widen(row + n + W));
      }
      if (n < columns)
        for (size_t i = 0; i < kStrip; i++)
          to[i] = n + i < columns ? static_cast<float>(row[n + i]) : 0.0f;
    }
  }

  // y[m] += x[m] . strip, for the M rows of a tile whose first k of the block is at x.
  template <size_t M>
  static void tile(const char* x, const float*, size_t, const float* strip, size_t rows, float* y,
                   size_t y_stride) {
    const float* factors = reinterpret_cast<const float*>(x);
    Vec sum[M][2];
#pragma GCC unroll 16
    for (size_t m = 0; m < M; m++)
      for (size_t v = 0; v < 2; v++) sum[m][v] = load(y + m * y_stride + v * W);
    for (size_t k = 0; k < rows; k++, strip += kStrip, factors += M) {
      const Vec w0 = load(strip), w1 = load(strip + W);
#pragma GCC unroll 16
      for (size_t m = 0; m < M; m++) {
        sum[m][0] = w0 * factors[m] + sum[m][0];
        sum[m][1] = w1 * factors[m] + sum[m][1];
      }
    }
#pragma GCC unroll 16
    for (size_t m = 0; m < M; m++)
      for (size_t v = 0; v < 2; v++) store(y + m * y_stride + v * W, sum[m][v]);
  }

  static void pack(const float* const* rows, size_t first, size_t count,
                   const grok1::PackedRows& packed) {
    float* to = reinterpret_cast<float*>(packed.data) + first * packed.stride();
    const size_t width = packed.group_columns();
    for (size_t g = 0; g < packed.groups; g++, to += packed.stride() / packed.groups * count)
      for (size_t block = 0; block < width; block += grok1::kBlockRows) {
        const size_t left = width - block;
        const size_t end = block + (left < grok1::kBlockRows ? left : grok1::kBlockRows);
        for (size_t m = 0; m < count; m++)
          for (size_t k = block; k < end; k++) to[k * count + m] = rows[m][g * width + k];
      }
  }
};

}  // namespace
