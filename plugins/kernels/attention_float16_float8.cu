#include "attention_instances.cuh"

namespace dflash {

AttentionVariants attention_variants_float16_float8() { return variants<__half, true>(); }

}  // namespace dflash
