// The part of ONNX Runtime's C API that the kernels call, declared by the places of its functions.
//
// OrtApi is a table of functions that only grows: a place, once given, keeps its function. So the
// wheel needs no headers, and one library serves every ONNX Runtime that has version kApiVersion.
// Source of names, signatures and places: onnxruntime_c_api.h (MIT), ORT_API_VERSION 24 and later.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtKernelContext;
struct OrtKernelInfo;

constexpr uint32_t kApiVersion = 24;  // as API_VERSION in plugins/kernels.py
constexpr int kInvalidArgument = 2;   // ORT_INVALID_ARGUMENT

enum ElementType : int {
  kAnyType = 0,  // for an input of a custom op
  kFloat = 1,
  kInt8 = 3,
  kInt64 = 7,
  kFloat16 = 10,
  kBFloat16 = 16,
};

struct OrtApi {
  OrtStatus* (*CreateStatus)(int, const char*);  // place 0
  void* skip1;
  const char* (*GetErrorMessage)(const OrtStatus*);  // 2
  void* skip3[23];
  OrtStatus* (*CreateCustomOpDomain)(const char*, OrtCustomOpDomain**);  // 26
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain*, const struct OrtCustomOp*);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions*, OrtCustomOpDomain*);
  void* skip29[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);  // 51
  void* skip52[8];
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, ElementType*);  // 60
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t);
  void* skip63[2];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);  // 65
  void* skip66[19];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo*, const char*, float*);  // 85
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo*, const char*, int64_t*);
  void* skip87[3];
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext*, size_t, const OrtValue**);  // 90
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext*, size_t, const int64_t*, size_t,
                                        OrtValue**);
  void* skip92;
  void (*ReleaseStatus)(OrtStatus*);  // 93
  void* skip94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);  // 99
  void* skip100[174];
  OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext*, void (*)(void*, size_t),
                                          size_t total, size_t batches, void*);  // 274
};

static_assert(offsetof(OrtApi, AddCustomOpDomain) == 28 * sizeof(void*));
static_assert(offsetof(OrtApi, GetTensorTypeAndShape) == 65 * sizeof(void*));
static_assert(offsetof(OrtApi, KernelContext_GetOutput) == 91 * sizeof(void*));
static_assert(offsetof(OrtApi, KernelContext_ParallelFor) == 274 * sizeof(void*));

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  ElementType (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  ElementType (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, void*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  void* in_place[4];  // not used: memory is shared by binding it
};
