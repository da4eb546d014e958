// Soft-capped attention of some query rows over a range of cached keys, a few keys at a time.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

// scores[q][k] = query row q . key k, for Q rows and P keys whose sums stay in registers.
template <size_t Q, size_t P>
inline void dot_products(const float* const (&query)[Q], const float* keys, size_t size,
                         float* scores, size_t stride) {
  Vec sum[Q][P] = {};
  size_t d = 0;
  for (; d + W <= size; d += W) {
    Vec key[P];
#pragma GCC unroll 4
    for (size_t p = 0; p < P; p++) key[p] = load(keys + p * size + d);
#pragma GCC unroll 4
    for (size_t q = 0; q < Q; q++) {
      const Vec x = load(query[q] + d);
#pragma GCC unroll 4
      for (size_t p = 0; p < P; p++) sum[q][p] = x * key[p] + sum[q][p];
    }
  }
  for (size_t q = 0; q < Q; q++)
    for (size_t p = 0; p < P; p++) {
      float dot = total(sum[q][p]);
      for (size_t rest = d; rest < size; rest++) dot += query[q][rest] * keys[p * size + rest];
      scores[q * stride + p] = dot;
    }
}

template <size_t Q>
inline void dot_rows(const float* const (&query)[Q], const float* keys, size_t count, size_t size,
                     float* scores, size_t stride) {
  size_t k = 0;
  for (; k + 4 <= count; k += 4)
    dot_products<Q, 4>(query, keys + k * size, size, scores + k, stride);
  for (; k < count; k++)
    dot_products<Q, 1>(query, keys + k * size, size, scores + k, stride);
}

// mean[q] += sum of weight[q][k] * value k, for Q rows.
template <size_t Q, size_t V>
inline void add_values(const float* weights, size_t stride, const float* values, size_t count,
                       size_t size, float* mean) {
  Vec sum[Q][V];
#pragma GCC unroll 4
  for (size_t q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (size_t v = 0; v < V; v++) sum[q][v] = load(mean + q * size + v * W);
  for (size_t k = 0; k < count; k++) {
    Vec value[V];
#pragma GCC unroll 4
    for (size_t v = 0; v < V; v++) value[v] = load(values + k * size + v * W);
#pragma GCC unroll 4
    for (size_t q = 0; q < Q; q++)
#pragma GCC unroll 4
      for (size_t v = 0; v < V; v++)
        sum[q][v] = value[v] * weights[q * stride + k] + sum[q][v];
  }
#pragma GCC unroll 4
  for (size_t q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (size_t v = 0; v < V; v++) store(mean + q * size + v * W, sum[q][v]);
}

template <size_t Q>
inline void value_rows(const float* weights, size_t stride, const float* values, size_t count,
                       size_t size, float* mean) {
  size_t d = 0;
  for (; d + 4 * W <= size; d += 4 * W)
    add_values<Q, 4>(weights, stride, values + d, count, size, mean + d);
  for (; d + W <= size; d += W)
    add_values<Q, 1>(weights, stride, values + d, count, size, mean + d);
  for (; d < size; d++)
    for (size_t q = 0; q < Q; q++)
      for (size_t k = 0; k < count; k++)
        mean[q * size + d] += weights[q * stride + k] * values[k * size + d];
}

float exponential(float x) { return exp_of(all(x))[0]; }

// One row over `count` keys: scores become exp(capped - largest); mean and sum follow `largest`.
inline void soften(float* scores, size_t count, size_t width, float scale, float cap, size_t size,
                   float* most, float* sum, float* mean) {
  for (size_t k = count; k < width; k++) scores[k] = -INFINITY;
  for (size_t k = 0; k < count; k += W)
    store(scores + k, tanh_of(load(scores + k) * (scale / cap)) * cap);
  for (size_t k = count; k < width; k++) scores[k] = -INFINITY;  // whole vectors were written
  Vec high = load(scores);
  for (size_t k = W; k < width; k += W) high = maximum(high, load(scores + k));
  const float before = *most, now = largest(high) > before ? largest(high) : before;
  if (now > before) {
    const float shrink = *sum > 0 ? exponential(before - now) : 0.0f;
    *sum *= shrink;
    for (size_t d = 0; d < size; d++) mean[d] *= shrink;
    *most = now;
  }
  Vec part = {};
  for (size_t k = 0; k < width; k += W) {
    const Vec x = load(scores + k);
    const IntVec seen = x != -INFINITY;  // NaN is seen
    const Vec weight = from_bits(bits<IntVec>(exp_of(x - now)) & seen);
    store(scores + k, weight);
    part += weight;
  }
  *sum += total(part);
}

void attend(const grok1::AttentionShare& share) {
  constexpr size_t width = grok1::kKeysAtOnce;
  const size_t rows = share.tokens * share.heads, size = share.head_size;
  for (size_t row = 0; row < rows; row++) {
    share.largest[row] = -INFINITY;
    share.sum[row] = 0;
  }
  memset(share.mean, 0, rows * size * sizeof *share.mean);
  const auto query = [&](size_t row) {
    return share.query + row / share.heads * share.token_stride + row % share.heads * size;
  };
  const size_t last_seen = share.first_position + share.tokens;
  const size_t end = share.end_key < last_seen ? share.end_key : last_seen;
  for (size_t key = share.first_key; key < end; key += width) {
    const size_t count = end - key < width ? end - key : width;
    const float* keys = share.keys + (key - share.first_key) * size;
    const float* values = share.values + (key - share.first_key) * size;
    size_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      const float* const four[4] = {query(row), query(row + 1), query(row + 2), query(row + 3)};
      dot_rows<4>(four, keys, count, size, share.scores + row * width, width);
    }
    for (; row + 2 <= rows; row += 2) {
      const float* const two[2] = {query(row), query(row + 1)};
      dot_rows<2>(two, keys, count, size, share.scores + row * width, width);
    }
    for (; row < rows; row++) {
      const float* const one[1] = {query(row)};
      dot_rows<1>(one, keys, count, size, share.scores + row * width, width);
    }
    for (row = 0; row < rows; row++) {
      const size_t position = share.first_position + row / share.heads;
      const size_t ahead = position < key ? 0 : position - key + 1;
      float* scores = share.scores + row * width;
      if (ahead == 0)
        memset(scores, 0, width * sizeof *scores);
      else
        soften(scores, ahead < count ? ahead : count, width, share.scale, share.cap, size,
               share.largest + row, share.sum + row, share.mean + row * size);
    }
    for (row = 0; row + 4 <= rows; row += 4)
      value_rows<4>(share.scores + row * width, width, values, count, size,
                    share.mean + row * size);
    for (; row + 2 <= rows; row += 2)
      value_rows<2>(share.scores + row * width, width, values, count, size,
                    share.mean + row * size);
    for (; row < rows; row++)
      value_rows<1>(share.scores + row * width, width, values, count, size,
                    share.mean + row * size);
  }
}

}  // namespace
