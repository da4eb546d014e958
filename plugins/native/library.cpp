// The library's face: what ONNX Runtime and plugins/kernels.py call, and the choice of variant.
#include <atomic>
#include <cstring>
#include <memory>

#include "custom_op.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace grok1 {

void register_int8_linear(Registry& registry);
void register_moe_experts(Registry& registry);
void register_softcap_attention(Registry& registry);

namespace {

struct Supported {
  const Variant* variants[4];
  size_t count = 0;
  char names[64] = "";

  Supported() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx512 && avx2 && __builtin_cpu_supports("avx512vnni")) add(kAvx512Vnni);
    if (avx512 && avx2) add(kAvx512);
    if (avx2) add(kAvx2);
#endif
    add(kBase);
  }

  void add(const Variant& variant) {
    if (count) strcat(names, " ");
    strcat(names, variant.name);
    variants[count++] = &variant;
  }
};

const Supported& supported() {
  static const Supported all;
  return all;
}

std::atomic<const Variant*> chosen{nullptr};

}  // namespace

const Variant& variant() {
  const Variant* found = chosen.load(std::memory_order_relaxed);
  return found ? *found : *supported().variants[0];
}

char* thread_scratch(int use, size_t bytes) {
  struct Memory {
    std::unique_ptr<char[]> bytes;
    size_t size = 0;
  };
  static thread_local Memory memory[3];
  Memory& found = memory[use];
  if (found.size < bytes) {
    found.bytes.reset();  // not both at once
    found.bytes.reset(new char[bytes + 64]);
    found.size = bytes;
  }
  return found.bytes.get() + (64 - reinterpret_cast<uintptr_t>(found.bytes.get()) % 64);
}

}  // namespace grok1

using namespace grok1;

// Names of the variants that this CPU runs, the best first, a space between.
EXPORTED const char* grok1_supported() { return supported().names; }

// Takes a variant for all kernels from now on; an unknown name changes nothing.
EXPORTED void grok1_select(const char* name) {
  for (size_t i = 0; i < supported().count; i++)
    if (strcmp(supported().variants[i]->name, name) == 0) chosen = supported().variants[i];
}

EXPORTED uint64_t grok1_read_streams(const void* data, size_t bytes) {
  return variant().read(static_cast<const char*>(data), bytes);
}

EXPORTED OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  api = base->GetApi(kApiVersion);
  if (!api) return nullptr;  // too old to be told so: plugins/kernels.py looks at the version first
  static OrtCustomOpDomain* domain = [] {
    OrtCustomOpDomain* made = nullptr;
    if (OrtStatus* status = api->CreateCustomOpDomain("grok1", &made)) api->ReleaseStatus(status);
    return made;
  }();
  static const bool registered = [] {
    try {
      Registry registry(domain);
      register_int8_linear(registry);
      register_moe_experts(registry);
      register_softcap_attention(registry);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }();
  if (!domain || !registered)
    return api->CreateStatus(kInvalidArgument, "the grok1 kernels were not registered");
  return api->AddCustomOpDomain(options, domain);
}
