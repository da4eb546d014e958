// Runs calls of the native kernels without ONNX Runtime. See driver.py, which writes the calls.
//
//     native_driver                                 prints the variants that this CPU runs
//     native_driver VARIANT THREADS CALLS RESULTS   runs the calls of a file
//
// With 0 threads there are two and each runs all tasks: a race, which must be noticed.
// A call is its op, its numbers (dimensions and scale types), and its arrays, each after its size;
// numbers are int64. An array lies in memory of its own, which ends with it. Weights and scales are
// not aligned. Results are the outputs, one behind the other.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

using namespace grok1;

extern "C" const char* grok1_supported();
extern "C" void grok1_select(const char*);

namespace {

class Calls {
 public:
  explicit Calls(const char* path) : file_(path, std::ios::binary) {}

  bool more() { return file_.peek() != std::ifstream::traits_type::eof(); }

  size_t number() {
    int64_t value = 0;
    file_.read(reinterpret_cast<char*>(&value), sizeof value);
    return static_cast<size_t>(value);
  }

  float real() { return *array<float>(); }

  template <class T>
  T* array(size_t offset = 0) {
    const size_t size = number();
    arrays_.emplace_back(new char[offset + size]);
    char* data = arrays_.back().get() + offset;
    file_.read(data, static_cast<std::streamsize>(size));
    return reinterpret_cast<T*>(data);
  }

  Matrix matrix(size_t rows, size_t columns) {
    const size_t groups = number(), type = number();
    const int8_t* codes = array<int8_t>(1);
    const char* scales = array<char>(1);
    return {codes, scales, static_cast<ScaleType>(type), rows, columns, groups};
  }

  float* result(size_t count) {
    arrays_.emplace_back(new char[count * sizeof(float)]);
    return reinterpret_cast<float*>(arrays_.back().get());
  }

  void forget() { arrays_.clear(); }

 private:
  std::ifstream file_;
  std::vector<std::unique_ptr<char[]>> arrays_;
};

void run_threads(const void* asked, size_t count, void (*task)(void*, size_t), void* data) {
  const size_t threads = *static_cast<const size_t*>(asked);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    if (threads == 0)
      for (size_t i = 0; i < count; i++) task(data, i);
    else
      for (size_t i; (i = next++) < count;) task(data, i);
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < (threads ? threads : 2); i++) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

void write(std::ofstream& results, const float* values, size_t count) {
  results.write(reinterpret_cast<const char*>(values),
                static_cast<std::streamsize>(count * sizeof *values));
}

void run_linear(Calls& calls, const Pool& pool, std::ofstream& results) {
  const size_t tokens = calls.number(), rows = calls.number(), columns = calls.number();
  const float* x = calls.array<float>();
  const Matrix matrix = calls.matrix(rows, columns);
  float* y = calls.result(tokens * columns);
  int8_linear({x, tokens, matrix, y}, pool);
  write(results, y, tokens * columns);
}

void run_experts(Calls& calls, const Pool& pool, std::ofstream& results) {
  const size_t tokens = calls.number(), chosen = calls.number(), count = calls.number();
  const size_t model = calls.number(), width = calls.number();
  const float *x = calls.array<float>(), *gates = calls.array<float>();
  const int64_t* experts = calls.array<int64_t>();
  const Matrix gate = calls.matrix(model, width), up = calls.matrix(model, width);
  const Matrix down = calls.matrix(width, model);
  float* y = calls.result(tokens * model);
  moe_experts({x, gates, experts, tokens, chosen, count, gate, up, down, y}, pool);
  write(results, y, tokens * model);
}

void run_attention(Calls& calls, const Pool& pool, std::ofstream& results) {
  AttentionCall call = {};
  call.batch = calls.number();
  call.tokens = calls.number();
  call.slots = calls.number();
  call.heads = calls.number();
  call.kv_heads = calls.number();
  call.head_size = calls.number();
  call.query = calls.array<float>();
  call.key = calls.array<float>();
  call.value = calls.array<float>();
  call.k_cache = calls.array<float>();
  call.v_cache = calls.array<float>();
  call.start = calls.array<int64_t>();
  call.scale = calls.real();
  call.cap = calls.real();
  const size_t size = call.batch * call.tokens * call.heads * call.head_size;
  const size_t cached = call.batch * call.kv_heads * call.slots * call.head_size;
  call.y = calls.result(size);
  softcap_attention(call, pool);
  write(results, call.y, size);
  write(results, call.k_cache, cached);
  write(results, call.v_cache, cached);
}

}  // namespace

int main(int count, char** words) {
  if (count < 5) {
    puts(grok1_supported());
    return 0;
  }
  grok1_select(words[1]);
  if (words[1] != std::string(variant().name)) return 2;
  const size_t threads = strtoul(words[2], nullptr, 10);
  const Pool pool = {run_threads, &threads};
  Calls calls(words[3]);
  std::ofstream results(words[4], std::ios::binary);
  void (*const ops[])(Calls&, const Pool&, std::ofstream&) = {run_linear, run_experts,
                                                               run_attention};
  while (calls.more()) {
    ops[calls.number()](calls, pool, results);
    calls.forget();
  }
  return results.good() ? 0 : 3;
}
