#include "variant.h"

namespace grok1 {
const Variant kAvx2 = variant_of<FloatStrips>("avx2");
}  // namespace grok1
