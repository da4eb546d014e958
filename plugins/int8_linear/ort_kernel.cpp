// int8_linear as a native kernel: y = x @ W. See spec.py for its operands.
#include "custom_op.h"
#include "product.h"

namespace grok1 {

void int8_linear(const LinearCall& call, const Pool& pool) {
  if (call.tokens == 0) return;
  Scratch scratch;
  Rows rows(call.x, call.matrix.rows, nullptr, call.tokens, call.matrix.groups, scratch);
  Product product(rows, call.matrix, call.y, scratch);
  scratch.allocate(1);
  rows.place(scratch);
  product.place(scratch);
  pool.each(rows.pack_tasks(), [&](size_t task) { rows.pack(task); });
  pool.each(product.tasks(), [&](size_t task) { product.run(task); });
  if (!rows.streamed()) return;
  const size_t columns = product.columns(), shares = pieces(columns, kColumnsPerTask);
  pool.each(call.tokens * shares, [&](size_t i) {
    const size_t first = i % shares * kColumnsPerTask;
    product.finish(i / shares, first, smaller(first + kColumnsPerTask, columns));
  });
}

namespace {

class Int8Linear {
 public:
  static constexpr OpDescription kDescription = {
      "GrokInt8Linear", 3, 1, {kFloat, kInt8, kAnyType}, {kFloat}};

  explicit Int8Linear(const Attributes&) {}

  void compute(const Context& context) const {
    const Tensor x = context.input(0);
    require(context.input(1).rank == 2, "weight must be [K, N]");
    const Matrix matrix = matrix_of(context.input(1), context.input(2));
    require(x.rank >= 1 && x.last() == matrix.rows, "x must have as many columns as weight rows");
    Shape shape = x.shape();
    shape.dims[shape.rank - 1] = static_cast<int64_t>(matrix.columns);
    float* y = context.output<float>(0, shape);
    int8_linear({x.floats(), x.size() / matrix.rows, matrix, y}, context.pool());
  }
};

}  // namespace

void register_int8_linear(Registry& registry) { registry.add<Int8Linear>(); }

}  // namespace grok1
