// What the kernels of all ops are made of: matrices, threads, scratch, and the instruction sets.
//
// Shape letters are those of export/model.py: K rows and N columns of a matrix, R groups of rows
// with scales of their own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace grok1 {

enum class ScaleType { kFloat32, kFloat16, kBFloat16 };

// An int8 matrix [K, N] with scales [R, N]. Nothing need be aligned.
struct Matrix {
  const int8_t* codes;
  const void* scales;
  ScaleType scale_type;
  size_t rows, columns, groups;

  size_t group_rows() const { return rows / groups; }
};

// Calls task(data, i) for every i below count, on any threads, and returns when all are done.
struct Pool {
  void (*run)(const void* self, size_t count, void (*task)(void*, size_t), void* data);
  const void* self;

  template <class Task>
  void each(size_t count, Task task) const {
    if (count == 1) return task(size_t{0});
    if (count) run(self, count, [](void* data, size_t i) { (*static_cast<Task*>(data))(i); }, &task);
  }
};

// Rows of x, at most, for which a matrix is read as streams; more go by blocks of its columns.
constexpr size_t kStreamRows = 8;
// Rows of a matrix that a block of the other way takes at once. A group ends a block.
constexpr size_t kBlockRows = 256;
// Keys whose attention is computed at once.
constexpr size_t kKeysAtOnce = 64;

// Activations [M, K] as `block` takes them: tiles of rows, in each the rows' elements for one k side
// by side. Variants differ in the elements, and may keep factors for each row and block of k.
struct PackedRows {
  char* data;
  float* factors;  // [M, blocks, some]
  size_t count, columns, groups;

  size_t group_columns() const { return columns / groups; }
  size_t blocks_per_group() const { return (group_columns() + kBlockRows - 1) / kBlockRows; }
  size_t blocks() const { return groups * blocks_per_group(); }
  // Groups start at a multiple of 4, for variants that take several k at once.
  size_t stride() const { return groups * ((group_columns() + 3) / 4 * 4); }
};

// A share of the attention of one key/value head: some tokens times G heads over a range of keys.
struct AttentionShare {
  const float* query;  // of the first token and head
  size_t tokens, heads, token_stride, head_size;
  const float *keys, *values;  // of the first key; one key is head_size floats
  size_t first_key, end_key;   // positions of the range
  size_t first_position;       // of the first token: it sees keys up to its own position
  float scale, cap;
  float* scores;               // scratch [tokens * heads, kKeysAtOnce]
  float *largest, *sum, *mean; // results: [tokens * heads], the same, [tokens * heads, head_size]
};

// One instruction set. Sums have one order, set by the shapes: any threads give the same bits.
struct Variant {
  const char* name;
  size_t tile_rows;      // of x that `block` takes at once
  size_t element_bytes;  // of a packed activation
  size_t block_factors;  // of a row's block
  // partial[m][n] = sum of x[m][k] * w[k][n] over k < rows, for m < count <= kStreamRows.
  void (*streams)(const float* x, size_t x_stride, size_t count, const int8_t* w, size_t rows,
                  size_t columns, float* partial);
  // y[n] = sum over groups of scale * (sum of the group's parts), for n from first to end.
  void (*sum_parts)(const float* parts, size_t parts_per_group, size_t part_stride,
                    const Matrix& matrix, size_t first, size_t end, float* y);
  // Packs `count` rows of x, a tile, of which `first` is the first row's number.
  void (*pack_tile)(const float* const* rows, size_t first, size_t count,
                    const PackedRows& packed);
  // y[m][n] for all rows and n from first to end, scales included; y has its row 0, column 0.
  void (*block)(const PackedRows& x, const Matrix& matrix, size_t first, size_t end, float* y,
                size_t y_stride, char* scratch);
  // Bytes of scratch that `block` needs for so many rows and columns.
  size_t (*block_scratch)(size_t rows, size_t columns);
  // gate = gelu(gate) * up, gelu in its tanh form.
  void (*activate)(float* gate, const float* up, size_t count);
  // y += factor * x, or y = factor * x.
  void (*add_scaled)(float* y, const float* x, float factor, size_t count, bool first);
  void (*attend)(const AttentionShare& share);
  // exp(x) of one number, as `attend` computes it.
  float (*exponential)(float x);
  uint64_t (*read)(const char* data, size_t bytes);
};

extern const Variant kBase;
#if defined(__x86_64__)
extern const Variant kAvx2;
extern const Variant kAvx512;
extern const Variant kAvx512Vnni;
#endif

const Variant& variant();  // the one in use
// Scratch of the calling thread, kept from call to call: it grows and is never given back.
char* thread_scratch(int use, size_t bytes);

// The three ops without ONNX Runtime: what ort_kernel.cpp calls, and tests.
struct LinearCall {
  const float* x;  // [T, K]
  size_t tokens;
  Matrix matrix;
  float* y;  // [T, N]
};
void int8_linear(const LinearCall& call, const Pool& pool);

struct ExpertsCall {
  const float* x;          // [T, M]
  const float* gates;      // [T, C]
  const int64_t* experts;  // [T, C]
  size_t tokens, chosen, count;
  Matrix gate, up, down;  // of expert 0; the others follow it
  float* y;               // [T, M]
};
void moe_experts(const ExpertsCall& call, const Pool& pool);

struct AttentionCall {
  const float *query, *key, *value;  // [B, S, Hq*D], [B, S, Hkv*D] twice
  float *k_cache, *v_cache;          // [B, Hkv, T, D], written in place
  const int64_t* start;              // [B]
  size_t batch, tokens, slots, heads, kv_heads, head_size;
  float scale, cap;
  float* y;  // [B, S, Hq*D]
};
void softcap_attention(const AttentionCall& call, const Pool& pool);

}  // namespace grok1
