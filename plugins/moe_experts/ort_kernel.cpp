// moe_experts as a native kernel: each expert's matrices meet the rows it was chosen for, and an
// expert without rows is not read. See spec.py for the operands.
#include <vector>

#include "custom_op.h"
#include "product.h"

namespace grok1 {

namespace {

// Choices that go through the experts at once: bounds the memory between their matrices.
constexpr size_t kChoicesAtOnce = 512;

Matrix of_expert(Matrix matrix, size_t expert) {
  const size_t scale = matrix.scale_type == ScaleType::kFloat32 ? 4 : 2;
  matrix.codes += expert * matrix.rows * matrix.columns;
  matrix.scales = static_cast<const char*>(matrix.scales) +
                  expert * matrix.groups * matrix.columns * scale;
  return matrix;
}

// What a choice became: a row of an expert's products.
struct Place {
  size_t job, row;
};

// Tasks of several products in one go.
struct Tasks {
  std::vector<size_t> ends;

  void add(size_t tasks) { ends.push_back((ends.empty() ? 0 : ends.back()) + tasks); }
  size_t count() const { return ends.empty() ? 0 : ends.back(); }
  // The product that task i belongs to; i becomes its number there.
  size_t find(size_t& i) const {
    size_t product = 0;
    while (i >= ends[product]) product++;
    if (product) i -= ends[product - 1];
    return product;
  }
};

void run_all(const std::vector<Product>& products, const Pool& pool) {
  Tasks tasks;
  for (const Product& product : products) tasks.add(product.tasks());
  pool.each(tasks.count(), [&](size_t i) {
    const Product& product = products[tasks.find(i)];
    product.run(i);
  });
}

void pack_all(const std::vector<Rows>& rows, const Pool& pool) {
  Tasks tasks;
  for (const Rows& some : rows) tasks.add(some.pack_tasks());
  pool.each(tasks.count(), [&](size_t i) {
    const Rows& some = rows[tasks.find(i)];
    some.pack(i);
  });
}

void some_tokens(const ExpertsCall& call, const Pool& pool) {
  std::vector<std::vector<size_t>> chosen_rows;
  std::vector<size_t> experts;
  std::vector<Place> places(call.tokens * call.chosen);
  for (size_t expert = 0; expert < call.count; expert++) {
    std::vector<size_t> rows;
    for (size_t i = 0; i < places.size(); i++)
      if (call.experts[i] == static_cast<int64_t>(expert)) {
        places[i] = {experts.size(), rows.size()};
        rows.push_back(i / call.chosen);
      }
    if (rows.empty()) continue;
    experts.push_back(expert);
    chosen_rows.push_back(std::move(rows));
  }

  const size_t jobs = experts.size();
  Scratch scratch;
  std::vector<Rows> inputs, hidden;
  std::vector<Product> gate_up, down;  // gate_up: gate and up of each job in turn
  inputs.reserve(2 * jobs);            // products point at rows
  hidden.reserve(jobs);
  for (size_t job = 0; job < jobs; job++) {
    const std::vector<size_t>& rows = chosen_rows[job];
    const Matrix gate = of_expert(call.gate, experts[job]);
    const Matrix up = of_expert(call.up, experts[job]);
    inputs.emplace_back(call.x, gate.rows, rows.data(), rows.size(), gate.groups, scratch);
    gate_up.emplace_back(inputs.back(), gate, nullptr, scratch);
    if (up.groups != gate.groups)
      inputs.emplace_back(call.x, up.rows, rows.data(), rows.size(), up.groups, scratch);
    gate_up.emplace_back(inputs.back(), up, nullptr, scratch);
  }
  scratch.allocate(1);
  for (Rows& rows : inputs) rows.place(scratch);
  for (Product& product : gate_up) product.place(scratch);
  pack_all(inputs, pool);
  run_all(gate_up, pool);

  Scratch second;
  for (size_t job = 0; job < jobs; job++) {
    const Matrix matrix = of_expert(call.down, experts[job]);
    hidden.emplace_back(gate_up[2 * job].row(0), matrix.rows, nullptr, chosen_rows[job].size(),
                        matrix.groups, second);
    down.emplace_back(hidden.back(), matrix, nullptr, second);
  }
  second.allocate(2);
  for (Rows& rows : hidden) rows.place(second);
  for (Product& product : down) product.place(second);

  const size_t width = call.down.rows, shares = pieces(width, kColumnsPerTask);
  Tasks rows_of;
  for (const Rows& rows : hidden) rows_of.add(rows.count());
  pool.each(rows_of.count() * shares, [&](size_t i) {
    const size_t first = i % shares * kColumnsPerTask;
    const size_t end = smaller(first + kColumnsPerTask, width);
    size_t row = i / shares;
    const size_t job = rows_of.find(row);
    const float* up = gate_up[2 * job + 1].finish(row, first, end);
    gate_up[2 * job].finish(row, first, end);
    variant().activate(gate_up[2 * job].row(row) + first, up + first, end - first);
  });
  pack_all(hidden, pool);
  run_all(down, pool);

  const size_t columns = call.down.columns, parts = pieces(columns, kColumnsPerTask);
  pool.each(call.tokens * parts, [&](size_t i) {
    const size_t token = i / parts, first = i % parts * kColumnsPerTask;
    const size_t end = smaller(first + kColumnsPerTask, columns);
    float* y = call.y + token * columns;
    for (size_t choice = 0; choice < call.chosen; choice++) {
      const Place place = places[token * call.chosen + choice];
      const float* product = down[place.job].finish(place.row, first, end);
      variant().add_scaled(y + first, product + first, call.gates[token * call.chosen + choice],
                           end - first, choice == 0);
    }
  });
}

}  // namespace

void moe_experts(const ExpertsCall& call, const Pool& pool) {
  const size_t at_once = kChoicesAtOnce / call.chosen ? kChoicesAtOnce / call.chosen : 1;
  for (size_t first = 0; first < call.tokens; first += at_once) {
    ExpertsCall part = call;
    part.tokens = smaller(call.tokens - first, at_once);
    part.x += first * call.gate.rows;
    part.gates += first * call.chosen;
    part.experts += first * call.chosen;
    part.y += first * call.down.columns;
    some_tokens(part, pool);
  }
}

namespace {

class MoeExperts {
 public:
  static constexpr OpDescription kDescription = {
      "GrokMoeExperts",
      9,
      1,
      {kFloat, kFloat, kInt64, kInt8, kAnyType, kInt8, kAnyType, kInt8, kAnyType},
      {kFloat}};

