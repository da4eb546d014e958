// A kernel as ONNX Runtime sees it: operands, attributes, threads, and errors by message.
#pragma once

#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "ort_api.h"

namespace grok1 {

inline const OrtApi* api = nullptr;  // set when the library is registered

inline void require(bool right, const char* message) {
  if (!right) throw std::invalid_argument(message);
}

inline void check(OrtStatus* status) {
  if (!status) return;
  const std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw std::runtime_error(message);
}

constexpr size_t kMostAxes = 8;

struct Shape {
  int64_t dims[kMostAxes];
  size_t rank;
};

struct Tensor : Shape {
  const void* data;
  ElementType type;

  size_t dim(size_t axis) const { return static_cast<size_t>(dims[axis]); }
  size_t last() const { return dim(rank - 1); }
  size_t size() const {
    size_t count = 1;
    for (size_t axis = 0; axis < rank; axis++) count *= dim(axis);
    return count;
  }
  const Shape& shape() const { return *this; }
  bool same_shape(const Tensor& other) const {
    return rank == other.rank && memcmp(dims, other.dims, rank * sizeof *dims) == 0;
  }
  const float* floats() const { return static_cast<const float*>(data); }
  const int64_t* integers() const { return static_cast<const int64_t*>(data); }
};

class Context {
 public:
  explicit Context(OrtKernelContext* context) : context_(context) {}

  Tensor input(size_t index) const {
    const OrtValue* value;
    OrtTensorTypeAndShapeInfo* info;
    Tensor tensor;
    check(api->KernelContext_GetInput(context_, index, &value));
    check(api->GetTensorTypeAndShape(value, &info));
    check(api->GetDimensionsCount(info, &tensor.rank));
    const bool fits = tensor.rank <= kMostAxes;
    if (fits) check(api->GetDimensions(info, tensor.dims, tensor.rank));
    check(api->GetTensorElementType(info, &tensor.type));
    api->ReleaseTensorTypeAndShapeInfo(info);
    require(fits, "an operand has more than 8 axes");
    void* data;
    check(api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    tensor.data = data;
    return tensor;
  }

  template <class T>
  T* output(size_t index, const Shape& shape) const {
    OrtValue* value;
    void* data;
    check(api->KernelContext_GetOutput(context_, index, shape.dims, shape.rank, &value));
    check(api->GetTensorMutableData(value, &data));
    return static_cast<T*>(data);
  }

  Pool pool() const {
    return {[](const void* self, size_t count, void (*task)(void*, size_t), void* data) {
              check(api->KernelContext_ParallelFor(static_cast<const OrtKernelContext*>(self),
                                                   task, count, count, data));
            },
            context_};
  }

 private:
  OrtKernelContext* context_;
};

class Attributes {
 public:
  explicit Attributes(const OrtKernelInfo* info) : info_(info) {}

  size_t integer(const char* name) const {
    int64_t value;
    check(api->KernelInfoGetAttribute_int64(info_, name, &value));
    require(value >= 0, "an attribute is negative");
    return static_cast<size_t>(value);
  }
  float number(const char* name) const {
    float value;
    check(api->KernelInfoGetAttribute_float(info_, name, &value));
    return value;
  }

 private:
  const OrtKernelInfo* info_;
};

// The last two axes of `codes` with the scales of the same, of the first of any leading axes.
inline Matrix matrix_of(const Tensor& codes, const Tensor& scales) {
  require(codes.rank >= 2 && scales.rank == codes.rank, "a matrix must be [.., K, N] with [.., R, N]");
  for (size_t axis = 0; axis + 2 < codes.rank; axis++)
    require(codes.dims[axis] == scales.dims[axis], "scales must have their matrices' first axes");
  const size_t rows = codes.dim(codes.rank - 2), columns = codes.last();
  const size_t groups = scales.dim(scales.rank - 2);
  require(rows > 0 && columns > 0, "a matrix must have rows and columns");
  require(scales.last() == columns, "scales must have a matrix's columns");
  require(groups > 0 && rows % groups == 0, "rows must divide into the groups of scales");
  require(scales.type == kFloat || scales.type == kFloat16 || scales.type == kBFloat16,
          "scales must be float32, float16 or bfloat16");
  const ScaleType type = scales.type == kFloat     ? ScaleType::kFloat32
                         : scales.type == kFloat16 ? ScaleType::kFloat16
                                                   : ScaleType::kBFloat16;
  return {static_cast<const int8_t*>(codes.data), scales.data, type, rows, columns, groups};
}

struct OpDescription {
  const char* name;
  size_t inputs, outputs;
  ElementType input_types[9], output_types[3];
};

// Makes ONNX Runtime's description of an op from a class with kDescription, a constructor from
// Attributes, and compute(Context).
class Registry {
 public:
  explicit Registry(OrtCustomOpDomain* domain) : domain_(domain) {}

  template <class Kernel>
  void add() {
    static OrtCustomOp op = describe<Kernel>();
    check(api->CustomOpDomain_Add(domain_, &op));
  }

 private:
  static OrtStatus* failed(const OpDescription& description, const char* what) {
    return api->CreateStatus(kInvalidArgument, (std::string(description.name) + ": " + what).c_str());
  }

  template <class Kernel>
  static OrtCustomOp describe() {
    static constexpr const OpDescription& text = Kernel::kDescription;
    OrtCustomOp op = {};
    op.version = kApiVersion;
    op.GetName = [](const OrtCustomOp*) { return text.name; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
    op.GetInputTypeCount = [](const OrtCustomOp*) { return text.inputs; };
    op.GetOutputTypeCount = [](const OrtCustomOp*) { return text.outputs; };
    op.GetInputType = [](const OrtCustomOp*, size_t i) { return text.input_types[i]; };
    op.GetOutputType = [](const OrtCustomOp*, size_t i) { return text.output_types[i]; };
    op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return 0; };   // required
    op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return 0; };  // required
    op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };       // the CPU's
    op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
    op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                           void** kernel) -> OrtStatus* {
      try {
        *kernel = new Kernel(Attributes(info));
      } catch (const std::exception& error) {
        return failed(text, error.what());
      }
      return nullptr;
    };
    op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) -> OrtStatus* {
      try {
        static_cast<const Kernel*>(kernel)->compute(Context(context));
      } catch (const std::exception& error) {
        return failed(text, error.what());
      }
      return nullptr;
    };
    op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    return op;
  }

  OrtCustomOpDomain* domain_;
};

}  // namespace grok1
