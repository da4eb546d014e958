// softcap_attention as a native kernel: new keys and values into the cache, then attention over
// what is live of it. See spec.py for the operands; the cache is one memory before and after when
// both are bound to it, else it is copied.
#include <cmath>

#include "custom_op.h"
#include "product.h"

namespace grok1 {

namespace {

constexpr size_t kTokensAtOnce = 8;   // of a prompt, in one task
constexpr size_t kKeysPerTask = 512;  // of a decode step

void write_cache(const AttentionCall& call, size_t row, size_t head) {
  const size_t size = call.head_size, width = call.kv_heads * size;
  for (size_t token = 0; token < call.tokens; token++) {
    const size_t from = (row * call.tokens + token) * width + head * size;
    const size_t slot = static_cast<size_t>(call.start[row]) + token;
    const size_t to = ((row * call.kv_heads + head) * call.slots + slot) * size;
    memcpy(call.k_cache + to, call.key + from, size * sizeof(float));
    memcpy(call.v_cache + to, call.value + from, size * sizeof(float));
  }
}

}  // namespace

void softcap_attention(const AttentionCall& call, const Pool& pool) {
  const size_t size = call.head_size, group = call.heads / call.kv_heads;
  const size_t cached = call.batch * call.kv_heads;
  size_t live = 0;  // positions of the longest row, the new ones included
  for (size_t row = 0; row < call.batch; row++) {
    const size_t end = static_cast<size_t>(call.start[row]) + call.tokens;
    live = end > live ? end : live;
  }
  const auto write = [&](size_t i) { write_cache(call, i / call.kv_heads, i % call.kv_heads); };
  if (call.tokens == 1)
    for (size_t i = 0; i < cached; i++) write(i);
  else
    pool.each(cached, write);

  const size_t spans = pieces(call.tokens, kTokensAtOnce);
  const size_t splits = call.tokens == 1 ? pieces(live, kKeysPerTask) : 1;
  const size_t rows = smaller(call.tokens, kTokensAtOnce) * group;
  const size_t tasks = cached * spans * splits;
  Scratch scratch;
  const size_t largest = scratch.ask<float>(tasks * rows), sum = scratch.ask<float>(tasks * rows);
  const size_t mean = scratch.ask<float>(tasks * rows * size);
  scratch.allocate(1);
  const size_t width = call.heads * size;  // of a token's query, and of y

  pool.each(tasks, [&](size_t task) {
    const size_t split = task % splits, span = task / splits % spans, head = task / splits / spans;
    const size_t row = head / call.kv_heads, first = span * kTokensAtOnce;
    const size_t place = (row * call.tokens + first) * width + head % call.kv_heads * group * size;
    const size_t begin = split * kKeysPerTask;
    const size_t cache = (head * call.slots + begin) * size;
    const size_t tokens = smaller(call.tokens - first, kTokensAtOnce);
    AttentionShare share = {call.query + place,
                            tokens,
                            group,
                            width,
                            size,
                            call.k_cache + cache,
                            call.v_cache + cache,
                            begin,
                            splits == 1 ? live : begin + kKeysPerTask,
                            static_cast<size_t>(call.start[row]) + first,
                            call.scale,
                            call.cap,
                            reinterpret_cast<float*>(
                                thread_scratch(0, rows * kKeysAtOnce * sizeof(float))),
                            scratch.at<float>(largest) + task * rows,
                            scratch.at<float>(sum) + task * rows,
                            scratch.at<float>(mean) + task * rows * size};
    variant().attend(share);
    if (splits > 1) return;
    for (size_t r = 0; r < tokens * group; r++)
      variant().add_scaled(call.y + place + r / group * width + r % group * size,
                           share.mean + r * size, 1.0f / share.sum[r], size, true);
  });
  if (splits == 1) return;

  pool.each(cached, [&](size_t head) {
    const size_t row = head / call.kv_heads;
    const size_t place = row * width + head % call.kv_heads * group * size;
    for (size_t r = 0; r < group; r++) {
      const auto at = [&](size_t split) { return (head * splits + split) * rows + r; };
      float most = -INFINITY, total = 0;
      for (size_t s = 0; s < splits; s++)
        most = std::fmax(most, scratch.at<float>(largest)[at(s)]);
      const auto weight = [&](size_t split) {  // 0 for a split that the row sees nothing of
        const float high = scratch.at<float>(largest)[at(split)];
        return high == -INFINITY ? 0.0f : variant().exponential(high - most);
      };
      for (size_t s = 0; s < splits; s++) total += weight(s) * scratch.at<float>(sum)[at(s)];
      for (size_t s = 0; s < splits; s++)
        variant().add_scaled(call.y + place + r * size, scratch.at<float>(mean) + at(s) * size,
                             weight(s) / total, size, s == 0);
    }
  });
}

namespace {

class SoftcapAttention {
 public:
  static constexpr OpDescription kDescription = {
      "GrokSoftcapAttention",
      6,
      3,
      {kFloat, kFloat, kFloat, kFloat, kFloat, kInt64},
      {kFloat, kFloat, kFloat}};

  explicit SoftcapAttention(const Attributes& attributes)
      : heads_(attributes.integer("num_heads")),
        kv_heads_(attributes.integer("kv_heads")),
        scale_(attributes.number("scale")),
        cap_(attributes.number("cap")) {
    require(kv_heads_ > 0 && heads_ > 0 && heads_ % kv_heads_ == 0,
            "num_heads must be a multiple of kv_heads");
  }

  void compute(const Context& context) const {
    const Tensor query = context.input(0), key = context.input(1), value = context.input(2);
    const Tensor k_cache = context.input(3), v_cache = context.input(4), start = context.input(5);
    require(query.rank == 3 && k_cache.rank == 4 && v_cache.same_shape(k_cache) &&
                key.rank == 3 && value.same_shape(key),
            "query, key, value must be [B, S, H*D] and the caches [B, Hkv, T, D]");
    const size_t batch = query.dim(0), tokens = query.dim(1), slots = k_cache.dim(2);
    const size_t size = k_cache.dim(3);
    require(k_cache.dim(0) == batch && k_cache.dim(1) == kv_heads_ &&
                query.dim(2) == heads_ * size && key.dim(0) == batch && key.dim(1) == tokens &&
                key.dim(2) == kv_heads_ * size && start.size() == batch,
            "query, key, value, caches and start do not fit each other");
    for (size_t row = 0; row < batch; row++)
      require(start.integers()[row] >= 0 &&
                  static_cast<size_t>(start.integers()[row]) + tokens <= slots,
              "start + S must be within the cache's slots");
    float* y = context.output<float>(0, query.shape());
    float* k_out = context.output<float>(1, k_cache.shape());
    float* v_out = context.output<float>(2, v_cache.shape());
    if (k_out != k_cache.data) memcpy(k_out, k_cache.data, k_cache.size() * sizeof(float));
    if (v_out != v_cache.data) memcpy(v_out, v_cache.data, v_cache.size() * sizeof(float));
    if (query.size() == 0) return;
    softcap_attention({query.floats(), key.floats(), value.floats(), k_out, v_out,
                       start.integers(), batch, tokens, slots, heads_, kv_heads_, size, scale_,
                       cap_, y},
                      context.pool());
  }

 private:
  size_t heads_, kv_heads_;
  float scale_, cap_;
};

}  // namespace

void register_softcap_attention(Registry& registry) { registry.add<SoftcapAttention>(); }

}  // namespace grok1
