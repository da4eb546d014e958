#include "variant.h"

namespace grok1 {
const Variant kAvx512 = variant_of<FloatStrips>("avx512");
}  // namespace grok1
