// x times contiguous rows of a matrix, for up to kStreamRows x: every byte of the rows is read once.
//
// The rows of one step come from R distant places of the range, so each of R streams is contiguous
// whatever N is; that is what the memory's prefetchers follow.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

constexpr size_t kAhead = 1024;  // bytes of a stream that are asked for before they are used

template <size_t M, size_t R, size_t V>
inline void step_vectors(const float (&x)[R][M], const int8_t* const (&row)[R], size_t n,
                         size_t columns, bool first, float* partial) {
  Vec sum[M][V];
#pragma GCC unroll 8
  for (size_t m = 0; m < M; m++)
#pragma GCC unroll 8
    for (size_t v = 0; v < V; v++)
      sum[m][v] = first ? Vec{} : load(partial + m * columns + n + v * W);
#pragma GCC unroll 8
  for (size_t r = 0; r < R; r++) {
    if (n % 64 == 0)  // once a line
      for (size_t line = 0; line < V * W; line += 64)
        __builtin_prefetch(row[r] + n + line + kAhead, 0, 2);
#pragma GCC unroll 8
    for (size_t v = 0; v < V; v++) {
      const Vec w = widen(row[r] + n + v * W);
#pragma GCC unroll 8
      for (size_t m = 0; m < M; m++) sum[m][v] = w * x[r][m] + sum[m][v];
    }
  }
#pragma GCC unroll 8
  for (size_t m = 0; m < M; m++)
#pragma GCC unroll 8
    for (size_t v = 0; v < V; v++) store(partial + m * columns + n + v * W, sum[m][v]);
}

// One step: R rows, all columns.
template <size_t M, size_t R>
void step(const float* x, size_t x_stride, const int8_t* w, size_t apart, size_t columns,
          bool first, float* partial) {
  float factor[R][M];
  const int8_t* row[R];
  for (size_t r = 0; r < R; r++) {
    row[r] = w + r * apart * columns;
    for (size_t m = 0; m < M; m++) factor[r][m] = x[m * x_stride + r * apart];
  }
  // As many vectors as leave sums and factors in registers.
  constexpr size_t V = M <= (W == 16 ? 3 : 1) ? 4 : M <= 4 ? 2 : 1;
  size_t n = 0;
  for (; n + V * W <= columns; n += V * W)
    step_vectors<M, R, V>(factor, row, n, columns, first, partial);
  for (; n + W <= columns; n += W)
    step_vectors<M, R, 1>(factor, row, n, columns, first, partial);
  for (; n < columns; n++)
    for (size_t m = 0; m < M; m++) {
      float sum = first ? 0 : partial[m * columns + n];
      for (size_t r = 0; r < R; r++) sum += factor[r][m] * row[r][n];
      partial[m * columns + n] = sum;
    }
}

template <size_t M, size_t R>
void stream_rows(const float* x, size_t x_stride, const int8_t* w, size_t rows, size_t columns,
                 float* partial) {
  const size_t apart = rows / R;
  for (size_t k = 0; k < apart; k++)
    step<M, R>(x + k, x_stride, w + k * columns, apart, columns, k == 0, partial);
  for (size_t k = apart * R; k < rows; k++)
    step<M, 1>(x + k, x_stride, w + k * columns, 0, columns, k == 0, partial);
}

template <size_t M>
struct Streams {
  template <class... Args>
  static void run(size_t count, Args... args) {
    if (count == M)
      stream_rows<M, 8>(args...);
    else
      Streams<M - 1>::run(count, args...);
  }
};

template <>
struct Streams<0> {
  template <class... Args>
  static void run(size_t, Args...) {}
};

void streams(const float* x, size_t x_stride, size_t count, const int8_t* w, size_t rows,
             size_t columns, float* partial) {
  Streams<grok1::kStreamRows>::run(count, x, x_stride, w, rows, columns, partial);
}

inline Vec scale_at(const grok1::Matrix& matrix, size_t place) {
  const char* scales = static_cast<const char*>(matrix.scales);
  if (matrix.scale_type == grok1::ScaleType::kFloat32) {
    Vec v;
    memcpy(&v, scales + place * 4, sizeof v);
    return v;
  }
  typedef uint16_t Half __attribute__((vector_size(2 * W)));
  Half half;
  memcpy(&half, scales + place * 2, sizeof half);
  const IntVec wide = __builtin_convertvector(half, IntVec);
  if (matrix.scale_type == grok1::ScaleType::kBFloat16) return from_bits(wide << 16);
  // float16: exponent and mantissa moved to a float's places are 2^112 too small; that holds for
  // subnormal numbers too. Infinity and NaN do not occur in scales that were checked.
  const Vec magnitude = from_bits((wide & 0x7fff) << 13) * 0x1p112f;
  return from_bits(bits<IntVec>(magnitude) | (wide & 0x8000) << 16);
}

// The scale of one column, for what is left of a row behind whole vectors.
inline float scale_of(const grok1::Matrix& matrix, size_t place) {
  grok1::Matrix one = matrix;
  char copy[4 * W] = {};
  const size_t size = matrix.scale_type == grok1::ScaleType::kFloat32 ? 4 : 2;
  memcpy(copy, static_cast<const char*>(matrix.scales) + place * size, size);
  one.scales = copy;
  return scale_at(one, 0)[0];
}

void sum_parts(const float* parts, size_t parts_per_group, size_t part_stride,
               const grok1::Matrix& matrix, size_t first, size_t end, float* y) {
  size_t n = first;
  for (; n + W <= end; n += W) {
    Vec sum = {};
    for (size_t g = 0; g < matrix.groups; g++) {
      const float* part = parts + g * parts_per_group * part_stride + n;
      Vec group = load(part);
      for (size_t p = 1; p < parts_per_group; p++) group += load(part + p * part_stride);
      sum = group * scale_at(matrix, g * matrix.columns + n) + sum;
    }
    store(y + n, sum);
  }
  for (; n < end; n++) {
    float sum = 0;
    for (size_t g = 0; g < matrix.groups; g++) {
      const float* part = parts + g * parts_per_group * part_stride + n;
      float group = part[0];
      for (size_t p = 1; p < parts_per_group; p++) group += part[p * part_stride];
      sum += group * scale_of(matrix, g * matrix.columns + n);
    }
    y[n] = sum;
  }
}

}  // namespace