  explicit MoeExperts(const Attributes&) {}

  void compute(const Context& context) const {
    const Tensor x = context.input(0), gates = context.input(1), experts = context.input(2);
    for (const size_t weight : {3, 5, 7})
      require(context.input(weight).rank == 3 &&
                  context.input(weight).dims[0] == context.input(3).dims[0],
              "gate_weight, up_weight and down_weight must be [E, K, N] of the same experts");
    const Matrix gate = matrix_of(context.input(3), context.input(4));
    const Matrix up = matrix_of(context.input(5), context.input(6));
    const Matrix down = matrix_of(context.input(7), context.input(8));
    const size_t count = static_cast<size_t>(context.input(3).dims[0]);
    require(x.rank >= 1 && x.last() == gate.rows && up.rows == gate.rows &&
                up.columns == gate.columns && down.rows == gate.columns,
            "x, gate_weight, up_weight and down_weight do not fit each other");
    require(gates.same_shape(experts) && gates.rank == x.rank && gates.last() > 0 &&
                gates.size() / gates.last() == x.size() / gate.rows,
            "gates and experts must have the tokens of x and as many choices");
    for (size_t i = 0; i < experts.size(); i++)
      require(experts.integers()[i] >= 0 && experts.integers()[i] < static_cast<int64_t>(count),
              "experts holds a number that is no expert's");
    Shape shape = x.shape();
    shape.dims[shape.rank - 1] = static_cast<int64_t>(down.columns);
    float* y = context.output<float>(0, shape);
    moe_experts({x.floats(), gates.floats(), experts.integers(), x.size() / gate.rows,
                 gates.last(), count, gate, up, down, y},
                context.pool());
  }
};

}  // namespace

void register_moe_experts(Registry& registry) { registry.add<MoeExperts>(); }

}  // namespace grok1
