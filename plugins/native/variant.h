// The kernels of one instruction set, that of the including file. See kernels.h for what each does.
#pragma once

#include <cmath>

#include "attention.h"
#include "block.h"
#include "float_strips.h"
#include "kernels.h"
#include "streams.h"

namespace {

void activate(float* gate, const float* up, size_t count) {
  size_t n = 0;
  for (; n + W <= count; n += W) store(gate + n, gelu(load(gate + n)) * load(up + n));
  for (; n < count; n++) gate[n] = gelu(all(gate[n]))[0] * up[n];
}

void add_scaled(float* y, const float* x, float factor, size_t count, bool first) {
  for (size_t n = 0; n < count; n++) y[n] = first ? x[n] * factor : y[n] + x[n] * factor;
}

// Four streams of plain loads: what the memory gives at most to a thread.
uint64_t read(const char* data, size_t bytes) {
  constexpr size_t kStreams = 4, kStep = 4 * sizeof(IntVec);
  const size_t stream = bytes / kStreams / kStep * kStep;
  IntVec sum[4] = {};
  for (size_t at = 0; at < stream; at += kStep)
    for (size_t s = 0; s < kStreams; s++)
      for (size_t i = 0; i < 4; i++) {
        IntVec v;
        memcpy(&v, data + s * stream + at + i * sizeof v, sizeof v);
        sum[i] += v;
      }
  const IntVec all_sums = sum[0] + sum[1] + sum[2] + sum[3];
  uint64_t total_of = 0;
  for (size_t i = 0; i < W; i++) total_of += static_cast<uint32_t>(all_sums[i]);
  for (size_t at = stream * kStreams; at < bytes; at++) total_of += static_cast<uint8_t>(data[at]);
  return total_of;
}

template <class Strips>
constexpr grok1::Variant variant_of(const char* name) {
  return {name,
          Strips::kTile,
          Strips::kElementBytes,
          Strips::kFactors,
          streams,
          sum_parts,
          Strips::pack,
          block<Strips>,
          block_scratch<Strips>,
          activate,
          add_scaled,
          attend,
          exponential,
          read};
}

}  // namespace
