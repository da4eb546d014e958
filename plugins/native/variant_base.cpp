// The instruction set that every CPU of the architecture has: NEON on arm64, SSE2 on x86-64.
#include "variant.h"

namespace grok1 {
#if defined(__aarch64__)
const Variant kBase = variant_of<FloatStrips>("neon");
#else
const Variant kBase = variant_of<FloatStrips>("portable");
#endif
}  // namespace grok1
